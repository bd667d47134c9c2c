"""Thinking and answer are parted at a token, tags taken off; stop strings are for the answer."""

import pytest

from zipage_lang.frontend.sample_builder import SampleBuilder
from zipage_lang.frontend.stop_strings import StopMatcher
from zipage_lang.frontend.thinking import ThinkSplit, ThinkTexts
from zipage_lang.runtime.messages import TokenOutput, Usage
from zipage_lang.runtime.think_params import ThinkParams


@pytest.fixture
def build(tokenizer):
    def make(*stops, **think):
        texts = ThinkTexts.of(ThinkParams(**think), lambda ids: tokenizer.decode(ids, False))
        matcher = StopMatcher(stops) if stops else None
        return SampleBuilder("r", [7], 0, tokenizer.new_detokenizer(), matcher, ThinkSplit(texts))

    return make


def feed(builder, token_ids, num_thinking, **fields):
    """Token by token, as the engine tells it; thinking grows with each token while it lasts."""
    snapshots = []
    for place, token_id in enumerate(token_ids, start=1):
        is_last = place == len(token_ids)
        usage = Usage(completion_tokens=place, thinking_tokens=min(place, num_thinking))
        output = TokenOutput(request_id="r", token_ids=[token_id], usage=usage)
        if is_last:
            output = TokenOutput(request_id="r", token_ids=[token_id], usage=usage, **fields)
        builder.feed(output)
        snapshots.append(builder.snapshot())
    return snapshots


def test_the_parts_are_told_apart_at_the_token(build, tokenizer):
    thought, answer = tokenizer.encode("<think>größer?</think>\n\n"), tokenizer.encode("ja 你好")
    snapshots = feed(build(), thought + answer, len(thought), finish_reason="length")
    final = snapshots[-1]
    assert final.text == "<think>größer?</think>\n\nja 你好"
    assert (final.thinking, final.answer) == ("größer?", "ja 你好")
    assert final.num_thinking_tokens == len(thought)
    assert snapshots[len(thought) - 1].answer == ""
    assert "".join(snapshot.text_delta for snapshot in snapshots) == final.text


def test_an_output_that_ends_while_thinking_has_no_answer(build, tokenizer):
    thought = tokenizer.encode("hm, 1")
    final = feed(build(starts_inside=True), thought, 99, finish_reason="length")[-1]
    assert (final.thinking, final.answer) == ("hm, 1", "")


def test_without_thinking_the_answer_is_the_whole_text(build, tokenizer):
    final = feed(build(), tokenizer.encode("fox"), 0, finish_reason="length")[-1]
    assert (final.thinking, final.answer, final.num_thinking_tokens) == ("", "fox", 0)


def test_without_thinking_control_the_answer_is_the_whole_text(tokenizer):
    builder = SampleBuilder("r", [7], 0, tokenizer.new_detokenizer(), None)
    final = feed(builder, tokenizer.encode("</think> fox"), 0, finish_reason="length")[-1]
    assert (final.thinking, final.answer) == ("", "</think> fox")


def test_a_stop_string_in_thinking_is_ordinary_text(build, tokenizer):
    thought, answer = tokenizer.encode("STOP?</think>"), tokenizer.encode("go STOP now")
    builder = build("STOP", starts_inside=True)
    final = feed(builder, thought + answer, len(thought), finish_reason="length")[-1]
    assert final.text == "STOP?</think>go "
    assert (final.thinking, final.answer) == ("STOP?", "go ")
    assert (final.finish_reason, final.stop_reason) == ("stop", "STOP")


def test_what_a_stop_string_held_back_is_shown_before_the_thought_goes_on(build, tokenizer):
    token_ids = tokenizer.encode("<think>a</think>b")
    builder = build("<thinking>")
    for place, token_id in enumerate(token_ids, start=1):
        num_thinking = place if place >= len(tokenizer.encode("<think>")) else 0
        usage = Usage(thinking_tokens=min(num_thinking, len(token_ids) - 1))
        builder.feed(TokenOutput(request_id="r", token_ids=[token_id], usage=usage))
    assert builder.snapshot().text == "<think>a</think>b"
    assert (builder.snapshot().thinking, builder.snapshot().answer) == ("a", "b")


def test_tags_may_be_given_as_tokens(build, tokenizer):
    (start,), (end,) = tokenizer.encode("!"), tokenizer.encode("?")
    builder = build(start_token_ids=[start], end_token_ids=[end])
    final = feed(builder, tokenizer.encode("!fox?dog"), 99, finish_reason="length")[-1]
    assert final.thinking == "fox"
