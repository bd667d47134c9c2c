"""The Triton compaction by a blended score against its twin: the same slots, moved to the bit."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton kernels are tested where triton is installed")

from zipage_lang.kernels import blend
from zipage_lang.kernels.backend import ScoreBlend, TailRows
from zipage_lang.kernels.reference import blend as reference

INTEGERS = {2: torch.int16, 4: torch.int32}


class World:
    """Rows on scattered slots; stored state is garbage past each row's stateful slots."""

    def __init__(self, tail_lens, num_keep, device, *, block_size=16, num_heads=2, head_dim=24,
                 dtype=torch.bfloat16):  # fmt: skip
        generator = torch.Generator().manual_seed(sum(tail_lens) + block_size)
        num_rows, longest = len(tail_lens), max(tail_lens)
        num_blocks = 2 + -(-sum(tail_lens) // block_size)
        order = torch.randperm(num_blocks * block_size, generator=generator)
        slots = torch.full((num_rows, longest), -1)
        start = 0
        for row, tail_len in enumerate(tail_lens):
            slots[row, :tail_len] = order[start : start + tail_len]
            start += tail_len
        shape = (num_rows, num_heads, longest)
        lens = torch.tensor(tail_lens)
        stateful_lens = lens * torch.arange(num_rows) // max(num_rows - 1, 1)
        state = (num_blocks, block_size, num_heads)
        kv = torch.randn((num_blocks, 2, block_size, num_heads, head_dim), generator=generator)
        score = torch.full(state, math.nan)
        for row, stateful_len in enumerate(stateful_lens.tolist()):
            own = slots[row, :stateful_len]
            drawn = torch.rand(len(own), num_heads, generator=generator)
            score.view(-1, num_heads)[own] = drawn
        self.pools = [kv.to(dtype), score, torch.full(state, -7, dtype=torch.int32)]
        self.pools = [pool.to(device) for pool in self.pools]
        positions = torch.rand(shape, generator=generator).argsort(-1).int()
        nothing = torch.zeros((num_rows, 0), dtype=torch.int64)
        logical_lens = positions.flatten(1).amax(-1).long() - 2
        zeros = torch.zeros(num_rows, dtype=torch.int64)
        rows = TailRows(
            slots, positions, lens, torch.tensor(num_keep), stateful_lens, logical_lens,
            zeros, zeros, nothing, nothing,
        )  # fmt: skip
        self.rows = TailRows(*(part.to(device) for part in rows))
        mass, similarity = torch.rand((2, *shape), generator=generator)
        for row, tail_len in enumerate(tail_lens):
            mass[row, :, tail_len:] = 99.0  # may not leak into a tail
            similarity[row, :, tail_len:] = 99.0
        self.mass, self.similarity = mass.to(device), similarity.to(device)

    def compacted(self, compact, pool_kernel=5, num_recent=3, num_sinks=1):
        pools = [pool.clone() for pool in self.pools]
        parts = ScoreBlend(self.mass, self.similarity, 0.8, pool_kernel, 0.4, 0.2)
        compact(*pools, self.rows, parts, num_recent, num_sinks)
        return [pool.view(INTEGERS[pool.element_size()]) for pool in pools]


@pytest.mark.parametrize(
    ("tail_lens", "num_keep", "sizes"),
    [
        ((40, 23, 2), (31, 11, 1), {}),
        ((130, 50), (64, 50), {"block_size": 64, "dtype": torch.float32}),
        ((33, 1), (3, 1), {"block_size": 1, "num_heads": 3}),
        pytest.param(
            (2304, 5000, 2100), (2048, 2048, 1), {"num_heads": 8, "head_dim": 128},
            marks=pytest.mark.gpu,
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("pool_kernel", [1, 5])
def test_blended_compaction_equals_its_twin(device, tail_lens, num_keep, sizes, pool_kernel):
    world = World(tail_lens, num_keep, device, **sizes)
    found = world.compacted(blend.compact_blend, pool_kernel)
    expected = world.compacted(reference.compact_blend, pool_kernel)
    for pool, twin in zip(found, expected, strict=True):
        assert torch.equal(pool, twin)


def test_protected_slots_survive_a_low_score(device):
    world = World((60,), (10,), device)
    world.mass.zero_()
    pools = world.compacted(blend.compact_blend, num_recent=12, num_sinks=0)
    front = world.rows.slots[0, :10]
    kept = pools[2].view(-1, pools[2].shape[-1])[front]
    assert (kept >= world.rows.logical_lens[0] - 12).all()


@pytest.mark.gpu
def test_blended_compaction_never_waits_for_the_device(device):
    world = World((300, 77), (200, 50), device)
    try:
        torch.cuda.set_sync_debug_mode("error")
        world.compacted(blend.compact_blend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
