"""Text from tokens, piece by piece. Knows nothing of engines."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_support.byte_fallback import byte_fallback_bpe

from zipage_lang.frontend.detokenizer import REPLACEMENT, WindowDetokenizer

TRICKY_TEXTS = [
    "plain words, one after another",
    "  two leading spaces\n\tand a tab ",
    "Füchse größer naïve",
    "你好世界 日本語テキスト",
    "family 👨‍👩‍👧‍👦 flag 🇩🇪 wave 👋🏽!",
    "a real replacement mark \ufffd inside",
]


def streamed(detokenizer, token_ids):
    pieces = [detokenizer.feed([token_id]) for token_id in token_ids]
    return [*pieces, detokenizer.flush()]


@pytest.fixture(scope="module")
def sentencepiece():
    return byte_fallback_bpe()


@pytest.mark.parametrize("text", TRICKY_TEXTS)
def test_streamed_text_is_the_text_that_was_encoded(tokenizer, text):
    pieces = streamed(tokenizer.new_detokenizer(), tokenizer.encode(text))
    assert "".join(pieces) == text


def test_half_a_character_is_never_shown(tokenizer):
    token_ids = tokenizer.encode("你好 👋🏽 Füchse")
    pieces = streamed(tokenizer.new_detokenizer(), token_ids)
    assert len(token_ids) > len("你好 👋🏽 Füchse"), "the text must straddle tokens"
    assert not any(REPLACEMENT in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_tokens_stream_to_what_they_decode_to_as_a_whole(tokenizer, data, skip):
    ids = st.integers(0, tokenizer.vocab_size + 5)
    token_ids = data.draw(st.lists(ids, max_size=40))
    pieces = streamed(tokenizer.new_detokenizer(skip), token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_any_text_streams_through_byte_tokens(tokenizer, text):
    pieces = streamed(tokenizer.new_detokenizer(), tokenizer.encode(text))
    assert "".join(pieces) == text


def test_special_tokens_are_left_out_or_shown_by_name(tokenizer):
    token_ids = [tokenizer.token_id("<|start|>"), *tokenizer.encode("hi")]
    assert "".join(streamed(tokenizer.new_detokenizer(True), token_ids)) == "hi"
    assert "".join(streamed(tokenizer.new_detokenizer(False), token_ids)) == "<|start|>hi"


def test_an_unfinished_character_is_marked_at_the_end(tokenizer):
    first_byte_only = [next(i for i in range(330) if tokenizer.token_bytes(i) == b"\xe4")]
    detokenizer = tokenizer.new_detokenizer()
    assert detokenizer.feed(first_byte_only) == ""
    assert detokenizer.flush() == REPLACEMENT


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="the a,.!héß你👋 ", max_size=120))
def test_a_window_streams_what_the_whole_decode_gives(sentencepiece, text):
    token_ids = sentencepiece.encode(text).ids
    pieces = streamed(WindowDetokenizer(sentencepiece.decode), token_ids)
    assert "".join(pieces) == sentencepiece.decode(token_ids)


@pytest.mark.parametrize("text", ["the end, a hat. " * 60, "你好世界" * 60])
def test_a_window_decodes_few_tokens_each_time_however_long_the_text(sentencepiece, text):
    lengths = []

    def decode(token_ids):
        lengths.append(len(token_ids))
        return sentencepiece.decode(token_ids)

    token_ids = sentencepiece.encode(text).ids
    assert "".join(streamed(WindowDetokenizer(decode), token_ids)) == sentencepiece.decode(
        token_ids
    )
    assert len(token_ids) > 500
    assert max(lengths) <= 40


def test_endless_broken_bytes_are_shown_and_decoded_in_a_short_window(sentencepiece):
    lengths = []

    def decode(token_ids):
        lengths.append(len(token_ids))
        return sentencepiece.decode(token_ids)

    broken = [sentencepiece.token_to_id("<0xFF>")] * 400
    pieces = streamed(WindowDetokenizer(decode), broken)
    assert "".join(pieces) == REPLACEMENT * 400
    assert pieces[20] == REPLACEMENT
    assert max(lengths) <= 40


def test_tokens_that_are_left_out_do_not_part_the_halves_of_a_character(sentencepiece):
    halves = [sentencepiece.token_to_id(name) for name in ("<0xD6>", "<0x9C>")]
    left_out = sentencepiece.get_vocab_size() + 7

    def decode(token_ids):
        return sentencepiece.decode([id_ for id_ in token_ids if id_ != left_out])

    detokenizer = WindowDetokenizer(decode, lambda id_: id_ == left_out)
    token_ids = [halves[0], *[left_out] * 500, halves[1]]
    assert "".join(streamed(detokenizer, token_ids)) == "\u059c"


def test_text_after_broken_bytes_keeps_its_leading_space(sentencepiece):
    token_ids = [sentencepiece.token_to_id("<0xFF>")] * 50 + sentencepiece.encode("b the hat").ids
    pieces = streamed(WindowDetokenizer(sentencepiece.decode), token_ids)
    assert "".join(pieces) == sentencepiece.decode(token_ids)
