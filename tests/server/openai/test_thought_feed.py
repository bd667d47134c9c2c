"""Thought and answer only grow in a stream, and end as they are told at once."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.frontend.thinking import ThinkSplit, ThinkTexts
from zipage_lang.runtime.messages import Usage
from zipage_lang.runtime.think_params import ThinkParams
from zipage_lang.runtime.think_state import ThinkState
from zipage_lang.runtime.think_tags import ThinkTags
from zipage_lang.runtime.vocabulary import Vocabulary
from zipage_lang.server.openai.thought_feed import ThoughtFeed

VOCABULARY = Vocabulary(
    (*(bytes([byte]) for byte in range(128)), b"<think>", b"</think>", b"</th", b"ink>", b"\n\n"),
    frozenset(),
)


def outputs_of(tokens, think):
    """As the engine and the frontend tell them: one more token at a time."""
    state = ThinkState(ThinkTags(think, VOCABULARY))
    texts = ThinkTexts(think.start_text, think.end_text)
    split, text, ids = ThinkSplit(texts), "", []
    for place, token in enumerate(tokens):
        if state.forced is not None:
            token = state.forced
        piece = VOCABULARY.pieces[token].decode()
        state.accept(token)
        split.add(len(piece))
        text += piece
        ids.append(token)
        thinking, answer = split.part(text, state.num_thinking)
        yield RequestOutput(
            request_id="r",
            prompt_token_ids=[1],
            text=text,
            text_delta=piece,
            thinking=thinking,
            answer=answer,
            token_ids=list(ids),
            finish_reason="stop" if place == len(tokens) - 1 else None,
            usage=Usage(thinking_tokens=state.num_thinking),
        )


def read(outputs, think):
    feed = ThoughtFeed(think)
    parts = [feed.feed(output) for output in outputs]
    return "".join(thought for thought, _ in parts), "".join(answer for _, answer in parts)


def spelled(text):
    return VOCABULARY.spell(text.encode())


PARTS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "</th",
        "<thi",
        "<",
        "\n",
        "\n\n",
        "hm",
        " ",
        "<tool_call>",
        "<tool",
        "4",
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(PARTS, min_size=1, max_size=10).map("".join),
    starts_inside=st.booleans(),
    by_bytes=st.booleans(),
    cap=st.sampled_from([None, 0, 3]),
)
def test_a_stream_ends_as_the_whole_is_told(text, starts_inside, by_bytes, cap):
    think = ThinkParams(starts_inside=starts_inside, max_tokens=cap)
    tokens = list(text.encode()) if by_bytes else spelled(text)
    outputs = list(outputs_of(tokens, think))
    assert read(outputs, think) == read(outputs[-1:], think)


@pytest.mark.parametrize(
    ("text", "starts_inside", "told"),
    [
        ("<think>\nhm\n</think>\n\n4", False, ("hm", "4")),
        ("hm\n</think>\n\n4\n", True, ("hm", "4\n")),
        ("4", False, ("", "4")),
        ("\n4", False, ("", "\n4")),
        ("<think>hm", False, ("hm", "")),
        ("<think>hm</th", False, ("hm</th", "")),
        ("<thin", False, ("", "<thin")),
        ("<think>hm\n<tool_call>x", False, ("hm", "<tool_call>x")),
        ("<think>\n\n</think>\n\n4", False, ("", "4")),
    ],
)
def test_tags_and_the_newlines_around_them_are_told_to_nobody(text, starts_inside, told):
    think = ThinkParams(starts_inside=starts_inside)
    outputs = list(outputs_of(list(text.encode()), think))
    assert read(outputs, think) == told
    assert read(outputs[-1:], think) == told


def test_without_thinking_everything_is_answer():
    outputs = list(outputs_of(list(b"<think>a"), ThinkParams()))
    plain = [dataclasses.replace(output, answer=output.text, usage=Usage()) for output in outputs]
    assert read(plain, None) == ("", "<think>a")
