"""Whatever allocation of a step is refused: who survives says what it says undisturbed.

The engine is real, on the CPU; every torch operation in a step that makes a tensor may be refused.
Who ends with an error got one, after tokens that are right as far as they go.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_support.refusals import Refusals

NUM_STEPS = 100  # of the undisturbed load, about


@pytest.fixture(scope="module")
def runs(make_runs):
    return make_runs(overlap=False)


@pytest.fixture(scope="module")
def overlapped(make_runs):
    return make_runs(overlap=True)


@pytest.fixture(scope="module")
def expected(runs):
    return runs.run()


def check(run, expected):
    """Survivors are as ever, the others have one error."""
    children = {key for key in expected.tokens if "'s " in key[0]}
    assert run.ended == set(run.tokens)
    assert run.ended | children == expected.ended
    for key, tokens in run.tokens.items():
        if key in run.errors:
            assert "out of memory" in run.errors[key], key
        if _is_cut_short(run, key):
            continue
        if key in run.errors:
            assert tokens == expected.tokens[key][: len(tokens)], key
        else:
            assert tokens == expected.tokens[key], key
            assert run.scores[key] == expected.scores[key], key


def _is_cut_short(run, key):
    """A child of a failed parent starts from fewer tokens, so it says something else."""
    return (key[0].split("'s ")[0], 0) in run.errors


steps = st.integers(0, NUM_STEPS)
numbers = st.one_of(st.integers(0, 60), st.integers(0, 400))
counts = st.sampled_from([1, 2, 3, 5, 20, 100, 10**6])


@settings(max_examples=15, deadline=None)
@given(step=steps, first=numbers)
def test_one_refusal_at_any_allocation_of_any_step_costs_nothing(runs, expected, step, first):
    run = runs.run({step: Refusals(numbers=lambda number: number == first)})
    assert not run.errors
    check(run, expected)


bursts = st.lists(st.tuples(steps, numbers, counts), min_size=1, max_size=4)


def refused_in(bursts):
    return {
        step: Refusals(numbers=range(first, first + count).__contains__)
        for step, first, count in bursts
    }


@settings(max_examples=20, deadline=None)
@given(bursts=bursts)
def test_any_burst_of_refusals_ends_few_and_changes_nobody(runs, expected, bursts):
    check(runs.run(refused_in(bursts)), expected)


@settings(max_examples=12, deadline=None)
@given(bursts=bursts)
def test_bursts_with_the_next_step_in_flight(overlapped, expected, bursts):
    check(overlapped.run(refused_in(bursts)), expected)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(bursts=bursts, is_ahead=st.booleans())
def test_a_thousand_bursts(runs, overlapped, expected, bursts, is_ahead):
    check((overlapped if is_ahead else runs).run(refused_in(bursts)), expected)


@settings(max_examples=12, deadline=None)
@given(
    start=steps,
    length=st.integers(1, 30),
    max_elements=st.integers(6, 14).map(lambda power: 2**power),
)
def test_a_small_card_works_in_smaller_parts(runs, expected, start, length, max_elements):
    refused = {step: Refusals(max_elements=max_elements) for step in range(start, start + length)}
    check(runs.run(refused), expected)


def test_without_any_memory_everyone_ends_with_an_error(runs, expected):
    everything = {step: Refusals(numbers=lambda _: True) for step in range(10_000)}
    run = runs.run(everything)
    roots = {key for key in expected.ended if "'s " not in key[0]}
    assert roots <= set(run.errors)
    check(run, expected)
