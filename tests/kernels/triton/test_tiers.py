"""The Triton compaction by tiers against its twin: the same slots, moved to the bit."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton kernels are tested where triton is installed")

from zipage_lang.kernels import tiers
from zipage_lang.kernels.backend import ScoreTiers, TailRows
from zipage_lang.kernels.reference import tiers as reference

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
        for row, own in enumerate(order[: sum(tail_lens)].split(list(tail_lens))):
            slots[row, : len(own)] = own
        shape = (num_rows, num_heads, longest)
        lens = torch.tensor(tail_lens)
        stateful_lens = lens * torch.arange(num_rows) // max(num_rows - 1, 1)
        state = (num_blocks, block_size, num_heads)
        kv = torch.randn((num_blocks, 2, block_size, num_heads, head_dim), generator=generator)
        score = torch.full(state, math.nan)
        for row, stateful_len in enumerate(stateful_lens.tolist()):
            drawn = torch.rand(stateful_len, num_heads, generator=generator)
            score.view(-1, num_heads)[slots[row, :stateful_len]] = drawn
        pools = [kv.to(dtype), score, torch.full(state, -7, dtype=torch.int32)]
        self.pools = [pool.to(device) for pool in pools]
        positions = 1000 + torch.rand(shape, generator=generator).argsort(-1).int()
        nothing = torch.zeros((num_rows, 0), dtype=torch.int64)
        logical_lens = positions.flatten(1).amax(-1).long() - 2
        seeds = torch.randint(2**62, (num_rows,), generator=generator)
        rows = TailRows(
            slots, positions, lens, torch.tensor(num_keep), stateful_lens, logical_lens, seeds,
            torch.arange(num_rows) * 3, nothing, nothing,
        )  # fmt: skip
        self.rows = TailRows(*(part.to(device) for part in rows))
        measures = (torch.rand((3, *shape), generator=generator) * 32).floor() / 32  # ties
        measures[2] = -measures[2]
        for row, tail_len in enumerate(tail_lens):
            measures[:, row, :, tail_len:] = 99.0  # may not leak into a tail
        self.history = torch.rand(shape, generator=generator).to(device)
        self.measures = [measure.to(device).contiguous() for measure in measures]

    def compacted(self, compact, recent_share, shares, *, fresh, num_recent=3, num_sinks=1):
        pools = [pool.clone() for pool in self.pools]
        measures = tuple(self.measures[: len(shares)])
        parts = ScoreTiers(measures, shares, self.history, recent_share, fresh)
        compact(*pools, self.rows, parts, num_recent, num_sinks)
        return [pool.view(INTEGERS[pool.element_size()]) for pool in pools]


@pytest.mark.parametrize(
    ("tail_lens", "num_keep", "sizes"),
    [
        ((40, 23, 2), (31, 11, 1), {}),
        ((33, 1), (3, 1), {"block_size": 1, "num_heads": 3, "dtype": torch.float32}),
        pytest.param(
            (2304, 5000, 2100), (2048, 2048, 1), {"num_heads": 8, "head_dim": 128},
            marks=pytest.mark.gpu,
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("recent_share", "shares", "fresh"),
    [
        (0.1, (0.4, 0.25, 0.1), False),
        (0.3, (0.2, 0.0, 0.8), True),
        (0.0, (0.0, 0.5), True),
        (0.15, (0.9,), False),
        (0.5, (), True),
    ],
)
def test_compaction_by_tiers_equals_its_twin(
    device, tail_lens, num_keep, sizes, recent_share, shares, fresh
):
    world = World(tail_lens, num_keep, device, **sizes)
    found = world.compacted(tiers.compact_tiers, recent_share, shares, fresh=fresh)
    expected = world.compacted(reference.compact_tiers, recent_share, shares, fresh=fresh)
    for pool, twin in zip(found, expected, strict=True):
        assert torch.equal(pool, twin)


def test_lots_are_spread_evenly_and_differ_by_seed_layer_and_head():
    positions = torch.arange(4096, dtype=torch.int32).expand(3, 2, -1)
    seeds, layers = torch.tensor([5, 6, 5]), torch.tensor([0, 0, 1])
    lots = reference.lots(seeds, layers, positions)
    assert float(lots.min()) >= 0
    assert float(lots.max()) < 1
    tenths = torch.histc(lots, bins=10, min=0, max=1) / lots.numel()
    assert (tenths - 0.1).abs().max() < 0.01
    flat = lots.flatten(0, 1)
    alike = (flat[:, None] == flat[None]).float().mean(-1)
    assert float((alike - torch.eye(6)).max()) < 0.01
