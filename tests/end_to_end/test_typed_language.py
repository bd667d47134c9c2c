"""Typed values, scored choices, kept text and shared prefixes, on the embedded model."""

import dataclasses
import enum
from typing import Literal

import pytest

import zipage_lang as zipage

BUDGET, INTERVAL = 32, 16


@pytest.fixture(scope="module")
def engine():
    options = {"kv_mode": "fixed", "kv_budget": BUDGET, "evict_interval": INTERVAL}
    with zipage.Engine("smollm2-135m", num_threads=1, num_blocks=400, **options) as engine:
        yield engine


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


@dataclasses.dataclass
class Town:
    name: str
    size: Size
    is_capital: bool


def run(engine, *parts, **options):
    @zipage.function
    def program(s):
        for part in parts:
            s += part

    return program.run(backend=engine, **options)


@pytest.mark.parametrize("seed", [1, 2])
def test_values_are_of_the_type_that_was_asked_for_whatever_the_model_would_say(engine, seed):
    state = run(
        engine,
        "A dozen is",
        zipage.gen("number", type=int),
        ". The sky is",
        zipage.gen("color", type=Literal["red", "blue"]),
        ". As JSON: ",
        zipage.gen("town", type=Town, max_tokens=120),
        seed=seed,
    )
    assert isinstance(state["number"], int)
    assert state["color"] in ("red", "blue")
    assert isinstance(state["town"], Town)
    assert state.meta("town").finish_reason == "stop"
    assert f"{state['number']}. The sky is" in state.text()


def test_a_value_that_max_tokens_cuts_off_is_a_parse_error(engine):
    state = run(engine, "As JSON: ", zipage.gen("town", type=Town, max_tokens=4))
    with pytest.raises(zipage.ParseError, match="cut off by max_tokens"):
        state["town"]


def test_choices_are_scored_from_their_first_token_on_warm_as_cold(engine):
    prompt, choices = "The capital of France is", [" Paris", " London", " a city"]
    scores = run(engine, prompt, zipage.score("c", choices))["c"]
    assert scores.choice == " Paris"
    tokenizer = engine.async_llm.tokenizer
    sampling = zipage.SamplingParams(max_tokens=1, prompt_logprobs=0)
    for choice, token_ids, logprobs in zip(choices, scores.token_ids, scores.logprobs, strict=True):
        assert token_ids == tokenizer.encode(choice, add_special_tokens=False)
        engine.flush_cache()
        whole = tokenizer.encode(prompt) + token_ids
        (output,) = engine.generate(whole, sampling, kv=zipage.KV(mode="off"))
        cold = [entry.logprob for entry in output.prompt_logprobs[-len(token_ids) :]]
        assert logprobs == pytest.approx(cold, abs=1e-3)
    assert scores.is_exact


THOUGHT = zipage.gen("thought", max_tokens=60, temperature=0, ignore_eos=True)
COUNT = "Count to one hundred: 1, 2, 3, 4, 5, 6,"


def test_choices_after_a_compacted_thought_say_so(engine):
    state = run(engine, COUNT, THOUGHT, zipage.select("c", [" yes", " no"]))
    assert not state.meta("c").is_exact
    assert state.kv("c").missing_len > 0


def test_kept_text_and_all_before_it_is_never_compacted_again(engine):
    rule = "\nThe password is BLUE.\n"
    long = {"max_tokens": 56, "temperature": 0, "ignore_eos": True}
    state = run(engine, COUNT, THOUGHT, zipage.keep(rule), zipage.gen("more", **long), seed=1)
    thought, more = state.kv("thought"), state.kv("more")
    assert thought.missing_len > 0
    kept_len = state.meta("more").usage.prompt_tokens
    assert more.protected_len == kept_len  # the thought, which had lost tokens, is whole again
    assert more.num_compactions > 0
    assert kept_len <= more.kept_len <= kept_len + BUDGET + INTERVAL + 16


def test_without_it_only_the_authors_first_text_is_protected(engine):
    long = {"max_tokens": 56, "temperature": 0, "ignore_eos": True}
    state = run(engine, COUNT, THOUGHT, " And then", zipage.gen("more", **long), seed=1)
    more = state.kv("more")
    assert more.protected_len == state.meta("thought").usage.prompt_tokens
    assert more.kept_len <= more.protected_len + BUDGET + INTERVAL + 16


def test_a_batch_computes_its_common_prefix_once(engine):
    shots = "".join(f"Question {i}: what is {i} plus {i}? Answer: {2 * i}.\n" for i in range(12))
    program = zipage.function(
        lambda s, q: s.append(shots + q + zipage.gen("a", max_tokens=2, temperature=0))
    )
    engine.flush_cache()
    states = program.run_batch([(f"Question {i}: ",) for i in range(20, 28)], backend=engine)
    usages = [state.meta("a").usage for state in states]
    num_shared = len(engine.async_llm.tokenizer.encode(shots)) // 16 * 16
    assert sorted(usage.cached_tokens for usage in usages)[1] >= num_shared
    computed = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
    assert computed < 2 * usages[0].prompt_tokens


def test_a_cached_prefix_is_found_by_the_next_run(engine):
    program = zipage.function(
        lambda s, q: s.append("A very long list of examples, and " * 8 + q + zipage.gen("a", 2))
    )
    engine.flush_cache()
    num_tokens = program.cache("one", backend=engine)
    usage = program.run("two", backend=engine).meta("a").usage
    assert usage.cached_tokens >= (num_tokens - 4) // 16 * 16


def test_the_server_answers_for_itself(engine):
    assert zipage.get_server_info(engine)["architecture"]
    assert zipage.flush_cache(engine).keys() == engine.stats().keys()
