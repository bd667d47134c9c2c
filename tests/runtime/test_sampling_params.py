"""Every sampling and KV field refuses what is out of range with one clear ValueError."""

import dataclasses
import math
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zipage_lang.runtime.kv_params import KVParams, KVSettings
from zipage_lang.runtime.sampling_params import MAX_LOGPROBS, MAX_SAMPLES, SamplingParams
from zipage_lang.runtime.think_params import ThinkParams

WHOLE = "must be a whole number"
NUMBER = "must be a number"
FINITE = "must be a finite number from"

BAD_SAMPLING = [
    ("max_tokens", 0, "must be at least 1"),
    ("max_tokens", -3, "must be at least 1"),
    ("max_tokens", 1.5, WHOLE),
    ("max_tokens", "8", WHOLE),
    ("max_tokens", True, WHOLE),
    ("max_tokens", None, WHOLE),
    ("min_tokens", -1, "must be at least 0"),
    ("min_tokens", 129, "is above max_tokens=128; lower it"),
    ("temperature", -0.1, FINITE),
    ("temperature", math.nan, FINITE),
    ("temperature", math.inf, FINITE),
    ("temperature", 100.5, FINITE),
    ("temperature", "hot", NUMBER),
    ("temperature", False, NUMBER),
    ("top_p", 0.0, "use temperature=0 for greedy"),
    ("top_p", -0.5, FINITE),
    ("top_p", 1.01, FINITE),
    ("top_p", math.nan, FINITE),
    ("top_p", [0.5], NUMBER),
    ("top_k", -2, "must be at least -1"),
    ("top_k", 1.0, WHOLE),
    ("min_p", -0.01, FINITE),
    ("min_p", 1.5, FINITE),
    ("min_p", math.nan, FINITE),
    ("repetition_penalty", 0.0, FINITE),
    ("repetition_penalty", -1.0, FINITE),
    ("repetition_penalty", 1e6, FINITE),
    ("repetition_penalty", math.nan, FINITE),
    ("presence_penalty", 2.5, FINITE),
    ("presence_penalty", -2.5, FINITE),
    ("frequency_penalty", math.inf, FINITE),
    ("frequency_penalty", "1", NUMBER),
    ("seed", 1.0, WHOLE),
    ("seed", 2**64, "must be from"),
    ("seed", -(2**63) - 1, "must be from"),
    ("stop", 7, "must be a string or a list of strings"),
    ("stop", ["a", 7], "must be a string or a list of strings"),
    ("stop", None, "must be a string or a list of strings"),
    ("stop", ["a", ""], "contains an empty string"),
    ("stop_token_ids", 7, "must be a list of token ids"),
    ("stop_token_ids", "12", "must be a list of token ids"),
    ("stop_token_ids", [-1], "must be at least 0"),
    ("stop_token_ids", ["a"], WHOLE),
    ("n", 0, f"must be from 1 to {MAX_SAMPLES}"),
    ("n", MAX_SAMPLES + 1, f"must be from 1 to {MAX_SAMPLES}"),
    ("logprobs", -1, f"must be from 0 to {MAX_LOGPROBS}"),
    ("logprobs", MAX_LOGPROBS + 1, f"must be from 0 to {MAX_LOGPROBS}"),
    ("logprobs", True, WHOLE),
    ("prompt_logprobs", -1, f"must be from 0 to {MAX_LOGPROBS}"),
    ("prompt_logprobs", 0.5, WHOLE),
    ("prompt_logprobs_start", -1, "must be at least 0"),
    ("prompt_logprobs_start", None, WHOLE),
    ("logit_bias", [1], "must map token ids to numbers"),
    ("logit_bias", {-1: 0.0}, "must be at least 0"),
    ("logit_bias", {"7": 0.0}, WHOLE),
    ("logit_bias", {7: 101.0}, FINITE),
    ("logit_bias", {7: math.nan}, FINITE),
    ("logit_bias", {7: "up"}, NUMBER),
    ("think", {"max_tokens": 8}, "must be a ThinkParams"),
]

GOOD_SAMPLING = {
    "max_tokens": [1, 10**6],
    "min_tokens": [0, 128],
    "temperature": [0, 0.0, 1e-300, 100],
    "top_p": [1, 1e-300, 0.5],
    "top_k": [-1, 0, 1, 10**9],
    "min_p": [0, 1.0],
    "repetition_penalty": [1e-3, 1, 100.0],
    "presence_penalty": [-2, 2.0],
    "frequency_penalty": [-2.0, 2],
    "seed": [None, 0, -(2**63), 2**64 - 1],
    "stop": ["", "a", ["a", "b"], [], ("a",)],
    "stop_token_ids": [[], [0, 7], (3,)],
    "ignore_eos": [True, False],
    "n": [1, MAX_SAMPLES],
    "logprobs": [None, 0, MAX_LOGPROBS],
    "prompt_logprobs": [None, 0, MAX_LOGPROBS],
    "prompt_logprobs_start": [0, 10**6],
    "logit_bias": [None, {}, {0: -100, 7: 100.0}],
    "skip_special_tokens": [True, False],
    "regex": [None, "a+"],
    "json_schema": [None, '{"type":"object"}', "true"],
    "json_any_whitespace": [True, False],
    "ebnf": [None, 'root ::= "a"'],
    "lark": [None, 'start: "a"'],
    "structural_tag": [None, '{"format":{"type":"any_text"}}'],
    "think": [None, ThinkParams(), ThinkParams(max_tokens=0, starts_inside=True)],
}

BAD_KV = [
    ("mode", "on", "must be one of off, fixed, adaptive"),
    ("mode", 1, "must be one of off, fixed, adaptive"),
    ("budget", 0, "at least 1"),
    ("budget", 2.0, "whole number of tokens"),
    ("budget", True, "whole number of tokens"),
    ("interval", 0, "at least 1"),
    ("interval", "64", "whole number of tokens"),
    ("policy", "", "must be the name of a policy"),
    ("policy", 3, "must be the name of a policy"),
    ("protect", "all", "must be one of prompt, none"),
    ("protected_len", -1, "whole number of tokens"),
    ("protected_len", 1.5, "whole number of tokens"),
    ("reuse", "yes", "must be one of compacted, exact"),
]


@pytest.mark.parametrize(("name", "value", "fix"), BAD_SAMPLING)
def test_bad_sampling_value_is_refused_by_name_and_fix(name, value, fix):
    with pytest.raises(ValueError, match=re.escape(fix)) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)
    assert caught.type is ValueError


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, value, _ in BAD_SAMPLING if isinstance(value, (int, float, str))],
)
def test_error_repeats_the_bad_value(name, value):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: value})
    text = str(caught.value)
    assert str(value) in text or f"{value:g}" in text


def test_every_field_is_tested_with_good_values():
    assert set(GOOD_SAMPLING) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, good in GOOD_SAMPLING.items() for value in good]
)
def test_good_sampling_value_is_kept_as_given(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("topp", "top_p"), ("k", None)],
)
def test_unknown_sampling_field_names_the_nearest(wrong, right):
    hint = f"did you mean {right!r}" if right else "known: .*temperature.*top_p"
    with pytest.raises(ValueError, match=rf"unknown sampling field '{wrong}'; {hint}"):
        SamplingParams(**{wrong: 1})


def test_positional_arguments_are_refused():
    with pytest.raises(TypeError):
        SamplingParams(5)


def test_params_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2


def test_default_lists_are_not_shared():
    assert SamplingParams().stop_token_ids is not SamplingParams().stop_token_ids


@pytest.mark.parametrize(
    ("stop", "strings"), [("", ()), ("ab", ("ab",)), (["a", "b"], ("a", "b")), ([], ())]
)
def test_stop_strings_are_a_tuple_however_given(stop, strings):
    assert SamplingParams(stop=stop).stop_strings == strings


def test_replace_changes_only_what_is_named_and_validates():
    base = SamplingParams(temperature=0.5, n=3)
    assert base.replace(n=4) == SamplingParams(temperature=0.5, n=4)
    with pytest.raises(ValueError, match="n=0"):
        base.replace(n=0)
    with pytest.raises(ValueError, match="unknown sampling field 'nn'"):
        base.replace(nn=1)


def test_params_survive_pickling():
    params = SamplingParams(temperature=0.5, stop=["x"], logit_bias={3: 1.0})
    assert pickle.loads(pickle.dumps(params)) == params


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.one_of(st.integers(), st.text(max_size=2)), max_size=2),
    st.dictionaries(st.one_of(st.integers(), st.text(max_size=2)), st.floats(), max_size=2),
)


@given(st.sampled_from(sorted(GOOD_SAMPLING)), junk)
def test_any_value_is_taken_or_refused_with_value_error(name, value):
    try:
        SamplingParams(**{name: value})
    except ValueError as error:
        assert name in str(error)  # noqa: PT017, most values are refused but not all


@pytest.mark.parametrize(("name", "value", "fix"), BAD_KV)
def test_bad_kv_value_is_refused_by_name_and_fix(name, value, fix):
    with pytest.raises(ValueError, match=re.escape(fix)) as caught:
        KVParams(**{name: value})
    assert f"kv {name}={value!r}" in str(caught.value)


def test_every_kv_field_is_tested_with_bad_values():
    assert {name for name, _, _ in BAD_KV} == {f.name for f in dataclasses.fields(KVParams)}


@given(st.sampled_from([field.name for field in dataclasses.fields(KVParams)]), junk)
def test_any_kv_value_is_taken_or_refused_with_value_error(name, value):
    try:
        KVParams(**{name: value})
    except ValueError as error:
        assert f"kv {name}=" in str(error)  # noqa: PT017, most values are refused but not all


def test_unknown_kv_field_names_the_nearest():
    with pytest.raises(ValueError, match="unknown kv field 'bugdet'; did you mean 'budget'"):
        KVParams(bugdet=3)


SETTINGS = KVSettings(
    mode="fixed", budget=64, interval=16, policy="zipage", protected_len=5, reuse="compacted"
)


def test_tail_is_due_at_budget_plus_interval():
    assert SETTINGS.max_tail_len == 80


@pytest.mark.parametrize(
    ("mode", "compacts"), [("off", False), ("fixed", True), ("adaptive", True)]
)
def test_only_mode_off_never_compacts(mode, compacts):
    assert dataclasses.replace(SETTINGS, mode=mode).compacts is compacts


@pytest.mark.parametrize(
    "change",
    [{"mode": "adaptive"}, {"budget": 65}, {"interval": 17}, {"policy": "x"}, {"protected_len": 6}],
)
def test_signature_differs_with_what_the_compacted_state_depends_on(change):
    assert dataclasses.replace(SETTINGS, **change).signature() != SETTINGS.signature()


def test_signature_ignores_whether_compacted_nodes_may_be_reused():
    assert dataclasses.replace(SETTINGS, reuse="exact").signature() == SETTINGS.signature()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_tokens": -1}, "think max_tokens=-1 must be a whole number"),
        ({"min_tokens": 1.5}, "think min_tokens=1.5 must be a whole number"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens=4 is above its max_tokens=3"),
        ({"end_text": ""}, "think tag '' must be a text"),
        ({"start_text": " <think>"}, "without whitespace around it"),
        ({"tool_starts": "<tool>"}, "tool_starts='<tool>' must be a list"),
        ({"end_token_ids": ["a"]}, "think end_token_ids='a' must be a whole number"),
        ({"closing_text": "enough"}, "must hold the end tag '</think>' once"),
        ({"starts_inside": 1}, "starts_inside=1 must be True or False"),
        ({"end_txt": "</t>"}, "did you mean 'end_text'"),
    ],
)
def test_bad_think_params_are_refused_with_the_fix(fields, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        ThinkParams(**fields)
