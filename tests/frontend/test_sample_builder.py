"""One sample's tokens become text, cut at stop strings and counted. Knows nothing of engines."""

import pytest

from zipage_lang.frontend.sample_builder import SampleBuilder
from zipage_lang.frontend.stop_strings import StopMatcher
from zipage_lang.runtime.messages import KVUsage, LogprobEntry, TokenOutput, Usage


@pytest.fixture
def build(tokenizer):
    def make(*stops, min_tokens=0):
        matcher = StopMatcher(stops, min_tokens) if stops else None
        return SampleBuilder("r", [7, 8], 0, tokenizer.new_detokenizer(), matcher)

    return make


def sent(token_ids, **fields):
    return TokenOutput(request_id="r", token_ids=token_ids, **fields)


def test_deltas_join_to_the_text(build, tokenizer):
    builder, deltas = build(), []
    for token_id in tokenizer.encode("größer 你好"):
        builder.feed(sent([token_id]))
        deltas.append(builder.snapshot().text_delta)
    builder.feed(sent([], finish_reason="length"))
    output = builder.snapshot()
    assert "".join([*deltas, output.text_delta]) == output.text == "größer 你好"
    assert output.token_ids == tokenizer.encode("größer 你好")
    assert (output.finish_reason, output.stop_reason) == ("length", None)


def test_the_stop_token_is_counted_but_has_no_text(build, tokenizer):
    newline = tokenizer.encode("\n")
    builder = build()
    token_ids = tokenizer.encode("one") + newline
    builder.feed(sent(token_ids, finish_reason="stop", stop_token_id=newline[0]))
    output = builder.snapshot()
    assert (output.text, output.token_ids) == ("one", token_ids)
    assert (output.finish_reason, output.stop_reason) == ("stop", newline[0])


def test_a_stop_string_cuts_text_and_tokens_and_what_comes_later_is_ignored(build, tokenizer):
    builder = build("STOP")
    before = tokenizer.encode("fox STOP")
    builder.feed(sent(before + tokenizer.encode(" more")))
    assert builder.hit_stop_string
    assert builder.num_tokens == len(before)
    builder.feed(sent(tokenizer.encode(" and more")))
    assert builder.snapshot().text_delta == ""
    builder.feed(sent([], finish_reason="stop", kv=KVUsage(resident_len=5)))
    output = builder.snapshot()
    assert (output.text, output.token_ids) == ("fox ", before)
    assert (output.finish_reason, output.stop_reason) == ("stop", "STOP")
    assert output.kv.resident_len == 5


def test_a_stop_string_in_the_last_tokens_wins_over_length(build, tokenizer):
    builder = build("STOP")
    token_ids = tokenizer.encode("a STOP b")
    usage = Usage(prompt_tokens=2, completion_tokens=len(token_ids))
    builder.feed(sent(token_ids, finish_reason="length", usage=usage))
    output = builder.snapshot()
    assert (output.text, output.finish_reason, output.stop_reason) == ("a ", "stop", "STOP")
    assert output.usage.completion_tokens == len(output.token_ids) < len(token_ids)
    assert output.usage.prompt_tokens == 2


def test_what_was_held_back_comes_with_the_end(build, tokenizer):
    builder = build("STOP")
    builder.feed(sent(tokenizer.encode("x ST")))
    assert builder.snapshot().text == "x "
    builder.feed(sent([], finish_reason="length"))
    assert builder.snapshot().text_delta == "ST"
    assert builder.snapshot().text == "x ST"


def test_an_unfinished_character_comes_with_the_end(build, tokenizer):
    builder = build("STOP")
    cut = tokenizer.encode("a 👋")[:-1]
    builder.feed(sent(cut))
    assert builder.snapshot().text == "a "
    builder.feed(sent([], finish_reason="length"))
    assert builder.snapshot().text == "a \ufffd"


def test_min_tokens_delays_the_stop_string(build, tokenizer):
    builder = build("fox", min_tokens=len(tokenizer.encode("fox fox")))
    builder.feed(sent(tokenizer.encode("fox fox fox")))
    assert builder.snapshot().text == "fox "


def test_logprobs_stay_in_step_with_the_tokens(build, tokenizer):
    builder = build("STOP")
    token_ids = tokenizer.encode("a STOP b")
    entries = [LogprobEntry(token_id, -1.0, 1, []) for token_id in token_ids]
    builder.feed(sent(token_ids[:2], logprobs=entries[:2]))
    builder.feed(sent(token_ids[2:], logprobs=entries[2:]))
    output = builder.snapshot()
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    assert len(output.token_ids) < len(token_ids)


def test_a_snapshot_does_not_change_when_the_sample_goes_on(build, tokenizer):
    builder = build()
    builder.feed(sent(tokenizer.encode("fox")))
    early = builder.snapshot()
    builder.feed(sent(tokenizer.encode(" jumps")))
    assert early.text == "fox"
    assert early.token_ids == tokenizer.encode("fox")
