"""Typed gens: what each type asks of the engine, what its text becomes, and what does not parse."""

import dataclasses
import enum
import json
import re
from typing import Any, Literal

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zipage_lang as zipage
from zipage_lang.testing import Reply, ScriptedBackend, WordTokenizer
from zipage_lang.types import quoted_type, value_type


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


@dataclasses.dataclass
class Path:
    points: list[Point]
    color: Color


class User(pydantic.BaseModel):
    name: str
    age: int = pydantic.Field(ge=0)


def field(kind, wanted):
    return dict(value_type(wanted).constraint)[kind]


@pytest.mark.parametrize(
    ("wanted", "text", "value"),
    [
        (int, " 42", 42),
        (int, "-7", -7),
        (float, "2.5", 2.5),
        (float, "1e-3", 0.001),
        (bool, "true", True),
        (bool, " False", False),
        (Literal["yes", "no"], " yes", "yes"),
        (Literal[1, 2, None], "null", None),
        (Literal["a.b", "a*"], "a.b", "a.b"),
        (Color, "blue", Color.BLUE),
    ],
)
def test_what_the_regex_of_a_plain_type_admits_is_read_as_its_value(wanted, text, value):
    kind = value_type(wanted)
    assert re.fullmatch(field("regex", wanted), text)
    assert kind.read(text) == value


@pytest.mark.parametrize(
    ("wanted", "text"),
    [(int, "007"), (int, "4.5"), (float, "."), (bool, "maybe"), (Color, "green"), (int, "")],
)
def test_the_regex_of_a_plain_type_admits_nothing_else(wanted, text):
    assert not re.fullmatch(field("regex", wanted), text)


def test_literals_with_special_characters_are_quoted_in_the_regex():
    assert not re.fullmatch(field("regex", Literal["a.b"]), "axb")
    assert re.fullmatch(field("regex", Literal["(1+1)?"]), "(1+1)?")


@pytest.mark.parametrize(
    ("wanted", "text", "value"),
    [
        (Point, '{"x": 1, "y": 2.5}', Point(1, 2.5)),
        (
            Path,
            '{"points": [{"x": 1, "y": 0}], "color": "red"}',
            Path([Point(1, 0.0)], Color.RED),
        ),
        (list[int], "[1, 2]", [1, 2]),
        (list[Color], '["red"]', [Color.RED]),
        (dict[str, int], '{"a": 1}', {"a": 1}),
        (int | None, "null", None),
        (User, '{"name": "Ada", "age": 36}', User(name="Ada", age=36)),
        (list[User], '[{"name": "Ada", "age": 36}]', [User(name="Ada", age=36)]),
    ],
)
def test_other_types_are_json_by_a_schema(wanted, text, value):
    kind = value_type(wanted)
    assert isinstance(json.loads(field("json_schema", wanted)), dict)
    assert kind.read(text) == value


def test_a_string_takes_any_text_and_a_quoted_one_a_json_string():
    assert value_type(str).constraint == ()
    assert quoted_type().read(' "a b"') == "a b"
    assert re.fullmatch(dict(quoted_type().constraint)["regex"], r'"say \"hi\""')


@pytest.mark.parametrize("wanted", [object, Any, 3, complex, Literal[" x"], "int"])
def test_a_type_that_can_not_be_described_is_refused_where_gen_is_written(wanted):
    with pytest.raises(ValueError, match=r"type=|values"):
        zipage.gen("x", type=wanted)


def test_type_and_another_grammar_do_not_go_together():
    with pytest.raises(ValueError, match="leave regex= out"):
        zipage.gen("x", type=int, regex="[0-9]")
    with pytest.raises(ValueError, match="same word"):
        zipage.gen("x", type=int, dtype=int)


def run(script, *parts, **options):
    @zipage.function
    def program(s):
        for part in parts:
            s += part

    return program.run(backend=ScriptedBackend(script, **options))


def test_the_constraint_travels_with_the_call_and_the_value_is_parsed():
    backend = ScriptedBackend("42")
    state = zipage.function(lambda s: s.append("2*21=" + zipage.gen("n", type=int))).run(
        backend=backend
    )
    assert state["n"] == 42
    assert state.text() == "2*21=42"
    assert backend.calls[0].sampling.regex == field("regex", int)


def test_a_schema_travels_as_json_schema():
    backend = ScriptedBackend('{"x": 1}')
    state = zipage.function(lambda s: s.append(zipage.gen("p", type=Point))).run(backend=backend)
    assert state["p"] == Point(1)
    sent = json.loads(backend.calls[0].sampling.json_schema)
    assert sent == json.loads(field("json_schema", Point))


def test_the_mark_that_ends_a_number_leaves_the_text_and_stays_in_meta():
    backend = ScriptedBackend(["42.", "x"])
    program = zipage.function(
        lambda s: s.append("n=" + zipage.gen("n", type=int) + " ok" + zipage.gen("m"))
    )
    state = program.run(backend=backend)
    assert (state["n"], state.meta("n").text) == (42, "42.")
    assert backend.calls[1].prompt == "n=42 ok"


def test_a_value_that_was_cut_off_raises_where_it_is_read_and_the_program_goes_on():
    state = run(['{"x": 1', "rest"], zipage.gen("p", type=Point, max_tokens=3), zipage.gen("after"))
    with pytest.raises(zipage.ParseError, match="cut off by max_tokens") as raised:
        state["p"]
    assert raised.value.text == '{"x'
    assert state["after"] == "rest"
    assert state.error() is None
    assert state.meta("p").text == '{"x'


def test_several_samples_give_a_list_of_values():
    state = run(["1", "2", "3"], zipage.gen("n", type=int, n=3))
    assert state["n"] == [1, 2, 3]


def test_a_branch_whose_value_does_not_parse_is_seen_by_the_join():
    @zipage.function
    def program(s, on_error):
        branches = s.fork(3)
        branches += lambda index: str(index) + zipage.gen("n", type=int)
        branches.join(on_error=on_error)

    backend = ScriptedBackend({"0": "10", "1": "eleven", "2": "12"})
    with pytest.raises(zipage.ParseError, match="eleven"):
        program.run("raise", backend=backend)
    first, second, third = program.run("keep", backend=backend)["n"]
    assert (first, third) == (10, 12)
    assert isinstance(second, zipage.ParseError)
    assert program.run("drop", backend=backend)["n"] == [10, 12]


def test_dtype_and_the_short_forms_are_typed_gens():
    state = run(
        ["1", '"Ada"', "2.5"],
        zipage.gen_int("i"),
        zipage.gen_string("s"),
        zipage.gen("f", dtype=float),
    )
    assert [state["i"], state["s"], state["f"]] == [1, "Ada", 2.5]
    assert state.text() == '1"Ada"2.5'


def test_a_typed_stream_gives_the_text_as_it_comes():
    program = zipage.function(lambda s: s.append(zipage.gen("n", type=int)))
    state = program.run(backend=ScriptedBackend(Reply("42")), stream=True)
    assert "".join(state.text_iter("n")) == "42"
    assert state["n"] == 42


class TestSeparateReasoning:
    def test_the_thought_leaves_the_text_and_nothing_else_does(self):
        state = run(
            ["<think>hm, so</think>\nyes", "x"],
            zipage.user("sure?"),
            zipage.assistant(
                zipage.separate_reasoning("Well: " + zipage.gen("a") + "!", model_type="qwen3")
            ),
        )
        assert state["a"] == "yes"
        assert state["a_reasoning_content"] == "hm, so"
        assert state.messages()[-1]["content"] == "Well: yes!"
        assert "hm" not in state.text()

    def test_answers_keep_their_own_tokens(self):
        backend = ScriptedBackend(["<think>so </think> yes sir", "x"], tokenizer=WordTokenizer())
        program = zipage.function(
            lambda s: s.append("Q" + zipage.separate_reasoning(zipage.gen("a")) + zipage.gen("b"))
        )
        state = program.run(backend=backend)
        assert backend.calls[1].token_ids[1:] == state.meta("a").token_ids[2:-1]

    def test_a_mark_that_the_template_opened_is_taken_back(self):
        backend = ScriptedBackend(["so</think>yes", "x"])
        program = zipage.function(
            lambda s: s.append(
                "Q<think>\n" + zipage.separate_reasoning(zipage.gen("a")) + "." + zipage.gen("b")
            )
        )
        state = program.run(backend=backend)
        assert state["a"] == "yes"
        assert backend.calls[1].prompt == "Qyes."

    def test_a_thought_without_an_end_has_no_answer(self):
        state = run("<think>on and on", zipage.separate_reasoning(zipage.gen("a")))
        assert (state["a"], state["a_reasoning_content"]) == ("", "on and on")

    def test_a_text_without_marks_is_all_answer(self):
        state = run("just yes", zipage.separate_reasoning(zipage.gen("a")))
        assert (state["a"], state["a_reasoning_content"]) == ("just yes", "")

    def test_the_answer_may_be_typed_and_there_may_be_several(self):
        state = run(
            ["<think>a</think>1", "<think>b</think>2"],
            zipage.separate_reasoning(zipage.gen("n", n=2, type=int)),
        )
        assert state["n"] == [1, 2]
        assert state["n_reasoning_content"] == ["a", "b"]

    def test_an_unknown_family_of_models_is_refused(self):
        with pytest.raises(ValueError, match="deepseek-r1"):
            zipage.separate_reasoning(zipage.gen("a"), model_type="gpt-9")


class TestThinking:
    """`gen(think=...)`: the engine watches; the text keeps the thought, the value does not."""

    def test_the_value_is_the_answer_and_meta_has_the_thought(self):
        state = run("<think>hm</think>\n\nyes", "Q ", zipage.gen("a", think={"max_tokens": 9}))
        assert (state["a"], state.meta("a").thinking) == ("yes", "hm")
        assert state.text() == "Q <think>hm</think>\n\nyes"

    def test_a_typed_answer_is_read_behind_the_thought(self):
        think = zipage.ThinkParams(max_tokens=9)
        state = run("<think>6 * 7 = 42</think>43.", zipage.gen("a", type=int, think=think))
        assert state["a"] == 43
        assert state.text().endswith("</think>43")

    def test_a_thought_that_never_ends_gives_no_value(self):
        think = zipage.ThinkParams(starts_inside=True)
        state = run("6 * 7", zipage.gen("a", type=int, think=think))
        with pytest.raises(zipage.ParseError, match="'' is no int"):
            state["a"]

    def test_a_field_that_is_not_known_is_refused_where_gen_is_written(self):
        with pytest.raises(ValueError, match="max_tokens"):
            zipage.gen("a", think={"max_token": 9})


@given(st.integers(min_value=-(10**18) + 1, max_value=10**18 - 1))
def test_every_whole_number_of_18_digits_is_admitted_and_read(number):
    assert re.fullmatch(field("regex", int), f" {number}.")
    assert value_type(int).read(value_type(int).without_end_marks(f" {number}.")) == number


@given(st.text(min_size=1, max_size=12).map(str.strip).filter(bool))
def test_every_literal_text_is_admitted_by_its_own_regex_only_as_it_stands(text):
    wanted = Literal[text, "other"]
    assert re.fullmatch(field("regex", wanted), text)
    assert value_type(wanted).read(text) == text
    assert re.fullmatch(field("regex", wanted), text + "x") is None or text + "x" == "other"
