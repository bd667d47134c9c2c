"""The forecast against a slow loop in float64 over keys before their rotation."""

import math

import pytest
import torch

from zipage_lang.kernels.backend import Forecast
from zipage_lang.kernels.reference import forecast as reference
from zipage_lang.kernels.reference.forecast import forecast_scores
from zipage_lang.kernels.reference.fused_ops import rope

BLOCK_SIZE, NUM_LAYERS = 4, 3


class World:
    """Rows of different layers on shuffled slots; nothing that must not be read is a number."""

    def __init__(self, seed, lens, stateful_lens, *, num_heads=2, head_dim=6, farthest=100_000):
        self.generator = torch.Generator().manual_seed(seed)
        num_rows, max_tail = len(lens), max(lens) + 2
        self.lens, self.stateful_lens = lens, torch.tensor(stateful_lens)
        self.layers = torch.arange(num_rows) % NUM_LAYERS
        num_blocks = num_rows * max_tail // BLOCK_SIZE + 2
        order = torch.randperm(num_blocks * BLOCK_SIZE, generator=self.generator)
        self.slots = order[: num_rows * max_tail].view(num_rows, max_tail).clone()
        shape = (num_rows, num_heads, max_tail)
        self.positions = torch.randint(farthest, shape, generator=self.generator).int()
        self.logical_lens = farthest + torch.arange(num_rows)
        for row, length in enumerate(lens):
            self.slots[row, length:] = -1
            self.positions[row, :, length:] = 2**31 - 1
        self.keys, self.values = self.draw(2, *shape, head_dim)
        self.history = self.draw(*shape)
        self.forecast = Forecast(
            self.draw(NUM_LAYERS, num_heads, head_dim),
            self.draw(NUM_LAYERS, num_heads, head_dim),
            self.draw(NUM_LAYERS, num_heads),
            1e4 ** -(torch.arange(head_dim // 2) / (head_dim / 2)),
        )
        self.kv = torch.full((num_blocks, 2, BLOCK_SIZE, num_heads, head_dim), math.nan)
        self.scores = torch.full((num_blocks, BLOCK_SIZE, num_heads), math.nan)
        self.fill()

    def draw(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def fill(self):
        """Old slots have a history, new ones a rotated key and a value."""
        rotated = self.rotated_keys()
        for row, index in self.tail_slots():
            block, offset = divmod(int(self.slots[row, index]), BLOCK_SIZE)
            if index < self.stateful_lens[row]:
                self.scores[block, offset] = self.history[row, :, index]
            else:
                self.kv[block, 0, offset] = rotated[row, :, index]
                self.kv[block, 1, offset] = self.values[row, :, index]

    def rotated_keys(self):
        """By the project's own RoPE, each slot of each head as a token of one head."""
        angles = self.positions.flatten().float()[:, None] * self.forecast.frequencies
        cos, sin = angles.double().cos().float(), angles.double().sin().float()
        tokens = self.keys.reshape(-1, 1, self.keys.shape[-1])  # [num_tokens, 1, head_dim]
        return rope(tokens, tokens, cos, sin)[1].view_as(self.keys)

    def tail_slots(self):
        return [(row, index) for row, length in enumerate(self.lens) for index in range(length)]

    def run(self):
        facts = (self.stateful_lens, self.logical_lens, self.layers)
        return forecast_scores(
            self.kv, self.scores, self.slots, self.positions, *facts, self.forecast
        )

    def slow(self):
        """(score, base) with sums in Python; padding 0."""
        score, base = torch.zeros(2, *self.positions.shape, dtype=torch.float64)
        for row, index in self.tail_slots():
            layer = int(self.layers[row])
            for head in range(self.positions.shape[1]):
                here = (row, head, index)
                pairs = [
                    *zip(self.forecast.key[layer, head], self.keys[here], strict=True),
                    *zip(self.forecast.value[layer, head], self.values[here], strict=True),
                ]
                is_old = index < self.stateful_lens[row]
                new = math.fsum(float(weight) * float(part) for weight, part in pairs)
                base[here] = float(self.history[here]) if is_old else new
                num_since = int(self.logical_lens[row]) - 1 - int(self.positions[here])
                age_weight = float(self.forecast.age[layer, head])
                score[here] = base[here] + age_weight * math.log(1 + num_since)
        return score, base


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert one.is_contiguous()
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "sizes",
    [
        {"lens": (9, 5), "stateful_lens": (4, 0)},
        {"lens": (1,), "stateful_lens": (0,), "num_heads": 1, "head_dim": 2},
        {"lens": (7, 6, 11, 3), "stateful_lens": (7, 1, 8, 0), "num_heads": 3, "head_dim": 24},
        {"lens": (8,), "stateful_lens": (3,), "head_dim": 64, "farthest": 40},
    ],
)
def test_scores_equal_a_slow_loop_over_keys_before_their_rotation(seed, sizes):
    world = World(seed, **sizes)
    assert_close(world.run(), world.slow())


def test_a_remembered_base_comes_back_to_the_bit_and_nothing_else_is_read():
    world = World(5, (9, 5), (4, 0))  # old slots hold no key, new ones no history
    score, base = world.run()
    assert torch.equal(base[0, :, :4], world.history[0, :, :4])
    assert score.isfinite().all()
    assert base.isfinite().all()


def test_padding_scores_nothing_whatever_its_position_says():
    world = World(6, (9, 5), (9, 5))
    world.stateful_lens += 2  # padding too would have a history
    score, base = world.run()
    assert not score[1, :, 5:].any()
    assert not base[1, :, 5:].any()


def test_a_base_that_was_kept_gives_the_same_score_later():
    world = World(7, (9, 6), (0, 0))
    world.logical_lens += 5000
    score, base = world.run()
    world.history, world.stateful_lens = base, torch.tensor([9, 6])
    world.kv.fill_(math.nan)
    world.fill()
    assert all(torch.equal(one, two) for one, two in zip(world.run(), (score, base), strict=True))


def test_small_pieces_give_the_same_scores(monkeypatch):
    world = World(8, (9, 5, 7), (4, 0, 7))
    whole = world.run()
    monkeypatch.setattr(reference, "_PIECE_BYTES", 1500)  # three slots
    assert all(torch.equal(one, two) for one, two in zip(world.run(), whole, strict=True))


def test_a_token_just_drawn_has_no_age():
    world = World(9, (3,), (0,))
    world.positions[0, :, 0] = int(world.logical_lens[0]) - 1
    world.fill()
    score, base = world.run()
    assert torch.equal(score[..., 0], base[..., 0])
    assert (score[..., 1:3] != base[..., 1:3]).all()
