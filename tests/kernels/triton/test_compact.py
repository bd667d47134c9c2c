"""The Triton hole filling against its twin: equal to the bit, in all pools."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton kernels are tested where triton is installed")

from zipage_lang.kernels import compact
from zipage_lang.kernels.reference import compact as reference

INTEGERS = {2: torch.int16, 4: torch.int32}


class World:
    """Rows on scattered slots; unused slots, and what no score may reach, hold NaN."""

    def __init__(self, tail_lens, num_keep, block_size, dtype, device, num_heads=3, head_dim=24):
        generator = torch.Generator().manual_seed(sum(tail_lens) + block_size)
        used = sum(tail_lens)
        num_blocks = 2 + -(-used // block_size)
        slot_order = torch.randperm(num_blocks * block_size, generator=generator)
        kv = torch.randn((num_blocks, 2, block_size, num_heads, head_dim), generator=generator)
        lines = kv.transpose(1, 2).flatten(0, 1)  # [num_slots, 2, num_heads, head_dim], a copy
        lines[slot_order[used:]] = math.nan
        kv = lines.view(num_blocks, block_size, 2, num_heads, head_dim).transpose(1, 2)
        shape = (len(tail_lens), num_heads, max(tail_lens))
        self.kv = kv.to(dtype).contiguous().to(device)
        self.slots = torch.full((shape[0], shape[2]), -1)
        self.keep = torch.zeros(shape, dtype=torch.bool)
        start = 0
        for row, tail_len in enumerate(tail_lens):
            self.slots[row, :tail_len] = slot_order[start : start + tail_len]
            start += tail_len
            for head in range(num_heads):
                kept = torch.randperm(tail_len, generator=generator)[: num_keep[row]]
                self.keep[row, head, kept] = True
        self.slots, self.keep = self.slots.to(device), self.keep.to(device)
        self.num_keep = torch.tensor(num_keep, device=device)
        self.positions = torch.rand(shape, generator=generator).argsort(-1).int().to(device)
        self.scores = torch.rand(shape, generator=generator).to(device)
        self.state_shape = (num_blocks, block_size, num_heads)

    def filled(self, fill, with_scores):
        """The three pools after the move, as integers, so that NaN compare."""
        device = self.kv.device
        pools = [
            self.kv.clone(),
            torch.full(self.state_shape, -7.0, device=device),
            torch.full(self.state_shape, -7, dtype=torch.int32, device=device),
        ]
        scores = self.scores if with_scores else None
        fill(*pools, self.slots, self.keep, self.num_keep, self.positions, scores)
        return [pool.view(INTEGERS[pool.element_size()]) for pool in pools]


WORLDS = [
    ((40, 23, 2), (31, 11, 1), 16, torch.bfloat16),
    ((130, 50), (64, 50), 64, torch.float32),
    ((33, 1), (3, 1), 1, torch.bfloat16),
    ((150, 140), (75, 139), 16, torch.float32),
    ((16_384, 70), (9_000, 69), 16, torch.bfloat16),  # the most slots whose ranks share an int32
    ((16_385, 70), (9_000, 69), 16, torch.bfloat16),
    pytest.param(
        (2304, 5000, 2100), (2048, 2048, 1), 16, torch.bfloat16, marks=pytest.mark.gpu
    ),
]  # fmt: skip


@pytest.mark.parametrize(("tail_lens", "num_keep", "block_size", "dtype"), WORLDS)
@pytest.mark.parametrize("with_scores", [True, False])
def test_fill_holes_equals_its_twin(device, tail_lens, num_keep, block_size, dtype, with_scores):
    world = World(tail_lens, num_keep, block_size, dtype, device)
    found = world.filled(compact.fill_holes, with_scores)
    expected = world.filled(reference.fill_holes, with_scores)
    for pool, wanted in zip(found, expected, strict=True):
        assert torch.equal(pool, wanted)


def test_keeping_everything_moves_nothing(device):
    world = World((40, 23), (40, 23), 16, torch.float32, device)
    kv, _, _ = world.filled(compact.fill_holes, True)
    assert torch.equal(kv, world.kv.view(torch.int32))


def test_no_scores_leave_the_score_pool_alone(device):
    world = World((20,), (9,), 4, torch.float32, device)
    _, score, _ = world.filled(compact.fill_holes, False)
    assert (score.view(torch.float32) == -7.0).all()


@pytest.mark.gpu
def test_hole_filling_never_waits_for_the_device(device):
    world = World((300, 77), (200, 50), 16, torch.bfloat16, device)
    state = torch.zeros(world.state_shape, device=device)
    args = (state.int(), world.slots, world.keep, world.num_keep, world.positions, world.scores)
    try:
        torch.cuda.set_sync_debug_mode("error")
        compact.fill_holes(world.kv, state, *args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
