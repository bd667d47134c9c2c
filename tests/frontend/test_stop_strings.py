"""Stop strings in a text that comes in pieces. Knows nothing of tokens or engines."""

import gc
import itertools
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_support.op_count import num_bytes, num_calls

from zipage_lang.frontend.stop_strings import SMALL, StopAutomaton, StopMatcher
from zipage_lang.runtime.sampling_params import SamplingParams

SMALL_TEXT = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(
    st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4, unique=True
)


def shown_pieces(pieces, stops, min_tokens=0):
    """Each piece is one token; returns what is shown after each, and the match."""
    matcher = StopMatcher(tuple(stops), min_tokens)
    shown = [matcher.feed(piece, index) for index, piece in enumerate(pieces, start=1)]
    if matcher.matched is None:
        shown.append(matcher.flush())
    return shown, matcher.matched


def cut_slowly(text, stops):
    """The obvious way: the shortest beginning of `text` that ends in a stop string, without it."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(text=SMALL_TEXT, stops=STOPS, data=st.data())
def test_however_the_text_is_cut_the_result_is_that_of_the_whole(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    shown, matched = shown_pieces(pieces, stops)
    assert ("".join(shown), matched) == cut_slowly(text, stops)


@settings(max_examples=300, deadline=None)
@given(text=SMALL_TEXT, stops=STOPS)
def test_only_what_could_become_a_stop_string_is_held_back(text, stops):
    matcher = StopMatcher(tuple(stops))
    shown = ""
    for count, character in enumerate(text, start=1):
        shown += matcher.feed(character, count)
        if matcher.matched is not None:
            return
        held = text[len(shown) : count]
        longest = max(
            (n for stop in stops for n in range(len(stop)) if text[:count].endswith(stop[:n])),
        )
        assert len(held) == longest


def test_a_stop_string_across_pieces_never_leaks_a_part():
    shown, matched = shown_pieces(["Hello S", "T", "OP more"], ["STOP"])
    assert shown == ["Hello ", "", ""]
    assert matched == "STOP"


def test_a_false_start_is_shown_once_it_is_clear():
    shown, matched = shown_pieces(["x ST", "ART"], ["STOP"])
    assert shown == ["x ", "START", ""]
    assert matched is None


def test_of_two_that_end_together_the_longer_is_cut():
    shown, matched = shown_pieces(["say: \n\nUser:"], ["User:", "\n\nUser:"])
    assert ("".join(shown), matched) == ("say: ", "\n\nUser:")


def test_a_stop_string_before_min_tokens_is_ordinary_text():
    shown, matched = shown_pieces(["a", ";", "b", ";", "c"], [";"], min_tokens=3)
    assert ("".join(shown), matched) == ("a;b", ";")


def test_a_match_that_began_before_min_tokens_and_ends_after_counts():
    shown, matched = shown_pieces(["a", "<e", "nd>"], ["<end>"], min_tokens=3)
    assert ("".join(shown), matched) == ("a", "<end>")


@pytest.mark.parametrize("index", [0, 499, 999])
def test_each_of_a_thousand_stop_strings_is_found(index):
    stops = [f"<stop number {number}>" for number in range(1000)]
    text = f"before <stop number {index}> after"
    shown, matched = shown_pieces(list(text), stops)
    assert ("".join(shown), matched) == ("before ", stops[index])


def test_the_cost_of_a_character_does_not_grow_with_the_number_of_stop_strings():
    stops = tuple(f"<stop number {number}>" for number in range(1000))
    matcher = StopMatcher(stops)
    calls = 0
    step = matcher._automaton.step

    def counted(state, character):
        nonlocal calls
        calls += 1
        return step(state, character)

    matcher._automaton.step = counted
    try:
        for count, character in enumerate("<stop <stop number 7 x" * 20):
            matcher.feed(character, count)
    finally:
        del matcher._automaton.step
    assert calls == len("<stop <stop number 7 x" * 20)


MANY = [f"<{number * 7919 % 10_000:04d}>" for number in range(10_000)]


@pytest.mark.parametrize("count", [1_000, 10_000])
def test_a_character_costs_about_the_same_with_one_stop_string_and_thousands(count):
    text = "a <12 b <1234< c <<99" * 40
    costs = []
    for stops in (("<12345>",), tuple(MANY[:count])):
        matcher = StopMatcher(stops)
        costs.append(num_calls(lambda m=matcher: m.feed(text, 1)))
        assert matcher.matched is None
    assert costs[1] <= 1.5 * costs[0], costs


def test_the_one_of_ten_thousand_that_comes_is_found_and_cut():
    assert shown_pieces([*"so <00", *"01> more"], MANY)[1] == "<0001>"
    assert "".join(shown_pieces([*"so <0001> more"], MANY)[0]) == "so "


def test_making_an_automaton_takes_time_and_memory_in_proportion():
    def repeated(length):
        return ("a" * length + "b",)  # each fallback is one shorter: the worst for naive links

    costs = [num_calls(lambda n=n: StopAutomaton(repeated(n))) for n in (2_000, 20_000)]
    assert costs[1] <= 10.5 * costs[0], costs
    assert num_bytes(lambda: StopAutomaton(repeated(20_000))) <= 20_000 * 250


def test_a_long_run_of_what_almost_matches_costs_in_proportion():
    costs = []
    for length in (1_000, 10_000):
        matcher = StopMatcher(("a" * 500 + "b",))
        costs.append(num_calls(lambda m=matcher, n=length: m.feed("a" * n, 1)))
    assert costs[1] <= 11 * costs[0], costs


def test_large_automata_are_shared_while_in_use_and_forgotten_after():
    stops = ("x" * (SMALL + 1),)
    first, second = StopMatcher(stops), StopMatcher(tuple(stops))
    assert first._automaton is second._automaton
    gone = weakref.ref(first._automaton)
    del first, second
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stop": ["a"] * 10_001}, "stop has 10001 strings; at most 10000"),
        ({"stop": "a" * 100_000}, "stop has 100000 characters in all; at most 65536"),
        ({"stop": ["ab" * 1000] * 40}, "stop has 80000 characters in all"),
        ({"stop": [1] * 100_000}, "stop=.{1,90} must be a string"),
        ({"stop_token_ids": list(range(1025))}, "stop_token_ids has 1025 tokens; at most 1024"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has 1025 tokens"),
    ],
)
def test_more_stops_than_could_be_looked_for_in_time_are_refused(fields, told):
    with pytest.raises(ValueError, match=told):
        SamplingParams(**fields)


def test_as_many_stops_as_are_allowed_are_taken():
    params = SamplingParams(stop=MANY, stop_token_ids=list(range(1024)))
    assert len(params.stop_strings) == 10_000
    SamplingParams(stop="a" * 65_536)
