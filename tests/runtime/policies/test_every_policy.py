"""One matrix over all policies: laws that hold whatever a policy prefers, and whole engines.

Which slots a policy prefers is `test_scores.py`'s.
"""

import random

import numpy as np
import pytest
import torch
import transformers
from test_support.one_request import NUM_LAYERS, OneRequest, random_calibration

from zipage_lang.kernels.backend import choose_backend
from zipage_lang.runtime.config import CompressionConfig, EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.kv_compressor import KVCompressor
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.policies.registry import SHIPPED, load_policies
from zipage_lang.runtime.sampling_params import SamplingParams

NAMES = sorted({make().name for make in SHIPPED} - {"full"})
# Windows that leave something to choose where budgets are small.
SMALL = {
    "random": "random:num_recent=4",
    "triattention": "triattention:num_recent=4",
    "vase": "vase:num_recent=4:num_sinks=1",
    "page": "page:page_len=4:num_fresh=4",
    "zipage2": "zipage2:num_recent=4",
}
KNOWN = random_calibration()


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def policy_of(name):
    return load_policies()[SMALL.get(name, name)]


def kept(request):
    """Positions in slot order, by layer and head."""
    return {head: [token.position for token in tail] for head, tail in request.tails.items()}


@pytest.mark.parametrize("name", NAMES)
def test_exactly_the_budget_is_kept_and_every_slot_takes_its_state_along(name):
    policy = policy_of(name)
    for seed in range(3):
        rng = random.Random(seed)
        request = OneRequest(seed, protected_len=rng.choice([0, 3, 8]))
        begin, end = 0, request.protected_len
        blocks, offsets = request.places(begin, end)
        protected = request.cache.kv[:, blocks, :, offsets].clone()
        for _ in range(4):
            request.grow(rng.randint(5, 20))
            before = {head: list(tail) for head, tail in request.tails.items()}
            num_keep = rng.randint(1, request.tail_len)
            request.compact(policy, num_keep, KNOWN)
            for (layer, head), tail in request.tails.items():
                positions = [token.position for token in tail]
                assert len(set(positions)) == len(positions) == num_keep
                assert set(positions) <= {token.position for token in before[layer, head]}
                pairs = [np.stack([token.key, token.value]) for token in tail]
                assert np.array_equal(request.stored(layer, head), np.stack(pairs))
        assert torch.equal(request.cache.kv[:, blocks, :, offsets], protected)


@pytest.mark.parametrize("name", NAMES)
def test_the_newest_tokens_stay(name):
    policy = policy_of(name)
    num_newest = policy.num_fresh if name == "page" else policy.num_recent
    request = OneRequest(5, protected_len=2)
    for _ in range(3):
        request.grow(30)
        request.compact(policy, 28, KNOWN)
        newest = set(range(request.logical_len - num_newest, request.logical_len))
        assert all(newest <= set(positions) for positions in kept(request).values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_pass_slots", [1, 100_000])
def test_neither_batch_nor_pass_changes_what_is_kept(name, max_pass_slots):
    """The same request alone, and beside a shorter one, layer by layer or all layers at once."""
    policy, outcomes = policy_of(name), []
    for num_others in (0, 1):
        request = OneRequest(9, protected_len=3)
        request.grow(40)
        items = [request.plan("it", 25, policy.num_queries > 0)]
        if num_others:  # another request, in blocks that the first does not use
            items.append(shorter_beside(request, items[0]))
        compressor = KVCompressor(
            request.cache,
            choose_backend("cpu"),
            {"it": policy},
            max_pass_slots,
            calibration_of=lambda _: KNOWN,
        )
        compressor.run(tuple(items))
        blocks, offsets = request.places(3, 28)
        outcomes.append(request.cache.position[:, blocks, offsets].clone())
    assert torch.equal(*outcomes)


def shorter_beside(request, item):
    """A plan for the same contents' first 20 slots, in other blocks and other rows."""
    used = len(item.block_ids_before)
    others = request.blocks[used : 2 * used]
    for pool in request.cache.block_pools:
        pool[:, others] = pool[:, request.blocks[:used]]
    return type(item)(
        **{field: getattr(item, field) for field in item.__dataclass_fields__}
        | {
            "ident": 1,
            "row": 1,
            "tail_len": 20,
            "num_keep": 9,
            "block_ids_before": tuple(others[:6]),
            "block_ids": tuple(others[:3]),
        }
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_depends_on_the_plan_alone(name):
    outcomes = []
    for _ in range(2):
        request = OneRequest(11, protected_len=1)
        for num_keep in (20, 24):
            request.grow(22)
            request.compact(policy_of(name), num_keep, KNOWN)
        outcomes.append([pool.nan_to_num().clone() for pool in request.cache.block_pools])
    assert all(torch.equal(once, again) for once, again in zip(*outcomes, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_tails_compact_within_their_budget(name):
    request = OneRequest(13, protected_len=2, dtype=torch.bfloat16)
    request.grow(40)
    request.compact(policy_of(name), 22, KNOWN)
    request.grow(10)
    request.compact(policy_of(name), 22, KNOWN)
    assert all(len(set(positions)) == 22 for positions in kept(request).values())


@pytest.mark.parametrize("name", ["random", "kvcompress", "snapkv", "vase", "triattention"])
def test_heads_and_layers_choose_for_themselves(name):
    request = OneRequest(17, protected_len=0)
    request.grow(60)
    request.compact(policy_of(name), 25, KNOWN)
    assert len({frozenset(positions) for positions in kept(request).values()}) == 2 * NUM_LAYERS


def test_pages_are_shared_by_the_heads_of_a_layer_and_stay_whole():
    request = OneRequest(19, protected_len=4)
    for _ in range(3):
        request.grow(24)
        request.compact(policy_of("page"), 24, KNOWN)
        for layer in range(NUM_LAYERS):
            tails = [request.tails[layer, head] for head in range(2)]
            first, second = ([token.position for token in tail] for tail in tails)
            assert first == second
            for start in range(0, 24, 4):
                page = first[start : start + 4]
                assert page == list(range(page[0], page[0] + 4))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_card_keeps_the_slots_that_the_cpu_keeps(name):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    card = choose_backend("cuda", torch.float32)
    known = random_calibration(card.device)
    for seed in range(3):
        ours, theirs = OneRequest(seed, 3, backend=card), OneRequest(seed, 3)
        for num_new, num_keep in ((44, 30), (17, 30), (9, 21)):
            ours.grow(num_new)
            theirs.grow(num_new)
            ours.compact(policy_of(name), num_keep, known)
            theirs.compact(policy_of(name), num_keep, KNOWN)
            assert kept(ours) == kept(theirs)


# --- whole engines ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    config = transformers.Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("tiny")
    transformers.Qwen3ForCausalLM(config).eval().save_pretrained(folder)
    return folder


def finish(engine, requests):
    """All requests' last outputs, by id; invariants are checked after every few steps."""
    for number, (request_id, kv) in enumerate(requests.items()):
        prompt = [(7 * i + number) % 97 for i in range(40)]
        sampling = SamplingParams(max_tokens=90, seed=1)
        message = AddRequest(request_id=request_id, token_ids=prompt, sampling=sampling, kv=kv)
        engine.handle(message)
    finals, num_steps = {}, 0
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            if output.is_final:
                finals[output.request_id] = output
        num_steps += 1
        if num_steps % 16 == 0:
            engine.scheduler.check_invariants()
    return finals


@pytest.mark.parametrize("mode", ["fixed", "adaptive"])
def test_every_policy_runs_in_an_engine_with_the_prompt_protected_or_not(tiny_model, mode):
    # In adaptive mode nothing is dropped unless blocks are short.
    num_blocks = 400 if mode == "fixed" else 160
    options = {"num_blocks": num_blocks, "block_size": 8, "swap_space": 0, "num_threads": 1}
    engine = Engine(EngineConfig.from_options(model=str(tiny_model), max_running=32, **options))
    requests = {
        f"{name}/{protect}": KVParams(
            mode=mode, budget=32, interval=16, policy=SMALL.get(name, name), protect=protect
        )
        for name in NAMES
        for protect in ("prompt", "none")
    }
    finals = finish(engine, requests)
    assert set(finals) == set(requests)
    for request_id, final in finals.items():
        kv, protected = final.kv, 40 if request_id.endswith("prompt") else 0
        assert final.usage.completion_tokens == 90
        assert kv.protected_len == protected
        if mode == "fixed":
            assert kv.resident_len == kv.logical_len - kv.dropped
            assert kv.compactions > 0, request_id
            assert kv.max_resident_len <= protected + 32 + 16 + 8
    compacted = {request_id for request_id, final in finals.items() if final.kv.compactions}
    assert len(compacted) >= len(finals) // 3


def test_parameters_are_part_of_the_signature():
    def signature(policy):
        return CompressionConfig(kv_mode="fixed", policy=policy).resolve(None, 5).signature()

    asked = ["rkv", "rkv:mass_weight=0.5", "rkv:mass_weight=0.5:num_recent=4", "gkv"]
    assert len({signature(policy) for policy in asked}) == len(asked)
