"""The Triton forecast against its twin."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton kernels are tested where triton is installed")

from zipage_lang.kernels import forecast
from zipage_lang.kernels.backend import Forecast
from zipage_lang.kernels.reference import forecast as reference

NUM_LAYERS = 2


class World:
    """Tails on shuffled slots, positions of every head its own; what is old has no key or value."""

    def __init__(
        self, lens, stateful_lens, device, dtype, *,
        block_size=16, num_heads=2, head_dim=64, farthest=100_000,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(max(lens) + head_dim)
        num_rows, max_tail = len(lens), max(lens) + 3
        num_blocks = num_rows * max_tail // block_size + 2
        order = torch.randperm(num_blocks * block_size, generator=generator)
        slots = order[: num_rows * max_tail].view(num_rows, max_tail)
        index = torch.arange(max_tail)
        slots = slots.where(index < torch.tensor(lens)[:, None], -1)
        stateful = torch.tensor(stateful_lens)
        kv = torch.randn((num_blocks, 2, block_size, num_heads, head_dim), generator=generator)
        old = slots[(index < stateful[:, None]) & (slots >= 0)]
        kv[old // block_size, :, old % block_size] = math.nan
        scores = torch.full((num_blocks, block_size, num_heads), math.nan)
        scores[old // block_size, old % block_size] = torch.randn(
            (len(old), num_heads), generator=generator
        )
        at = torch.randint(farthest, (num_rows, num_heads, max_tail), generator=generator)
        at = at.where((slots >= 0)[:, None], 2**31 - 1).int()
        logical_lens = farthest + torch.arange(num_rows)
        layers = torch.arange(num_rows) % NUM_LAYERS
        vectors = (2, NUM_LAYERS, num_heads, head_dim)
        weights = (
            *torch.randn(vectors, generator=generator),
            torch.randn(vectors[1:3], generator=generator),
            1e4 ** -(torch.arange(head_dim // 2) / (head_dim / 2)),
        )
        self.kv, self.scores, self.slots = kv.to(device, dtype), scores.to(device), slots.to(device)
        rest = (at, stateful, logical_lens, layers)
        self.rest = tuple(part.to(device) for part in rest)
        self.forecast = Forecast(*(part.contiguous().to(device) for part in weights))

    def run(self, implementation):
        tail = (self.kv, self.scores, self.slots, *self.rest)
        return implementation.forecast_scores(*tail, self.forecast)


def assert_equals_twin(world):
    found, expected = world.run(forecast), world.run(reference)
    scale = math.sqrt(2 * world.kv.shape[-1])  # of a sum of products of normal numbers
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert one.is_contiguous()
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5 * scale)
    is_padding = (world.slots < 0)[:, None].expand_as(found[0])
    assert not found[0][is_padding].any()
    assert not found[1][is_padding].any()


@pytest.mark.parametrize(
    "sizes",
    [
        {"lens": (150, 20), "stateful_lens": (130, 0), "head_dim": 24},
        {"lens": (37, 128, 1), "stateful_lens": (20, 0, 1), "num_heads": 3, "head_dim": 96},
        {"lens": (5,), "stateful_lens": (2,), "block_size": 1, "num_heads": 1, "head_dim": 2},
        {"lens": (60, 9), "stateful_lens": (13, 9), "block_size": 64, "head_dim": 128},
        {"lens": (40,), "stateful_lens": (0,), "head_dim": 14, "farthest": 1_000_000},
        pytest.param(
            {"lens": (2304, 2290, 300), "stateful_lens": (2048, 2048, 0), "num_heads": 8,
             "head_dim": 128},
            marks=pytest.mark.gpu,
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_forecast_equals_its_twin(device, sizes, dtype):
    assert_equals_twin(World(device=device, dtype=dtype, **sizes))


def test_a_remembered_base_comes_back_to_the_bit(device):
    world = World((150, 20), (130, 20), device, torch.float32)
    found, expected = world.run(forecast), world.run(reference)
    assert torch.equal(found[1][0, :, :130], expected[1][0, :, :130])
    assert torch.equal(found[1][1], expected[1][1])


def test_angles_of_many_turns_are_as_good_as_the_librarys(device):
    """A key of ones along one pair, weighed by ones: cos + sin + cos - sin of the angle."""
    world = World((300,), (0,), device, torch.float32, num_heads=1, head_dim=2, farthest=3_000_000)
    for part in (world.kv, world.forecast.key):
        part.fill_(1.0)
    world.forecast.value.zero_()
    found = world.run(forecast)[1][0, 0, :300].double()
    expected = 2 * world.rest[0][0, 0, :300].float().double().cos()
    torch.testing.assert_close(found, expected, rtol=0, atol=4e-6)


@pytest.mark.gpu
def test_the_forecast_reads_slots_past_two_to_the_31_numbers(device):
    world = World((300, 77), (100, 0), device, torch.bfloat16, num_heads=8, head_dim=128)
    near = world.run(forecast)
    num_far, block_size = 2**31 // world.kv[0].numel() + 1, world.kv.shape[2]
    zeros = [pool.new_zeros(num_far, *pool.shape[1:]) for pool in (world.kv, world.scores)]
    world.kv, world.scores = torch.cat([zeros[0], world.kv]), torch.cat([zeros[1], world.scores])
    world.slots = torch.where(world.slots < 0, -1, world.slots + num_far * block_size)
    found = world.run(forecast)
    assert all(torch.equal(one, two) for one, two in zip(found, near, strict=True))


@pytest.mark.gpu
def test_the_forecast_never_waits_for_the_device(device):
    world = World((300, 77), (100, 0), device, torch.bfloat16)
    try:
        torch.cuda.set_sync_debug_mode("error")
        world.run(forecast)
    finally:
        torch.cuda.set_sync_debug_mode("default")
