"""The Triton scores against their twins; float32 rounding apart.

Which keys count as similar is a hard decision, so thresholds are drawn from the widest gap between
cosines: no rounding can change the outcome.
"""

import math

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton kernels are tested where triton is installed")

from zipage_lang.kernels import scores
from zipage_lang.kernels.backend import TailQueries
from zipage_lang.kernels.reference import scores as reference

SCALE = 0.3
FIRST_POSITION = 10


class World:
    """Rows on scattered slots of a pool, and of a ring, that are full of NaN elsewhere.

    The last row of several has no queries. Keys share a direction, so that many are similar.
    """

    def __init__(
        self, tail_lens, device, *, heads=2, group=2, head_dim=16, block_size=16,
        dtype=torch.bfloat16, num_queries=3,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(sum(tail_lens) + head_dim)
        num_rows, used = len(tail_lens), sum(tail_lens)
        num_blocks = 2 + -(-used // block_size)
        slot_order = torch.randperm(num_blocks * block_size, generator=generator)
        kv = torch.full((num_blocks, 2, block_size, heads, head_dim), math.nan, dtype=dtype)
        self.slots = torch.full((num_rows, max(tail_lens)), -1)
        start = 0
        for row, tail_len in enumerate(tail_lens):
            own = slot_order[start : start + tail_len]
            start += tail_len
            self.slots[row, :tail_len] = own
            keys = torch.randn(tail_len, 2, heads, head_dim, generator=generator)
            keys += 0.8 * torch.randn(1, 1, heads, head_dim, generator=generator)
            kv[own // block_size, :, own % block_size] = keys.to(dtype)
        shape = (num_rows, heads, max(tail_lens))
        order = torch.rand(shape, generator=generator).argsort(-1)
        self.positions = order.int() + FIRST_POSITION
        queries = self._queries(tail_lens, heads * group, head_dim, dtype, num_queries, generator)
        self.kv, self.slots = kv.to(device), self.slots.to(device)
        self.positions = self.positions.to(device)
        self.queries = TailQueries(*(part.to(device) for part in queries))

    def _queries(self, tail_lens, num_q_heads, head_dim, dtype, num_queries, generator):
        num_rows, num_entries = len(tail_lens), len(tail_lens) * num_queries + 5
        ring = torch.full((num_entries, num_q_heads, head_dim), math.nan, dtype=dtype)
        lse = torch.full((num_entries, num_q_heads), math.nan)
        entries = torch.randperm(num_entries, generator=generator)[: num_rows * num_queries]
        drawn = torch.randn(len(entries), num_q_heads, head_dim, generator=generator)
        ring[entries] = drawn.to(dtype)
        lse[entries] = torch.randn(len(entries), num_q_heads, generator=generator) + 5
        ring_slots = entries.view(num_rows, num_queries)
        newest = FIRST_POSITION + torch.tensor(tail_lens)[:, None] - num_queries
        at = newest + torch.arange(num_queries)  # the newest keys are newer than some queries
        ring_slots[0, -1], at[0, -1] = -1, -1
        if num_rows > 1:
            ring_slots[-1], at[-1] = -1, -1
        return ring, lse, ring_slots, at

    @property
    def tail(self):
        return self.kv, self.slots, self.positions

    def threshold(self, chunk):
        """Near 0.5, in the middle of the widest gap between the cosines that are compared."""
        unit = F.normalize(reference.gather_keys(self.kv, self.slots).double(), dim=-1)
        parts = [part @ part.transpose(-1, -2) for part in unit.split(chunk, dim=2)]
        cosine = torch.cat([part.flatten() for part in parts])
        near = cosine[(cosine > 0.4) & (cosine < 0.6)].sort().values
        gaps = near.diff()
        if len(gaps) == 0:
            return 0.5
        widest = gaps.argmax()
        assert gaps[widest] > 2e-6, "no threshold is safe from rounding"
        return (near[widest] + gaps[widest] / 2).item()


def assert_close(found, expected):
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-5)


BF16, FP32 = torch.bfloat16, torch.float32
CASES = [  # tail_lens, chunk, sizes
    ((40, 23), 16, {"heads": 1, "group": 1, "block_size": 1}),
    ((300, 17), 256, {"heads": 1, "group": 4, "head_dim": 128}),
    ((70, 33), 40, {"group": 3, "head_dim": 80, "block_size": 64}),
    ((170, 33), 150, {"heads": 1, "group": 1, "head_dim": 32}),
    ((50, 64), 256, {"group": 8, "head_dim": 8, "dtype": FP32}),
    ((29, 90), 300, {"group": 2, "head_dim": 64}),
    ((5, 3, 1), 1, {"group": 2, "dtype": FP32}),
    pytest.param(
        (2304, 700), 256, {"heads": 2, "group": 4, "head_dim": 128, "num_queries": 16},
        marks=pytest.mark.gpu,
    ),
    pytest.param(
        (700, 513), 512, {"heads": 4, "group": 8, "head_dim": 128, "dtype": FP32},
        marks=pytest.mark.gpu,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("tail_lens", "chunk", "sizes"), CASES)
def test_one_pass_equals_its_twin(device, tail_lens, chunk, sizes):
    world = World(tail_lens, device, **sizes)
    rest = (world.queries, SCALE, chunk, world.threshold(chunk))
    mass, similarity = scores.mass_and_similarity_by_triton(*world.tail, *rest)
    wanted_mass, wanted_similarity = reference.mass_and_similarity(*world.tail, *rest)
    assert_close(mass, wanted_mass)
    assert_close(similarity, wanted_similarity)


FAMILIES = {  # indices in a chunk of 256, in tiles of 64, of keys that are alike; others are not
    "none": [],
    "all": [range(256)],
    "every other": [range(0, 256, 2)],
    "across the tiles' borders": [(63, 64), (127, 128), (191, 192), (0, 255)],
    "old ones": [(5, 9), (20, 100), (70, 150, 230)],
    "ends of tiles": [(0, 63, 64, 127, 128, 191, 192, 255)],
    "many small ones": [range(first, 240, 24) for first in range(24)],
}  # fmt: skip
NEWER_BY = {"one each": 1, "millions each": 8_000_000}


@pytest.mark.parametrize("step", NEWER_BY)
@pytest.mark.parametrize("families", FAMILIES)
def test_newest_similar_key_is_found_wherever_it_lies(device, families, step):
    world = World((256, 250), device, heads=1, group=1, head_dim=128, num_queries=1)
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(2, 256, 128, generator=generator)  # no cosine reaches 0.5
    for family in FAMILIES[families]:
        sizes = torch.rand(2, len(family), 1, generator=generator) + 0.5
        keys[:, list(family)] = keys[:, family[0], None] * sizes
    for row, tail_len in enumerate((256, 250)):
        own = world.slots[row, :tail_len]
        world.kv[own // 16, 0, own % 16, 0] = keys[row, :tail_len].bfloat16().to(device)
    world.slots[0, 60:70] = -1  # holes in the middle
    world.positions[1] = torch.arange(256, device=device) + FIRST_POSITION
    world.positions *= NEWER_BY[step]
    _, found = scores.mass_and_similarity_by_triton(*world.tail, world.queries, SCALE, 256, 0.7)
    assert_close(found, reference.lightning_similarity(*world.tail, 256, 0.7))


def test_chunk_without_keys_scores_zero(device):
    world = World((40, 5), device, heads=1)
    results = scores.mass_and_similarity_by_triton(*world.tail, world.queries, SCALE, 16, 0.5)
    assert all((result[1, :, 16:] == 0).all() for result in results)


def test_float16_keys_equal_their_twin(device):
    world = World((40, 23), device, heads=1, dtype=torch.float16)
    rest = (world.queries, SCALE, 16, world.threshold(16))
    found = scores.mass_and_similarity_by_triton(*world.tail, *rest)
    for part, wanted in zip(found, reference.mass_and_similarity(*world.tail, *rest), strict=True):
        assert_close(part, wanted)


@pytest.mark.parametrize(("dtype", "group"), [(BF16, 3), (FP32, 1)])
def test_attention_mass_equals_its_twin(device, dtype, group):
    world = World((90, 31), device, group=group, head_dim=24, dtype=dtype)
    mass = scores.attention_mass(*world.tail, world.queries, SCALE)
    assert_close(mass, reference.attention_mass(*world.tail, world.queries, SCALE))
    assert (mass[1] == 0).all()  # a row without queries


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_flash_similarity_equals_its_twin_across_tiles(device, dtype):
    world = World((150, 80), device, heads=1, dtype=dtype)
    threshold = world.threshold(150)
    found = scores.flash_similarity(*world.tail, threshold)
    assert_close(found, reference.flash_similarity(*world.tail, threshold))


@pytest.mark.parametrize("chunk", [7, 32])
def test_lightning_similarity_equals_its_twin_and_the_one_pass(device, chunk):
    world = World((45, 20), device, heads=1)
    threshold = world.threshold(chunk)
    found = scores.lightning_similarity(*world.tail, chunk, threshold)
    assert_close(found, reference.lightning_similarity(*world.tail, chunk, threshold))
    _, fused = scores.mass_and_similarity_by_triton(
        *world.tail, world.queries, SCALE, chunk, threshold
    )
    assert_close(fused, found)


def test_newest_of_many_duplicates_looks_least_redundant(device):
    world = World((20, 20), device)
    world.kv[:, 0] = 1.0  # every key alike
    similarity = scores.lightning_similarity(*world.tail, 256, 0.5)
    assert torch.equal(similarity.argmin(-1), world.positions.argmax(-1))


def test_zero_keys_are_similar_to_none(device):
    world = World((20, 20), device)
    world.kv[:, 0] = 0.0
    _, similarity = scores.mass_and_similarity_by_triton(*world.tail, world.queries, SCALE, 16, 0.0)
    assert (similarity == 0).all()


@pytest.mark.parametrize(("tail_lens", "pool_kernel"), [((40, 23, 1), 5), ((1100, 3), 1)])
def test_combined_scores_equal_their_twin(device, tail_lens, pool_kernel):
    generator = torch.Generator().manual_seed(pool_kernel)
    shape = (3, len(tail_lens), 2, max(tail_lens))
    mass, similarity, history = torch.rand(shape, generator=generator).to(device)
    lens = torch.tensor(tail_lens, device=device)
    in_order = lens > 20
    for row, tail_len in enumerate(tail_lens):
        mass[row, :, tail_len:] = 99.0  # may not leak into a tail
        similarity[row, :, tail_len:] = 99.0
    args = (mass, similarity, history, lens, in_order)
    settings = {
        "decay": 0.8, "pool_kernel": pool_kernel, "temperature": 0.4, "mass_weight": 0.2
    }  # fmt: skip
    found = scores.combine_scores(*args, **settings)
    expected = reference.combine_scores(*args, **settings)
    for row, tail_len in enumerate(tail_lens):
        for part, wanted in zip(found, expected, strict=True):
            assert_close(part[row, :, :tail_len], wanted[row, :, :tail_len])


@pytest.mark.gpu
def test_keys_past_two_to_the_31_elements_are_found(device):
    world = World((300,), device, heads=8, group=1, head_dim=128)
    num_far = 2**31 // world.kv[0].numel() + 1
    far = torch.zeros((num_far, *world.kv.shape[1:]), dtype=BF16, device=device)
    pool = torch.cat([far, world.kv])
    slots = world.slots + num_far * world.kv.shape[2]
    rest = (world.positions, world.queries, SCALE, 256, 0.5)
    near = scores.mass_and_similarity_by_triton(world.kv, world.slots, *rest)
    for found, wanted in zip(
        scores.mass_and_similarity_by_triton(pool, slots, *rest), near, strict=True
    ):
        assert torch.equal(found, wanted)


@pytest.mark.gpu
def test_scoring_never_waits_for_the_device(device):
    world = World((300, 77), device)
    lens = torch.tensor([300, 77], device=device)
    try:
        torch.cuda.set_sync_debug_mode("error")
        mass, similarity = scores.mass_and_similarity_by_triton(
            *world.tail, world.queries, SCALE, 256, 0.5
        )
        scores.flash_similarity(*world.tail, 0.5)
        scores.combine_scores(
            mass, similarity, mass, lens, lens > 100,
            decay=0.8, pool_kernel=5, temperature=0.4, mass_weight=0.2,
        )  # fmt: skip
    finally:
        torch.cuda.set_sync_debug_mode("default")
