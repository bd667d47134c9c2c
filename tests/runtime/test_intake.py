"""What the intake refuses, with the limit and the fix named, and what it makes of the rest.

Knows nothing of what runs.
"""

import pytest

from zipage_lang.runtime.config import CompressionConfig
from zipage_lang.runtime.intake import Intake, sample_seed
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.limits import Limits
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.policies.registry import PolicyQueries, load_policies
from zipage_lang.runtime.request import RequestRefused
from zipage_lang.runtime.sampling_params import SamplingParams

FIXED = KVParams(mode="fixed", budget=32, interval=16, policy="zipage")


def make_intake(**changes):
    values = {
        "num_blocks": 16,
        "num_host_blocks": 0,
        "num_query_slots": 4,
        "window": 16,
        "max_model_len": 256,
        "vocab_size": 100,
        "eos_token_ids": (2,),
    }
    queries = PolicyQueries(load_policies(), 16, lambda _: None)
    return Intake(CompressionConfig(), Limits(**values | changes), 16, queries)


def add(token_ids=(1, 2, 3), kv=None, hold=False, **sampling):
    sampling = SamplingParams(**{"max_tokens": 8} | sampling)
    return AddRequest(
        request_id="r", token_ids=list(token_ids), sampling=sampling, kv=kv, hold=hold
    )


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (add(()), "the prompt has no tokens"),
        (add(range(256)), "256 tokens, but max_model_len=256 leaves room for 255"),
        (add((1, 100)), "the prompt has token id 100, outside the vocabulary of 100"),
        (add((-1,)), "the prompt has token id -1"),
        (add(logit_bias={100: 1.0}), "logit_bias has token id 100"),
        (add(stop_token_ids=[7, 500]), "stop_token_ids has token id 500"),
        (add(kv=KVParams(mode="fixed", policy="nothing")), "unknown kv policy 'nothing'; known: "),
        (add(kv=KVParams(mode="fixed", policy="zipage:x=1")), "has no parameter 'x'"),
        (add(kv=KVParams(mode="fixed", policy="full")), "'full' keeps every token"),
        (add(hold=True, n=2), "hold works with one sample, not n=2"),
    ],
)
def test_what_can_not_be_served_is_refused_with_its_limit(message, words):
    with pytest.raises(RequestRefused) as caught:
        make_intake().make_requests(message)
    assert words in str(caught.value)


def test_what_could_not_fit_even_alone_is_refused_with_both_counts():
    with pytest.raises(RequestRefused, match=r"may need 13 KV blocks of 16 tokens.*pool has 12"):
        make_intake(num_blocks=12).make_requests(add(max_tokens=200))
    assert make_intake(num_blocks=13).make_requests(add(max_tokens=200))


def test_adaptive_mode_is_refused_where_the_engine_is_deterministic():
    adaptive = add(kv=KVParams(mode="adaptive", budget=32, interval=16))
    with pytest.raises(RequestRefused, match="use mode 'fixed' or 'off'"):
        make_intake(deterministic=True).make_requests(adaptive)
    assert make_intake().make_requests(adaptive)


def test_samples_have_seeds_of_their_own_and_share_the_prompt_until_they_start():
    first, second, third = make_intake().make_requests(add(n=3, seed=7))
    assert first.seed == 7
    assert {second.seed, third.seed} == {sample_seed(7, 1), sample_seed(7, 2)}
    assert len({first.seed, second.seed, third.seed}) == 3
    assert first.token_ids == second.token_ids == [1, 2, 3]
    assert first.arrival < second.arrival < third.arrival


def test_only_a_request_that_compacts_needs_queries():
    (plain,) = make_intake().make_requests(add())
    (bounded,) = make_intake().make_requests(add(kv=FIXED))
    assert (plain.needs_queries, bounded.needs_queries) == (False, True)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("regex", "a+"),
        ("ebnf", 'root ::= "a"'),
        ("lark", 'start: "a"'),
        ("json_schema", '{"type":"object"}'),
        ("structural_tag", '{"type":"structural_tag"}'),
    ],
)
def test_the_grammar_of_a_request_is_the_one_field_that_was_given(field, text):
    sampling = SamplingParams(**{field: text})
    assert (sampling.grammar.kind, sampling.grammar.text) == (field, text)
    assert sampling.is_constrained
    assert not SamplingParams().is_constrained
    with pytest.raises(ValueError, match="ignore_eos=True can't be combined"):
        SamplingParams(**{field: text}, ignore_eos=True)


def test_two_grammars_and_a_flag_that_is_none_are_refused():
    with pytest.raises(ValueError, match="regex and lark can't be combined"):
        SamplingParams(regex="a", lark='start: "a"')
    with pytest.raises(ValueError, match="json_any_whitespace=1 must be"):
        SamplingParams(json_any_whitespace=1)
