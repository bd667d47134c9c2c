"""The scripted backend itself: replies, failures, logprobs; and grammars without an engine."""

import dataclasses
import re
from typing import Literal

import pytest

import zipage_lang as zipage
from zipage_lang.testing import Reply, ScriptedBackend, WordTokenizer


def ask(script, *parts, **options):
    backend = ScriptedBackend(script, **options)

    @zipage.function
    def program(s):
        for part in parts or ("q", zipage.gen("a")):
            s += part

    return program.run(backend=backend), backend


class TestReplies:
    def test_by_the_end_of_the_prompt(self):
        state, _ = ask({"q": "by ending"})
        assert state["a"] == "by ending"

    def test_by_a_pattern_anywhere_in_the_prompt(self):
        state, _ = ask({re.compile("^long"): "by pattern"}, "long before the end", zipage.gen("a"))
        assert state["a"] == "by pattern"

    def test_by_a_function_of_the_call(self):
        state, _ = ask(lambda call: Reply(f"{call.prompt}/{call.sampling.max_tokens}"))
        assert state["a"] == "q/128"

    def test_in_the_order_of_the_calls(self):
        state, _ = ask(["one", "two"], zipage.gen("a"), zipage.gen("b"))
        assert (state["a"], state["b"]) == ("one", "two")

    def test_a_prompt_without_a_reply_is_named(self):
        state, _ = ask({"elsewhere": "x"})
        with pytest.raises(AssertionError, match="prompt that ends 'q'"):
            state["a"]

    def test_a_failure_comes_behind_the_text_before_it(self):
        state, _ = ask(Reply("some", error=RuntimeError("cut off")))
        with pytest.raises(RuntimeError, match="cut off"):
            state["a"]


class TestLogprobs:
    def test_drawn_tokens_have_those_of_the_script(self):
        def logprob(context, token):
            return -float(len(context) + len(token))

        part = "q" + zipage.gen("a", logprobs=0)
        state, _ = ask("one two", part, tokenizer=WordTokenizer(), token_logprob=logprob)
        drawn = [entry.logprob for entry in state.meta("a").logprobs]
        assert drawn[:2] == [-4.0, -8.0]

    def test_there_are_none_where_nobody_asked(self):
        assert ask("x")[0].meta("a").logprobs is None


@dataclasses.dataclass
class Point:
    x: int
    label: Literal["a", "b"]


@pytest.mark.parametrize(
    ("grammar", "text", "fits"),
    [
        (int, "42", True),
        (int, " -7.", True),
        (int, "4 2", False),
        (float, "2.5e3", True),
        (Literal["yes", "no"], "no", True),
        (Literal["yes", "no"], "noo", False),
        (Point, '{"x": 1, "label": "b"}', True),
        (Point, '{"x": 1, "label": "c"}', False),
        (Point, '{"x": 1,\n\n\n"label": "b"}', False),
        (list[int], "[1, 2]", True),
        (zipage.gen("a", regex="[ab]+"), "abba", True),
        (zipage.gen("a", regex="[ab]+"), "abc", False),
        (zipage.gen("a", ebnf='root ::= "x" root | "y"'), "xxy", True),
        (zipage.SamplingParams(json_schema={"type": "boolean"}), "true", True),
    ],
)
def test_match_says_what_a_grammar_lets_through(grammar, text, fits):
    assert zipage.testing.match(grammar, text) is fits


def test_match_needs_a_grammar():
    with pytest.raises(ValueError, match="no grammar"):
        zipage.testing.match(zipage.gen("a"), "x")


def test_all_that_a_typed_gen_may_draw_is_read_as_a_value():
    """Whatever of these the grammar admits must parse: no admitted text may end in a ParseError."""
    texts = ["0", " 0", "-0", "12;", "9" * 18, "1.", "1.5)", "-.5", "1e5", "true", " false", "NaN"]
    for wanted in (int, float, bool):
        admitted = [text for text in texts if zipage.testing.match(wanted, text)]
        assert admitted
        for text in admitted:
            state, _ = ask(text, zipage.gen("a", type=wanted))
            assert isinstance(state["a"], wanted)
