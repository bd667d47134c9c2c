"""Resident memory stays bounded, shared prefixes are held once, compacted states are continued.

Issue 2, points 2 (bound) and 3.
"""

import random

import pytest

from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import AddRequest, Fork, Release, Stop
from zipage_lang.runtime.sampling_params import SamplingParams

BLOCK = 16


@pytest.fixture(scope="module")
def tiny(make_tiny_model):
    return make_tiny_model("Qwen3", num_key_value_heads=2)[0]


def prompt_of(length: int, seed: int = 3) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(199) for _ in range(length)]


@pytest.fixture(scope="module")
def one_layer(make_tiny_model):
    """How long a request may grow depends on no layer: for thousands of steps one is enough."""
    return make_tiny_model("Qwen3", num_key_value_heads=2, num_hidden_layers=1)[0]


@pytest.mark.parametrize(
    ("policy", "num_tokens"),
    [
        ("zipage", 1500),
        pytest.param("zipage", 4000, marks=pytest.mark.slow),
        ("streaming", 700),
        ("random", 700),
    ],
)
def test_resident_length_never_passes_its_bound(one_layer, driver, policy, num_tokens):
    budget, interval, protected = 96, 48, 37
    engine = driver(
        one_layer, kv_mode="fixed", kv_budget=budget, evict_interval=interval, policy=policy
    )
    engine.add("long", prompt_of(protected), max_tokens=num_tokens, seed=1, temperature=0.8)
    bound = protected + budget + interval + BLOCK
    engine.step()
    while engine.engine.has_work:
        engine.step()
        assert engine.final("long").kv.max_resident_len <= bound
        stats = engine.engine.stats()
        assert stats["num_blocks"] - stats["num_free"] <= -(-bound // BLOCK) + 1
    kv = engine.final("long").kv
    assert kv.logical_len == protected + num_tokens - 1
    assert kv.dropped == kv.logical_len - kv.resident_len
    assert kv.compactions == (num_tokens - 1 - budget) // interval


def test_a_long_prompt_that_may_be_dropped_is_compacted_between_chunks(tiny, driver):
    engine = driver(tiny, kv_mode="fixed", kv_budget=64, evict_interval=32, protect="none")
    engine.add("prompt", prompt_of(700), max_tokens=8, temperature=0)
    engine.finish()
    kv = engine.final("prompt").kv
    assert kv.max_resident_len <= 64 + 32 + BLOCK
    assert kv.logical_len == 707
    assert len(engine.tokens("prompt")) == 8


def test_sixteen_samples_compute_and_hold_the_prompt_once(tiny, driver):
    engine = driver(tiny, num_blocks=200)
    engine.add("many", prompt_of(10 * BLOCK), n=16, max_tokens=5, seed=4)
    engine.step()
    stats = engine.engine.stats()
    assert stats["num_prefilled_tokens"] == 10 * BLOCK
    assert stats["num_blocks"] - stats["num_free"] == 10  # not 160
    engine.step()
    stats = engine.engine.stats()
    assert stats["num_blocks"] - stats["num_free"] == 10 + 16  # and one private block for each
    engine.finish()
    assert engine.engine.stats()["num_prefilled_tokens"] == 10 * BLOCK
    samples = {tuple(engine.tokens("many", index)) for index in range(16)}
    assert len(samples) > 8  # each sample has its own random stream


def test_identical_prompts_that_arrive_together_prefill_once(tiny, driver):
    engine = driver(tiny)
    for index in range(8):
        engine.add(f"same-{index}", prompt_of(8 * BLOCK), max_tokens=4, temperature=0)
    engine.finish()
    stats = engine.engine.stats()
    assert stats["num_prefilled_tokens"] <= 8 * BLOCK + 7 * BLOCK  # the last block again, at most
    assert len({tuple(engine.tokens(f"same-{index}")) for index in range(8)}) == 1


@pytest.fixture
def thought(tiny, driver):
    """An engine after one thought that was compacted, and the thought's tokens."""
    engine = driver(tiny, kv_mode="fixed", kv_budget=64, evict_interval=32)
    prompt = prompt_of(40)
    engine.add("thought", prompt, max_tokens=300, seed=2)
    engine.finish()
    assert engine.final("thought").kv.compactions > 0
    return engine, prompt + engine.tokens("thought"), KVParams(protected_len=len(prompt))


def test_branches_continue_from_a_compacted_thought_without_recompute(thought):
    engine, tokens, kv = thought
    before = engine.engine.stats()["num_prefilled_tokens"]
    for index in range(8):
        engine.add(f"branch-{index}", [*tokens, index], kv=kv, max_tokens=3, seed=index)
    engine.step()
    resident = engine.final("branch-0").kv.resident_len
    stats = engine.engine.stats()
    assert stats["num_prefilled_tokens"] - before == 8 * 2  # the last drawn token and the new one
    held = stats["num_blocks"] - stats["num_free"] - stats["num_tree_only"]
    assert held <= -(-resident // BLOCK) + 8  # one copy, and a private last block for each
    engine.finish()
    for index in range(8):
        assert engine.final(f"branch-{index}").usage.cached_tokens == len(tokens) - 1
        assert len(engine.tokens(f"branch-{index}")) == 3


@pytest.mark.parametrize(
    "other",
    [
        {"budget": 65},
        {"interval": 33},
        {"policy": "random"},
        {"protected_len": 39},
        {"mode": "adaptive"},
        {"mode": "off"},
        {"reuse": "exact"},
    ],
    ids=str,
)
def test_another_signature_does_not_match_a_compacted_thought(thought, other):
    engine, tokens, _ = thought
    kv = KVParams(**{"protected_len": 40, **other})
    engine.add("other", [*tokens, 5], kv=kv, max_tokens=3, temperature=0)
    engine.finish()
    assert engine.final("other").usage.cached_tokens <= 40


def test_branching_does_not_change_what_the_thought_goes_on_with(thought):
    """The shared compacted state is read-only: a branch that compacts leaves it as it was."""
    engine, tokens, kv = thought
    sampling = {"max_tokens": 120, "temperature": 0}
    engine.add("first", [*tokens, 7], kv=kv, **sampling)
    engine.finish()
    engine.add("other", [*tokens, 8], kv=kv, **sampling)
    engine.finish()
    engine.add("again", [*tokens, 7], kv=kv, **sampling)
    engine.finish()
    assert engine.final("other").kv.compactions > 0
    assert engine.tokens("again") == engine.tokens("first")


def test_fork_shares_a_held_state_by_reference(tiny, driver):
    engine = driver(tiny)
    prompt = prompt_of(50)
    sampling = SamplingParams(temperature=0, max_tokens=10)
    engine.engine.handle(
        AddRequest(request_id="held", token_ids=prompt, sampling=sampling, hold=True)
    )
    engine.finish()
    tokens = prompt + engine.tokens("held")
    before = engine.engine.stats()["num_prefilled_tokens"]
    children = [
        AddRequest(request_id=f"child-{i}", token_ids=[*tokens, i], sampling=sampling)
        for i in range(4)
    ]
    engine.engine.handle(Fork(parent_id="held", children=children))
    engine.finish()
    assert engine.engine.stats()["num_prefilled_tokens"] - before == 4 * 2
    engine.engine.handle(Release(request_ids=["held"]))
    engine.step()
    assert engine.engine.stats()["num_held_requests"] == 0


def test_stop_cuts_a_state_where_the_text_ended(tiny, driver):
    """A stop string seen two steps late leaves a compacted state that spells just what was kept."""
    engine = driver(tiny, kv_mode="fixed", kv_budget=64, evict_interval=32)
    prompt = prompt_of(40)
    engine.add("cut", prompt, max_tokens=400, seed=2)
    while len(engine.outputs.get(("cut", 0), [])) < 203:
        engine.step()
    engine.engine.handle(Stop(request_id="cut", sample_index=0, num_output_tokens=200))
    engine.finish()
    assert engine.final("cut").finish_reason == "stop"
    assert engine.final("cut").usage.completion_tokens == 200
    kept = prompt + engine.tokens("cut")[:200]
    engine.add("next", [*kept, 1], kv=KVParams(protected_len=40), max_tokens=2, temperature=0)
    engine.finish()
    assert engine.final("next").usage.cached_tokens in (len(kept), len(kept) - 1)


def test_compacted_requests_are_swapped_and_come_back(tiny, driver):
    """19 blocks hold three requests, but not always all that three may grow to."""
    engine = driver(tiny, num_blocks=19, kv_mode="fixed", kv_budget=64, evict_interval=16)
    for index in range(6):
        engine.add(f"r{index}", prompt_of(20, seed=index), max_tokens=260, seed=index)
    engine.finish()
    stats = engine.engine.stats()
    assert stats["num_swap_outs"] > 0
    assert stats["num_swap_ins"] == stats["num_swap_outs"]
    assert all(len(engine.tokens(f"r{index}")) == 260 for index in range(6))


def test_planning_ahead_keeps_the_same_slots_and_draws_the_same_tokens(tiny, driver):
    outputs = []
    for overlap in (False, True):
        engine = driver(
            tiny, kv_mode="fixed", kv_budget=64, evict_interval=32, overlap=overlap, num_blocks=200
        )
        for index in range(6):
            engine.add(f"r{index}", prompt_of(20, seed=index), max_tokens=200, seed=index)
        engine.finish()
        outputs.append([engine.tokens(f"r{index}") for index in range(6)])
        assert engine.final("r0").kv.compactions > 2
    assert outputs[0] == outputs[1]


def test_adaptive_mode_drops_nothing_while_memory_is_free(tiny, driver):
    engine = driver(tiny, kv_mode="adaptive", kv_budget=64, evict_interval=32)
    engine.add("free", prompt_of(20), max_tokens=400, seed=1)
    engine.finish()
    assert engine.final("free").kv.dropped == 0
    assert engine.final("free").kv.resident_len == 20 + 399


def test_adaptive_mode_compacts_under_pressure_and_everyone_finishes(tiny, driver):
    engine = driver(tiny, kv_mode="adaptive", kv_budget=64, evict_interval=32, num_blocks=40)
    for index in range(6):
        engine.add(f"r{index}", prompt_of(20, seed=index), max_tokens=300, seed=index)
    engine.finish()
    assert engine.engine.stats()["num_compactions"] > 0
    for index in range(6):
        assert len(engine.tokens(f"r{index}")) == 300
        kv = engine.final(f"r{index}").kv
        assert kv.dropped == 0 or kv.resident_len >= 20 + 64
