"""Parts of answers that need no server: bytes of tokens, log-probabilities, usage, traits."""

import json
import types

import pytest

from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.frontend.tokenizer import load_tokenizer
from zipage_lang.runtime.messages import LogprobEntry, Usage
from zipage_lang.server.openai.call_reader import CallPiece
from zipage_lang.server.openai.chat_logprobs import LOWEST, ChatLogprobs
from zipage_lang.server.openai.completion_logprobs import CompletionLogprobs
from zipage_lang.server.openai.model_traits import read_traits
from zipage_lang.server.openai.response_items import OutputItems
from zipage_lang.server.openai.sample_reader import Told
from zipage_lang.server.openai.thought_feed import ThoughtFeed
from zipage_lang.server.openai.tool_formats import HERMES, LLAMA
from zipage_lang.server.openai.usage import UsageCount

TEXT = "añ你🙂"


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    """Byte level: each byte is a token, and so are <eos> and a special tool tag."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: place for place, character in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    folder = tmp_path_factory.mktemp("bytes")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def word_tokenizer(tmp_path_factory):
    """SentencePiece's kind: spaces are written as a mark, unknown bytes have names."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "\u2581hello", "\u2581you", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: place for place, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    folder = tmp_path_factory.mktemp("words")
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)
    return load_tokenizer(folder)


def outputs_of(tokenizer, token_ids, end=None):
    """A stream of one token after the other; `end` is a token without text."""
    detokenizer, text = tokenizer.new_detokenizer(), ""
    ids = [*token_ids, *([] if end is None else [end])]
    for place in range(1, len(ids) + 1):
        is_end = place > len(token_ids)
        text += "" if is_end else detokenizer.feed([ids[place - 1]])
        yield RequestOutput(
            request_id="r",
            prompt_token_ids=[1, 2],
            text=text,
            answer=text,
            token_ids=ids[:place],
            logprobs=[LogprobEntry(i, -0.25, 1, [(i, -0.25), (0, -1e999)]) for i in ids[:place]],
            finish_reason="stop" if place == len(ids) else None,
            usage=Usage(prompt_tokens=2, completion_tokens=place, cached_tokens=1),
        )


def test_entries_of_tokens_that_are_parts_of_characters_add_up_to_the_text(byte_tokenizer):
    ids = byte_tokenizer.encode(TEXT)
    eos = byte_tokenizer.token_id("<eos>")
    outputs = list(outputs_of(byte_tokenizer, ids, eos))
    logprobs = ChatLogprobs(byte_tokenizer, skip_special_tokens=True)
    feed, told = ThoughtFeed(None), []
    for output in outputs:
        feed.feed(output)
        entries = logprobs.feed(output, feed)
        told += entries
        shown = b"".join(bytes(entry["bytes"]) for entry in told)
        assert shown == output.text.encode()
    assert len(told) == len(ids) > len(TEXT)
    assert told[1]["token"] == "\ufffd"
    whole = ChatLogprobs(byte_tokenizer, skip_special_tokens=True)
    assert whole.feed(outputs[-1], feed) == told


def test_completion_lists_name_every_token_and_merge_what_reads_alike(byte_tokenizer):
    ids = byte_tokenizer.encode(TEXT)
    eos = byte_tokenizer.token_id("<eos>")
    *_, last = outputs_of(byte_tokenizer, ids, eos)
    lists = CompletionLogprobs(byte_tokenizer, skip_special_tokens=True).feed(last)
    assert lists["tokens"][:3] == ["a", "bytes:\\xc3", "bytes:\\xb1"]
    assert lists["tokens"][-1] == "<eos>"
    assert lists["text_offset"] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4]
    assert min(lists["top_logprobs"][1].values()) == LOWEST
    json.dumps(lists, allow_nan=False)


def test_pieces_of_other_vocabularies_have_their_true_bytes(word_tokenizer):
    hello, byte = word_tokenizer.token_id("\u2581hello"), word_tokenizer.token_id("<0xE4>")
    entry = [LogprobEntry(token_id, -0.5, 1, []) for token_id in (hello, byte)]
    output = RequestOutput(
        request_id="r",
        prompt_token_ids=[1],
        text=" hello\ufffd",
        answer=" hello\ufffd",
        token_ids=[hello, byte],
        logprobs=entry,
        finish_reason="length",
    )
    logprobs = ChatLogprobs(word_tokenizer, skip_special_tokens=True)
    told = logprobs.feed(output, ThoughtFeed(None))
    assert [bytes(one["bytes"]) for one in told] == [b" hello", b"\xe4"]


def test_usage_counts_a_prompt_once_and_every_sample():
    count = UsageCount()
    for prompt, sample, cached in ((0, 1, 9), (0, 0, 3), (1, 0, 4)):
        usage = Usage(
            prompt_tokens=10, completion_tokens=2, cached_tokens=cached, thinking_tokens=1
        )
        output = RequestOutput(
            request_id="r",
            prompt_token_ids=[7] * 10,
            sample_index=sample,
            token_ids=[1, 2],
            usage=usage,
        )
        count.note(output, prompt)
    body = count.body()
    assert (body["prompt_tokens"], body["completion_tokens"], body["total_tokens"]) == (20, 6, 26)
    assert body["prompt_tokens_details"] == {"cached_tokens": 7}
    assert body["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert count.body(hides_output=True)["total_tokens"] == 20


def traits_of(folder, template="", tokens=(), special=(), tool_format="auto"):
    names = {token: place for place, token in enumerate(tokens)}
    tokenizer = types.SimpleNamespace(
        chat_template=template, token_id=names.get, special_token_ids={names[s] for s in special}
    )
    ready = types.SimpleNamespace(model_path=str(folder))
    return read_traits(types.SimpleNamespace(tokenizer=tokenizer, ready=ready), tool_format)


def test_a_model_says_itself_how_it_thinks_calls_and_samples(tmp_path):
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "do_sample": true, "min_p": null}'
    )
    qwen = traits_of(tmp_path, "{% if tools %}<tool_call></tool_call>{% endif %}</think>")
    assert qwen.think_tags == ("<think>", "</think>")
    assert (qwen.template_takes_tools, qwen.tool_syntax) == (True, HERMES)
    assert qwen.sampling == {"temperature": 0.6, "top_k": 20}
    llama = traits_of(tmp_path / "model.gguf", "{% if tools %}<|python_tag|>{% endif %}")
    assert (llama.tool_syntax, llama.think_tags, llama.sampling) == (LLAMA, None, {})
    plain = traits_of(tmp_path, "{{ messages }}", tokens=["</think>"], tool_format="llama")
    assert (plain.template_takes_tools, plain.tool_syntax) == (False, LLAMA)
    assert plain.think_tags is not None
    assert not plain.hides_tool_tags
    assert traits_of(tmp_path, "", ["<tool_call>"], ["<tool_call>"]).hides_tool_tags


@pytest.mark.parametrize("said", ["{", "5", "[1]", '{"top_p": 0}', '{"temperature": "hot"}'])
def test_a_broken_generation_config_only_costs_the_defaults(tmp_path, said):
    (tmp_path / "generation_config.json").write_text(said)
    assert traits_of(tmp_path).sampling == {}


def test_a_response_grows_item_by_item_and_its_events_say_so():
    items = OutputItems()
    events = items.feed(Told(thought="hm"))
    events += items.feed(Told(thought=" so", pieces=["The ", "answer"]))
    events += items.feed(Told(pieces=[CallPiece(0, name="f"), CallPiece(0, arguments="{}")]))
    events += items.feed(Told(pieces=[CallPiece(1, name="g")]))
    events += items.finish("incomplete")
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in items.items] == kinds
    thought, message, *calls = items.items
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm so"}]
    assert message["content"][0]["text"] == "The answer"
    assert [(call["name"], call["arguments"]) for call in calls] == [("f", "{}"), ("g", "")]
    assert [item["status"] for item in items.items] == ["completed"] * 3 + ["incomplete"]
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    assert all(event["item"]["status"] == "in_progress" for event in added)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == items.items
    for event in events:
        if event["type"].endswith(".delta"):
            assert event["item_id"] == items.items[event["output_index"]]["id"]


def test_a_response_without_a_word_has_an_empty_message():
    items = OutputItems()
    items.finish("completed")
    assert [item["content"][0]["text"] for item in items.items] == [""]
