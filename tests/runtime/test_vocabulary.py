"""Token bytes read from a model's own files are the bytes that its tokenizer prints."""

import json

import pytest

from zipage_lang.runtime.vocabulary import Vocabulary, load_vocabulary


def write(folder, described):
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    return folder


def test_byte_level_names_become_bytes_and_added_tokens_stay_text(tmp_path):
    described = {
        "model": {"vocab": {"a": 0, "Ġb": 1, "Ċ": 2, "Ã©": 3}},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": [
            {"id": 4, "content": "<|eos|>", "special": True},
            {"id": 5, "content": "</think>", "special": False},
        ],
    }
    vocabulary = load_vocabulary(write(tmp_path, described), 8)
    assert vocabulary.pieces[:6] == (b"a", b" b", b"\n", "é".encode(), b"<|eos|>", b"</think>")
    assert vocabulary.pieces[6:] == (b"", b"")
    assert vocabulary.special == {4}


def test_sentence_pieces_become_bytes(tmp_path):
    described = {
        "model": {"vocab": [["<unk>", 0.0], ["\u2581hi", -1.0], ["<0x0A>", -2.0], ["é", -3.0]]},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]},
        "added_tokens": [{"id": 0, "content": "<unk>", "special": True}],
    }
    vocabulary = load_vocabulary(write(tmp_path, described), 3)
    assert vocabulary.pieces == (b"<unk>", b" hi", b"\n")


@pytest.mark.parametrize("text", [None, "{", '{"model": {}}', "[]"])
def test_a_missing_or_broken_file_is_named(tmp_path, text):
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"can't be read from .*put the model's tokenizer\.json"):
        load_vocabulary(tmp_path, 8)


def test_the_gguf_vocabulary_is_the_tokenizers(smollm2):
    from zipage_lang.frontend.tokenizer import load_tokenizer

    vocabulary, tokenizer = load_vocabulary(smollm2, 49152), load_tokenizer(smollm2)
    assert vocabulary.special == tokenizer.special_token_ids
    assert [tokenizer.token_bytes(i) for i in range(49152)] == list(vocabulary.pieces)
    closing = "\n</think>\n\n"
    assert list(vocabulary.spell(closing.encode())) == tokenizer.encode(closing)


def test_what_no_token_spells_is_told():
    vocabulary = Vocabulary((b"a", b"bc", b""), frozenset())
    assert vocabulary.spell(b"abca") == (0, 1, 0)
    with pytest.raises(ValueError, match="no token for b'b'"):
        vocabulary.spell(b"ab")
    with pytest.raises(ValueError, match="token id 3 is outside the vocabulary of 3"):
        vocabulary.bytes_of([1, 3])
