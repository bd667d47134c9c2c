"""Plans and results are plain values: comparable, frozen, and the same again from a file."""

import dataclasses
import types
import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.step_plan import (
    BlockCopy,
    BlockSwap,
    BlockUpdate,
    Chunk,
    RowSetup,
    StepPlan,
    StepResult,
    decode_plan,
    encode_plan,
)

numbers = st.integers(0, 2**31 - 1)
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(0.001, 1),
    seed=st.one_of(st.none(), st.integers(-(2**63), 2**64 - 1)),
    stop=st.one_of(st.text(max_size=4), st.lists(st.text(min_size=1, max_size=4), max_size=2)),
    logit_bias=st.one_of(st.none(), st.dictionaries(numbers, st.floats(-100, 100), max_size=3)),
)
SIMPLE = {
    int: st.integers(-(2**63), 2**64 - 1),
    str: st.text(max_size=5),
    bool: st.booleans(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    types.NoneType: st.none(),
    SamplingParams: sampling,
}


def of_type(kind):
    """Values of a plan's part, read off its annotations, so that a new field is tested at once."""
    if kind in SIMPLE:
        return SIMPLE[kind]
    if dataclasses.is_dataclass(kind) or isinstance(kind, msgspec.StructMeta):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{name: of_type(hint) for name, hint in hints.items()})
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is not tuple:
        return st.one_of(*map(of_type, arguments))
    if arguments[-1] is not ...:
        return st.tuples(*map(of_type, arguments))
    return st.lists(of_type(arguments[0]), max_size=2).map(tuple)


plans = of_type(StepPlan)
CHUNK = Chunk(
    row=1,
    num_tokens=3,
    token_ids=(4, 5, 6),
    position=7,
    resident_start=2,
    sample_rows=(1, 2),
    query_slot=None,
    prompt_score=None,
)


@settings(max_examples=150, deadline=None)
@given(plans)
def test_plan_comes_back_from_its_line(plan):
    line = encode_plan(plan)
    assert b"\n" not in line
    assert decode_plan(line) == plan


def test_every_field_of_a_plan_is_part_of_the_round_trip():
    fields = {field.name for field in dataclasses.fields(StepPlan)}
    assert set(msgspec.json.decode(encode_plan(StepPlan(step=1)))) == fields


@settings(max_examples=50, deadline=None)
@given(of_type(StepResult))
def test_result_comes_back_from_its_line(result):
    assert msgspec.json.decode(encode_plan(result), type=StepResult) == result


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'{"step": "x"}', b'{"chunks": []}'])
def test_broken_line_raises(line):
    with pytest.raises(msgspec.DecodeError):
        decode_plan(line)


def test_plan_with_bad_sampling_is_refused():
    setup = RowSetup(0, (1,), 1, SamplingParams(), 0)
    line = encode_plan(StepPlan(step=0, row_setups=(setup,)))
    with pytest.raises(msgspec.ValidationError, match="top_p=0"):
        decode_plan(line.replace(b'"top_p":1.0', b'"top_p":0.0'))


def test_num_tokens_sums_the_chunks():
    chunks = (CHUNK, msgspec.structs.replace(CHUNK, num_tokens=1, token_ids=None))
    assert StepPlan(step=0, chunks=chunks).num_tokens == 4


@pytest.mark.parametrize(
    ("parts", "is_idle"),
    [
        ({}, True),
        ({"chunks": (CHUNK,)}, False),
        ({"swap_outs": (BlockSwap(1, 2),)}, False),
        ({"swap_ins": (BlockSwap(1, 2),)}, False),
        ({"block_updates": (BlockUpdate(0, 0, (1,)),)}, True),
        ({"block_copies": (BlockCopy(1, 2),)}, True),
    ],
)
def test_step_is_idle_when_no_request_moves(parts, is_idle):
    assert StepPlan(step=0, **parts).is_idle is is_idle


@pytest.mark.parametrize("part", [StepPlan(step=0), StepResult(step=0), CHUNK, BlockCopy(1, 2)])
def test_parts_are_frozen_and_take_no_new_names(part):
    name = next(iter(typing.get_type_hints(type(part))))
    with pytest.raises(AttributeError):  # a dataclass's FrozenInstanceError is one
        setattr(part, name, 5)
    with pytest.raises((AttributeError, TypeError)):
        part.extra = 5


def test_step_is_empty_only_when_there_is_nothing_to_carry_out():
    assert StepPlan(step=0).is_empty
    assert not StepPlan(step=0, block_updates=(BlockUpdate(0, 0, (1,)),)).is_empty
