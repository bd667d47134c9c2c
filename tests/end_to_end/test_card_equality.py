"""On a card, graphs, overlap and the CUDA kernels change no greedy token and no kept slot.

What can be promised to the bit is: cuBLAS picks its kernel by the number of rows, attention its
launch by their number and lengths, so bfloat16 results are equal where every step has the same
rows, and a padded step counts with its padding. Elsewhere bfloat16 may part at a near tie. float32
has no graphs; it is held against the CPU backend, whose tokens it must draw.
Knows nothing of speed.
"""

import dataclasses
import random

import pytest
import torch

from zipage_lang.runtime.kv_compressor import KVCompressor

pytestmark = pytest.mark.gpu

# FlashInfer has this head size; with 8 KV heads it splits no sequence from 34 rows on.
SHAPE = {
    "head_dim": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 997,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
}
FIXED = {"kv_mode": "fixed", "kv_budget": 48, "evict_interval": 16}
BFLOAT16 = {"backend": "cuda", "dtype": "bfloat16", "num_blocks": 2400, "max_step_tokens": 4096}
NEAR_TIE = 0.25  # nats between two tokens whose logits bfloat16 may confuse


@pytest.fixture(scope="module")
def model(make_tiny_model):
    return make_tiny_model("Qwen3", **SHAPE)[0]


def make_prompts(count, num_shared=35, longest=40):
    """Every third one starts with the same tokens; it then waits for the first of its kind."""
    rng = random.Random(5)
    shared = [rng.randrange(990) for _ in range(num_shared)]
    return [
        shared * (index % 3 == 0) + [rng.randrange(990) for _ in range(rng.randrange(3, longest))]
        for index in range(count)
    ]


def generate(engine, prompts, max_tokens, **sampling):
    """Greedy tokens; max_tokens: of each prompt. Everyone is there from the start."""
    for index, (prompt, count) in enumerate(zip(prompts, max_tokens, strict=True)):
        options = {"temperature": 0, "ignore_eos": True, "max_tokens": count, **sampling}
        engine.add(f"r{index}", prompt, **options)
    engine.finish()
    assert all(engine.final(f"r{index}").error is None for index in range(len(prompts)))
    return [engine.tokens(f"r{index}") for index in range(len(prompts))]


def assert_equal(found, wanted):
    for index, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        pairs = enumerate(zip(ours, theirs, strict=True))
        first = next((at for at, (a, b) in pairs if a != b), None)
        assert first is None, f"request {index} differs from token {first} of {len(theirs)} on"


@pytest.mark.parametrize("kv", [{}, FIXED], ids=["off", "fixed"])
def test_graphs_and_overlap_change_no_bfloat16_token_of_a_full_bucket(model, driver, kv):
    """64 rows from first to last: all prompts fit one step, and all end (or compact) together."""
    prompts, counts = make_prompts(64, num_shared=0), [120] * 64
    found = {}
    for graphs in (False, True):
        for overlap in (False, True):
            options = {"cuda_graphs": graphs, "overlap": overlap, "max_running": 64}
            engine = driver(model, **BFLOAT16, **options, **kv)
            found[graphs, overlap] = generate(engine, prompts, counts)
            assert bool(kv) == (engine.final("r0").kv.compactions > 0)
    assert len({tuple(tokens) for tokens in found[False, False]}) > 32  # not all say the same
    for variant in ((False, True), (True, False), (True, True)):
        assert_equal(found[variant], found[False, False])


def test_padding_rows_change_no_bfloat16_token(model, driver):
    """50 rows in a bucket of 56 draw what they draw when the other 6 rows decode as well."""
    prompts = make_prompts(56, num_shared=0)
    whole = generate(driver(model, **BFLOAT16), prompts, [80] * 56)
    padded = generate(driver(model, **BFLOAT16), prompts, [80] * 50 + [1] * 6)
    assert_equal(padded[:50], whole[:50])


@pytest.mark.parametrize("kv", [{}, FIXED], ids=["off", "fixed"])
def test_bfloat16_outputs_of_an_uneven_load_part_at_near_ties_only(model, driver, kv):
    prompts = make_prompts(13)
    counts = [40 + 11 * index for index in range(13)]
    engines = [
        driver(model, **BFLOAT16, cuda_graphs=is_on, overlap=is_on, **kv) for is_on in (True, False)
    ]
    found, wanted = [generate(engine, prompts, counts, logprobs=3) for engine in engines]
    for index, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if at is not None:
            entries = [out.logprobs for out in engines[1].outputs[f"r{index}", 0]]
            top = dict([entry for part in entries for entry in part][at].top)
            gap = max(top.values()) - top.get(ours[at], float("-inf"))
            assert gap < NEAR_TIE, f"request {index} parts at token {at}, {gap} nats from a tie"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kv", [{}, FIXED], ids=["off", "fixed"])
def test_float32_tokens_equal_the_cpus(model, driver, kv, overlap):
    prompts, counts = make_prompts(12), [90 + 5 * index for index in range(12)]
    wanted = generate(driver(model, backend="cpu", **kv), prompts, counts)
    found = generate(driver(model, backend="cuda", overlap=overlap, **kv), prompts, counts)
    assert_equal(found, wanted)


# Alone in a small pool, so that when memory is short depends on nothing that a card does later.
SHORT_OF_MEMORY = {
    "kv_mode": "adaptive",
    "kv_budget": 48,
    "evict_interval": 16,
    "num_blocks": 9,
    "growth_reserve": 16,
}


def one_by_one(engine, prompts, max_tokens):
    for index, prompt in enumerate(prompts):
        engine.add(f"r{index}", prompt, temperature=0, ignore_eos=True, max_tokens=max_tokens)
        engine.finish()
        final = engine.final(f"r{index}")
        assert final.error is None, final.error
        assert final.kv.compactions > 0
    return [engine.tokens(f"r{index}") for index in range(len(prompts))]


def test_float32_tokens_equal_the_cpus_when_memory_is_short(model, driver):
    prompts = make_prompts(4, num_shared=0, longest=13)
    wanted = one_by_one(driver(model, backend="cpu", **SHORT_OF_MEMORY), prompts, 150)
    assert_equal(one_by_one(driver(model, backend="cuda", **SHORT_OF_MEMORY), prompts, 150), wanted)


@dataclasses.dataclass
class KeptSlots:
    """Positions that each compaction kept, by row and length; taken when it has run."""

    by_compaction: dict[tuple[int, int], torch.Tensor]  # [num_layers, num_keep, num_kv_heads]

    def spy(self, patch):
        run = KVCompressor.run

        def run_and_look(compressor, compactions):
            failed_rows = run(compressor, compactions)
            cache = compressor._cache
            for item in compactions:
                blocks = cache.position[:, list(item.block_ids)]
                slots = blocks.flatten(1, 2)  # [num_layers, num_slots, num_kv_heads]
                kept = slots[:, item.protected_len : item.protected_len + item.num_keep]
                self.by_compaction[item.row, item.logical_len] = kept.cpu()
            return failed_rows

        patch.setattr(KVCompressor, "run", run_and_look)


@pytest.mark.parametrize("policy", ["zipage", "zipage2", "streaming", "random"])
def test_compactions_keep_the_slots_that_the_cpu_keeps(model, driver, monkeypatch, policy):
    """Every layer and KV head, over several compactions of each request: in the same places.

    The two compute keys and values in float32, in other orders, so that of two slots as good as
    each other to six digits one may keep the one and one the other: a slot, in one head of fifty.
    """
    prompts, counts = make_prompts(6), [210] * 6
    kept = {}
    for backend in ("cpu", "cuda"):
        kept[backend] = KeptSlots({})
        with monkeypatch.context() as patch:
            kept[backend].spy(patch)
            engine = driver(model, backend=backend, policy=policy, **FIXED)
            kept[backend].by_compaction.clear()  # a card's engine compacts once to measure memory
            generate(engine, prompts, counts, seed=3)
            assert engine.final("r0").kv.compactions > 5
    ours, theirs = kept["cuda"].by_compaction, kept["cpu"].by_compaction
    assert ours.keys() == theirs.keys()
    num_heads, exchanged = 0, []
    for key, positions in theirs.items():
        num_heads += positions.shape[0] * positions.shape[2]
        differing = (ours[key] != positions).any(1).nonzero().tolist()
        for layer, head in differing:
            lost = {*positions[layer, :, head].tolist()} - {*ours[key][layer, :, head].tolist()}
            exchanged.append((*key, layer, head, *lost))
    assert all(len(line) <= 5 for line in exchanged), (
        f"(row, length, layer, head, lost) {exchanged}"
    )
    assert len(exchanged) <= num_heads / 50, f"{len(exchanged)} of {num_heads}: {exchanged}"


# Beginnings of English text and of a Python function, as the model's tokenizer gives them.
PROMPT_IDS = [
    [504, 3575, 282, 4649, 314],
    [1604, 3987, 46477, 24, 94, 727, 198],
    [6403, 1980, 253, 655, 28, 281, 253, 6560, 411, 260, 3426, 28],
    [12615, 36411, 418],
    [33580, 14870, 314, 260, 980, 411, 527],
    [35097, 8957, 355, 7473, 332, 28, 198, 198, 57, 744, 2385, 288],
]


@pytest.fixture(scope="module")
def smollm2_here(request):
    """The embedded model; a bare card machine has it only when it was carried along."""
    try:
        return request.getfixturevalue("smollm2")
    except ValueError as problem:
        pytest.skip(f"{problem} (benchmarks/card/test_gpu.sh says how to carry it)")


@pytest.mark.parametrize("kv", [{}, FIXED], ids=["off", "fixed"])
def test_smollm2_float32_tokens_equal_the_cpus(smollm2_here, driver, kv):
    counts = [100] * len(PROMPT_IDS)
    wanted = generate(driver(smollm2_here, backend="cpu", num_threads=4, **kv), PROMPT_IDS, counts)
    for overlap in (False, True):
        engine = driver(smollm2_here, backend="cuda", overlap=overlap, **kv)
        assert_equal(generate(engine, PROMPT_IDS, counts), wanted)


def test_smollm2_float32_tokens_equal_the_cpus_when_memory_is_short(smollm2_here, driver):
    options = {"num_threads": 4, **SHORT_OF_MEMORY}
    wanted = one_by_one(driver(smollm2_here, backend="cpu", **options), PROMPT_IDS[:3], 150)
    found = one_by_one(driver(smollm2_here, backend="cuda", **options), PROMPT_IDS[:3], 150)
    assert_equal(found, wanted)


def test_compactions_score_in_the_hopper_kernel_what_tritons_scores(model, driver, monkeypatch):
    """A cosine at the threshold but for rounding may decide a sum either way."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no Hopper card")
    from zipage_lang.kernels import scores
    from zipage_lang.kernels.hopper import scoring

    pairs, call = [], scoring.mass_and_similarity

    def spy(*args):
        found = call(*args)
        pairs.append((found, scores.mass_and_similarity_by_triton(*args)))
        return found

    monkeypatch.setattr(scoring, "mass_and_similarity", spy)
    engine = driver(model, policy="zipage", **BFLOAT16, **FIXED)
    pairs.clear()  # what the start measured
    generate(engine, make_prompts(13), [40 + 11 * index for index in range(13)])
    torch.cuda.synchronize()
    assert pairs
    for (mass, similarity), (wanted_mass, wanted_similarity) in pairs:
        torch.testing.assert_close(mass, wanted_mass, atol=1e-6, rtol=1e-4)
        apart = ~similarity.isclose(wanted_similarity, atol=1e-5, rtol=1e-4)
        assert apart.float().mean() < 0.01, f"{int(apart.sum())} of {apart.numel()} sums"
