"""Strict mode through the whole engine: tokens and logprobs, bit by bit, alone and in company."""

import dataclasses
import random
from collections import Counter

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams

POLICIES = ("zipage", "zipage2", "streaming", "random", "tiers", "rkv", "h2o")
VOCAB_SIZE = 199
DTYPES = ("float32", "bfloat16")
NEXT_TURN_LEN = 12  # tokens of a second turn, the model's included


@dataclasses.dataclass(frozen=True)
class Load:
    options: dict[str, object]
    early: list[AddRequest]
    late: list[AddRequest]


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def random_kv(rng: random.Random, prompt_len: int) -> KVParams | None:
    if rng.random() < 0.25:
        return None
    return KVParams(
        mode="fixed",
        budget=rng.choice([8, 16, 20]),
        interval=rng.choice([4, 8, 12, 32]),
        policy=rng.choice(POLICIES),
        protect=rng.choice([None, "none"]),
        protected_len=rng.choice([None, None, rng.randint(0, prompt_len)]),
        reuse=rng.choice([None, "exact"]),
    )


def random_requests(rng: random.Random) -> list[AddRequest]:
    """Requests that share prefixes, some with samples, greedy or seeded."""
    texts = [random_tokens(rng, rng.randint(8, 50)) for _ in range(2)]
    requests = []
    for index in range(rng.randint(3, 7)):
        text = rng.choice(texts)
        prompt = text[: rng.randint(1, len(text))] + random_tokens(rng, rng.choice([0, 0, 2, 9]))
        sampling = SamplingParams(
            temperature=rng.choice([0, 0, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            seed=index,
            max_tokens=rng.choice([1, 20, 45]),
            logprobs=rng.choice([0, 2]),
            prompt_logprobs=rng.choice([None, None, 1]),
            n=rng.choice([1, 1, 1, 3]),
            ignore_eos=True,
        )
        requests.append(
            AddRequest(
                request_id=f"r{index}",
                token_ids=prompt,
                sampling=sampling,
                kv=random_kv(rng, len(prompt)),
                priority=rng.choice([0, 0, 1]),
            )
        )
    return requests


def random_load(seed: int, dtype: str) -> Load:
    """The arguments determine everything. The pool holds the largest request and little more."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 16])
    requests = random_requests(rng)
    longest = max(len(r.token_ids) + r.sampling.max_tokens for r in requests) + NEXT_TURN_LEN
    options = {
        "dtype": dtype,
        "block_size": block_size,
        "num_blocks": -(-longest // block_size) + 3 + rng.choice([0, 0, 200 // block_size]),
        "swap_space": rng.choice([0, 0.001, 0.01]),
        "max_running": rng.choice([2, 4, 16]),
        "max_step_tokens": rng.choice([3, 16, 512]),
        "max_chunk_len": rng.choice([None, 1, 5]),
        "num_query_slots": rng.choice([1, 1, 2, 8]),
        "order": rng.choice(["fcfs", "lpm"]),
        "turn_len": rng.choice([4, 1024]),
        "overlap": rng.choice([None, True]),
        "prefix_caching": rng.random() < 0.8,
    }
    is_late = [rng.random() < 0.4 for _ in requests]
    return Load(
        options,
        [request for request, late in zip(requests, is_late, strict=True) if not late],
        [request for request, late in zip(requests, is_late, strict=True) if late],
    )


def next_turn(request: AddRequest, said: tuple[int, ...]) -> AddRequest:
    """The conversation goes on, with the protection that its state was made with."""
    kv = request.kv
    if kv is not None and kv.protected_len is None:
        kv = dataclasses.replace(kv, protected_len=len(request.token_ids))
    return AddRequest(
        request_id=f"{request.request_id}-next",
        token_ids=[*request.token_ids, *said, 5, 6, 7],
        kv=kv,
        sampling=dataclasses.replace(request.sampling, n=1, max_tokens=8, seed=77),
    )


def check_load(seed: int, dtype: str, make_lab, alone) -> Counter[str]:
    """Every request of a load, and then its next turn, says what it says alone."""
    load = random_load(seed, dtype)
    lab = make_lab(**load.options)
    said = lab.say(load.early, load.late)
    requests = [*load.early, *load.late]
    turns = [next_turn(r, said[r.request_id, 0].token_ids) for r in requests]
    said |= lab.say(turns)
    for request in [*requests, *turns]:
        expected = alone(request, dtype=dtype, block_size=load.options["block_size"])
        for key, lone in expected.items():
            assert said[key] == lone, f"{key} of load {seed}"
    return Counter({k: v for k, v in lab.engine.stats().items() if isinstance(v, int) and v > 0})


ANY_LOAD = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("dtype", DTYPES)
@ANY_LOAD
@given(seed=st.integers(0, 2**32))
def test_company_changes_no_bit(make_lab, alone, dtype, seed):
    check_load(seed, dtype, make_lab, alone)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@settings(ANY_LOAD, max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_company_changes_no_bit_in_many_loads(make_lab, alone, dtype, seed):
    check_load(seed, dtype, make_lab, alone)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"swap_space": 0}, "num_preemptions"),
        ({"swap_space": 0.01, "turn_len": 4}, "num_swap_outs"),
        ({"num_query_slots": 1, "swap_space": 0}, "num_recomputed_tokens"),
    ],
    ids=["preempted", "swapped", "computed again"],
)
def test_losing_a_place_changes_no_bit(make_lab, crowd, crowd_alone, options, count):
    lab = make_lab(num_blocks=12, block_size=4, **options)
    assert lab.say(crowd[:4], late=crowd[4:]) == crowd_alone
    stats = lab.engine.stats()
    assert stats[count] > 0
    assert stats["num_compactions"] > 0
    assert stats["num_early_compactions"] == 0


@pytest.mark.parametrize("policy", ["zipage", "zipage2", "streaming", "random"])
def test_forks_say_what_the_whole_prompt_says(make_lab, alone, crowd, policy):
    """A branch starts from its parent's compacted state; alone it computes all of it itself."""
    kv = KVParams(mode="fixed", budget=8, interval=96, policy=policy)
    sampling = dataclasses.replace(crowd[0].sampling, max_tokens=120)
    parent = msgspec.structs.replace(crowd[0], hold=True, kv=kv, sampling=sampling)
    lab = make_lab()
    said = lab.say([parent])[parent.request_id, 0].token_ids
    assert lab.engine.stats()["num_compactions"] > 0
    children = [
        msgspec.structs.replace(next_turn(parent, said), request_id=f"child{index}", hold=False)
        for index in range(3)
    ]
    forked = lab.say(children, parent_id=parent.request_id)
    for child in children:
        assert forked[child.request_id, 0] == alone(child)[child.request_id, 0]
    assert lab.engine.stats()["num_prefilled_tokens"] < 2 * len(children[0].token_ids)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_mode_company_shows(make_lab, crowd, dtype):
    """The plain engine's logprobs depend on the batch, so the tests above can fail."""
    lab = make_lab(deterministic=False, dtype=dtype, prefix_caching=False)
    together = lab.say(crowd)
    apart = {}
    for request in crowd:
        apart |= lab.say([request])
    assert together != apart


def test_adaptive_as_the_default_is_refused():
    with pytest.raises(ValueError, match="kv_mode='fixed' or 'off'"):
        EngineConfig.from_options(deterministic=True, kv_mode="adaptive")
