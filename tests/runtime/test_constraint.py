"""Outputs drawn at random under a constraint: they match their grammar, and think as bounded."""

import json
import random
import re

import pydantic
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from zipage_lang.runtime.constraint import UNSPELT
from zipage_lang.runtime.constraints import Constraints
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.think_params import ThinkParams
from zipage_lang.runtime.token_bits import unpack
from zipage_lang.runtime.vocabulary import Vocabulary

WORDS = [b"ab", b"abc", b"12", b" a", b'": ', b'{"', b"</", b"think", b">", b">\n", b"<th", b"ink>"]
WORDS += [b"\n\n", b"true", "é".encode(), b"\xe4\xbd", b"bab", b"<tool_", b"call>", b"a<tool_call>"]
# Of the bytes that begin a long character only those in WORDS: xgrammar lets overlong ones pass.
BYTES = [bytes([byte]) if byte < 0xC0 else b"" for byte in range(256)]
EOS, START, END = 256 + len(WORDS), 257 + len(WORDS), 258 + len(WORDS)
PLAIN = Vocabulary((*BYTES, *WORDS, b"<|eos|>", b"<|start|>", b"", b""), frozenset({EOS, EOS + 1}))
TAGGED = Vocabulary((*BYTES, *WORDS, b"<|eos|>", b"<think>", b"</think>"), frozenset({EOS}))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}


class Shape(pydantic.BaseModel):
    kind: str = pydantic.Field(pattern="^[a-c]{1,3}$")
    sides: int = pydantic.Field(ge=1, le=9)
    is_flat: bool
    parent: "Shape | None" = None


@pytest.fixture(scope="module")
def plain():
    return Constraints(lambda: PLAIN, [EOS])


@pytest.fixture(scope="module")
def tagged():
    return Constraints(lambda: TAGGED, [EOS])


def allowed(constraint, vocabulary):
    num_tokens = len(vocabulary.pieces)
    bits = torch.full((1, -(-num_tokens // 32)), -1, dtype=torch.int32)
    constraint.fill(bits, 0)
    return [token_id for token_id in unpack(bits[0].numpy()) if token_id < num_tokens]


def draw(constraints, sampling, rng, num_tokens, favour=()):
    """Tokens drawn evenly from what is allowed, up to the end of sequence; and the constraint."""
    vocabulary = constraints._whole_vocabulary()
    constraint, tokens = constraints.make(sampling, []), []
    while len(tokens) < num_tokens and EOS not in tokens:
        choices = allowed(constraint, vocabulary)
        assert choices, f"nothing may follow {vocabulary.bytes_of(tokens)!r}"
        favoured = [token_id for token_id in favour if token_id in choices]
        tokens.append(rng.choice(favoured or choices))
        constraint.accept(tokens[-1])
        assert constraint.standing.error is None
    return tokens, constraint


def text_of(tokens, vocabulary=PLAIN):
    return vocabulary.bytes_of([t for t in tokens if t != EOS]).decode(errors="surrogateescape")


def regexes():
    atoms = st.sampled_from(["a", "b", "ab", "[a-c]", r"\d", ".", "[^a]", r"\.", "é", r"\w", r"\s"])
    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}"])).map(
                lambda pair: f"(?:{pair[0]}){pair[1]}"
            ),
        ),
        max_leaves=6,
    )


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(pattern=regexes(), seed=st.integers(0, 2**16), num_tokens=st.integers(1, 12))
def test_an_output_matches_its_regex_or_can_still_be_completed(plain, pattern, seed, num_tokens):
    sampling, rng = SamplingParams(regex=pattern), random.Random(seed)
    plain.prepare(sampling)
    tokens, constraint = draw(plain, sampling, rng, num_tokens)
    likely = [*b"ab1. ", PLAIN.pieces.index("é".encode())]
    for _ in range(1500):
        if tokens[-1] == EOS:
            break
        choices = allowed(constraint, PLAIN)
        assert choices, "a prefix that can't be completed"
        favoured = [token_id for token_id in likely if token_id in choices]
        tokens.append(EOS if EOS in choices else rng.choice(favoured or choices))
        constraint.accept(tokens[-1])
    assume(tokens[-1] == EOS)  # by chance a long tail behind .* may take longer
    assert constraint.standing.is_complete
    assert re.fullmatch(pattern, PLAIN.bytes_of(tokens[:-1]).decode())


@pytest.mark.parametrize("any_whitespace", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_an_output_is_json_of_its_schema(plain, seed, any_whitespace):
    sampling = SamplingParams(json_schema=SCHEMA, json_any_whitespace=any_whitespace)
    plain.prepare(sampling)
    tokens, _ = draw(plain, sampling, random.Random(seed), 3000, favour=[EOS, *b'}]",'])
    person = json.loads(text_of(tokens))
    assert list(person) == ["name", "age", "tags"]
    assert 0 <= person["age"] <= 150
    assert set(person["tags"]) <= {"x", "y"}


@pytest.mark.parametrize("seed", range(5))
def test_an_output_validates_against_a_pydantic_model(plain, seed):
    sampling = SamplingParams(json_schema=Shape.model_json_schema())
    plain.prepare(sampling)
    tokens, _ = draw(plain, sampling, random.Random(seed), 3000, favour=[EOS, *b'}",n'])
    assert 1 <= Shape.model_validate_json(text_of(tokens)).sides <= 9


def test_json_has_no_whitespace_but_one_space_behind_its_signs(plain):
    sampling = SamplingParams(json_schema=SCHEMA)
    plain.prepare(sampling)
    tokens, _ = draw(plain, sampling, random.Random(1), 3000, favour=[*b" \n\t"[:3], EOS, *b'}]"'])
    outside_strings = re.sub(r'"[^"]*"', "", text_of(tokens))
    assert not re.search(r"\s\s|\n|\t", outside_strings)


def test_an_output_is_derived_from_its_ebnf(plain):
    sampling = SamplingParams(ebnf='root ::= "(" root ")" | "a" | "é"')
    plain.prepare(sampling)
    tokens, _ = draw(plain, sampling, random.Random(3), 500)
    assert re.fullmatch(r"\(*(a|é)\)*", text_of(tokens))
    assert text_of(tokens).count("(") == text_of(tokens).count(")")


def test_an_output_is_derived_from_its_lark_grammar(plain):
    grammar = 'start: "let" /[ab]{1,3}/ "=" INT\n%import common.INT\n%ignore " "'
    sampling = SamplingParams(lark=grammar)
    plain.prepare(sampling)
    tokens, _ = draw(plain, sampling, random.Random(2), 500, favour=[EOS])
    assert re.fullmatch(" *let *[ab]{1,3} *= *[0-9]+ *", text_of(tokens))


def test_the_end_is_all_that_may_follow_a_complete_answer(plain):
    sampling = SamplingParams(regex="ab?")
    plain.prepare(sampling)
    constraint = plain.make(sampling, [])
    assert EOS not in allowed(constraint, PLAIN)
    constraint.accept(ord("a"))
    assert allowed(constraint, PLAIN) == [ord("b"), EOS]
    constraint.accept(ord("b"))
    assert allowed(constraint, PLAIN) == [EOS]
    assert not constraint.standing.is_complete
    constraint.accept(EOS)
    assert constraint.standing.is_complete


def test_min_tokens_holds_the_end_back_unless_nothing_else_is_left(plain):
    longer = SamplingParams(regex="a+", min_tokens=3)
    exact = SamplingParams(regex="a", min_tokens=3)
    for sampling, expected in ((longer, [ord("a")]), (exact, [EOS])):
        plain.prepare(sampling)
        assert allowed(plain.make(sampling, [ord("a")]), PLAIN) == expected
    assert EOS in allowed(plain.make(longer, [ord("a")] * 3), PLAIN)


def test_special_tokens_are_never_text_of_a_grammar(plain):
    sampling = SamplingParams(regex=".*")
    plain.prepare(sampling)
    assert EOS + 1 not in allowed(plain.make(sampling, []), PLAIN)


def think(**fields):
    return ThinkParams(tool_starts=(), **fields)


@pytest.mark.parametrize("vocabulary", [PLAIN, TAGGED], ids=["spelled", "token"])
@pytest.mark.parametrize("cap", [0, 1, 5])
def test_the_cap_closes_thinking_once_and_the_grammar_begins_behind_it(vocabulary, cap):
    constraints = Constraints(lambda: vocabulary, [EOS])
    sampling = SamplingParams(
        regex=r"\d{2}", think=think(max_tokens=cap, starts_inside=True), max_tokens=200
    )
    constraints.prepare(sampling)
    for seed in range(8):
        tokens, constraint = draw(constraints, sampling, random.Random(seed), 100)
        thought, tag, answer = text_of(tokens, vocabulary).partition("</think>")
        assert tag, thought
        assert re.fullmatch(r"\n*\d\d", answer)
        assert answer.count("</think>") == 0
        num_thinking = constraint.standing.num_thinking
        closed = text_of(tokens[:num_thinking], vocabulary)
        assert closed.endswith(("</think>", "</think>\n\n"))
        assert re.fullmatch(r"\d\d", text_of(tokens[num_thinking:], vocabulary))


def test_the_forced_closing_is_the_configured_text_token_by_token(tagged):
    sampling = SamplingParams(
        think=think(max_tokens=2, starts_inside=True, closing_text=" 12</think>true")
    )
    tagged.prepare(sampling)
    constraint = tagged.make(sampling, [ord("a"), ord("b")])
    forced = []
    while not constraint.is_free:
        (token_id,) = allowed(constraint, TAGGED)
        forced.append(token_id)
        constraint.accept(token_id)
    assert [TAGGED.pieces[t] for t in forced] == [b" ", b"12", b"</think>", b"true"]
    assert constraint.standing.num_thinking == 2 + 4


@pytest.mark.parametrize("constraints_name", ["plain", "tagged"])
def test_a_natural_end_at_the_cap_is_seen_once(request, constraints_name):
    constraints = request.getfixturevalue(constraints_name)
    vocabulary = PLAIN if constraints_name == "plain" else TAGGED
    end = vocabulary.spell(b"</think>")
    sampling = SamplingParams(regex="a", think=think(max_tokens=3 + len(end), starts_inside=True))
    constraints.prepare(sampling)
    constraint = constraints.make(sampling, [*b"xyz", *end])
    assert allowed(constraint, vocabulary) == [ord("a")]
    assert constraint.standing.num_thinking == 3 + len(end)


def test_a_tag_half_written_at_the_cap_is_finished_not_written_again(plain):
    sampling = SamplingParams(regex="a", think=think(max_tokens=3, starts_inside=True))
    plain.prepare(sampling)
    constraint, tokens = plain.make(sampling, [*b"x</"]), [*b"x</"]
    while len(choices := allowed(constraint, PLAIN)) == 1 and choices != [ord("a")]:
        tokens += choices
        constraint.accept(choices[0])
    assert text_of(tokens) == "x</think>\n\n"


@pytest.mark.parametrize("constraints_name", ["plain", "tagged"])
def test_below_the_floor_thinking_does_not_end(request, constraints_name):
    constraints = request.getfixturevalue(constraints_name)
    vocabulary = PLAIN if constraints_name == "plain" else TAGGED
    sampling = SamplingParams(think=think(min_tokens=6, starts_inside=True), max_tokens=500)
    constraints.prepare(sampling)
    eager = [END, ord("<"), *vocabulary.spell(b"</"), *vocabulary.spell(b"think"), ord(">"), EOS]
    for seed in range(6):
        tokens, constraint = draw(constraints, sampling, random.Random(seed), 40, favour=eager)
        num_thinking = constraint.standing.num_thinking
        assert num_thinking >= 6
        assert EOS not in tokens[:6]
        assert "</think>" not in text_of(tokens[:6], vocabulary)


def test_a_token_never_holds_the_end_tag_and_more(plain):
    sampling = SamplingParams(think=think(starts_inside=True))
    plain.prepare(sampling)
    constraint = plain.make(sampling, [*PLAIN.spell(b"x</think")])
    crossing = PLAIN.pieces.index(b">\n")
    assert crossing not in allowed(constraint, PLAIN)
    assert PLAIN.pieces.index(b">") in allowed(constraint, PLAIN)


def test_the_end_of_sequence_waits_for_the_answer_of_a_grammar_only(tagged):
    free = SamplingParams(think=think(starts_inside=True))
    bound = free.replace(regex="a")
    for sampling, may_end in ((free, True), (bound, False)):
        tagged.prepare(sampling)
        assert (EOS in allowed(tagged.make(sampling, [*b"hm"]), TAGGED)) is may_end


def test_an_output_may_open_its_thinking_or_answer_at_once(tagged):
    sampling = SamplingParams(regex="<[a-c]+>", think=think())
    tagged.prepare(sampling)
    first = allowed(tagged.make(sampling, []), TAGGED)
    assert {ord("<"), START, TAGGED.pieces.index(b"<th")} <= set(first)
    assert ord("x") not in first
    answering = tagged.make(sampling, [*b"<b"])
    assert answering.standing.num_thinking == 0
    assert ord(">") in allowed(answering, TAGGED)
    assert ord("t") not in allowed(answering, TAGGED)
    thinking = tagged.make(sampling, [*b"\n<think>hm"])
    assert thinking.standing.num_thinking == 10
    assert ord("x") in allowed(thinking, TAGGED)


def test_a_floor_makes_the_output_open_its_thinking(tagged):
    sampling = SamplingParams(think=think(min_tokens=1))
    tagged.prepare(sampling)
    assert allowed(tagged.make(sampling, []), TAGGED) == [START]


def test_a_tool_start_ends_thinking_and_belongs_to_the_answer(plain):
    sampling = SamplingParams(regex="a{2}", think=ThinkParams(starts_inside=True))
    plain.prepare(sampling)
    tokens = PLAIN.spell(b"hm <tool_call>")
    constraint = plain.make(sampling, tokens)
    assert constraint.standing.num_thinking == len(PLAIN.spell(b"hm "))
    assert allowed(constraint, PLAIN) == [ord("a")]


def test_a_grammar_that_begins_with_the_tool_start_goes_on_behind_it(plain):
    sampling = SamplingParams(regex="<tool_call>b", think=ThinkParams(starts_inside=True))
    plain.prepare(sampling)
    constraint = plain.make(sampling, PLAIN.spell(b"hm <tool_call>"))
    assert allowed(constraint, PLAIN) == [ord("b"), PLAIN.pieces.index(b"bab")][:1]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**16),
    cap=st.none() | st.integers(0, 9),
    inside=st.booleans(),
    regex=st.none() | st.just("(ab|12)*true"),
)
def test_a_constraint_made_again_from_its_tokens_goes_on_the_same(plain, seed, cap, inside, regex):
    sampling = SamplingParams(
        regex=regex, think=ThinkParams(max_tokens=cap, starts_inside=inside), max_tokens=100
    )
    plain.prepare(sampling)
    tokens, whole = draw(plain, sampling, random.Random(seed), 30)
    for num_known in range(len(tokens)):
        again = plain.make(sampling, tokens[:num_known])
        assert tokens[num_known] in allowed(again, PLAIN)
    again = plain.make(sampling, tokens)
    assert again.standing == whole.standing
    if tokens[-1] != EOS:
        assert allowed(again, PLAIN) == allowed(whole, PLAIN)


def test_a_grammar_that_no_token_can_spell_says_so(plain):
    sampling = SamplingParams(regex="aÅ")
    plain.prepare(sampling)
    constraint = plain.make(sampling, [])
    assert allowed(constraint, PLAIN) == [ord("a")]
    constraint.accept(ord("a"))
    assert constraint.standing.error is None
    assert allowed(constraint, PLAIN) == []
    assert constraint.standing.error == UNSPELT
