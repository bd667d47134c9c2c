"""Attention maxima and their samples, against attention computed whole in float64."""

import pytest
import torch

from zipage_lang.kernels.reference.fused_ops import turn_back
from zipage_lang.runtime import future_attention
from zipage_lang.runtime.future_attention import block_maxima, collect_samples


def dense_shares(keys, queries, first_position, scale):
    """float64 [num_sequences, num_kv_heads, group, block_len, num_seen]."""
    num_seen, num_kv_heads = keys.shape[1:3]
    grouped = queries.double().unflatten(2, (num_kv_heads, -1))
    logits = torch.einsum("sqhgd,skhd->shgqk", grouped, keys.double()) * scale
    places = first_position + torch.arange(queries.shape[1])
    return logits.masked_fill(places[:, None] < torch.arange(num_seen), -torch.inf).softmax(-1)


def test_block_maxima_are_those_of_whole_attention(monkeypatch):
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(3, 12, 2, 8, generator=generator)
    queries = torch.randn(3, 4, 6, 8, generator=generator) * 2
    lens = torch.tensor([12, 10, 8])
    shares = dense_shares(keys, queries, 8, 0.4)
    expected = torch.zeros(3, 2, 12, dtype=torch.float64)
    for sequence, length in enumerate(lens.tolist()):
        for query in range(8, length):
            for key in range(query - 1):  # two tokens ahead and more
                seen = shares[sequence, :, :, query - 8, key].amax(1)
                expected[sequence, :, key] = torch.maximum(expected[sequence, :, key], seen)
    found = block_maxima(keys, queries, 8, lens, 0.4)
    assert torch.allclose(found.double(), expected, atol=1e-6)
    assert found[2].max() == 0  # its text had ended
    monkeypatch.setattr(future_attention, "_SCRATCH_BYTES", 1)
    assert torch.allclose(block_maxima(keys, queries, 8, lens, 0.4), found, atol=1e-6)


@pytest.fixture
def samples_and_whole(world):
    """Samples of texts of which some end, and the same texts with all their queries kept."""
    settings = {"num_sequences": 8, "max_len": 32, "stops": (5,), "seed": 2}
    writer = world.writer(window=4, **settings)
    generator = torch.Generator().manual_seed(1)
    samples = collect_samples(writer, world.frequencies, 5, generator)
    whole = world.writer(window=32, **settings)
    with torch.inference_mode():
        for _ in range(32):
            whole.write()
    assert whole.lens.unique().numel() > 1
    return samples, whole


def test_samples_say_what_was_there_and_what_came_later(world, samples_and_whole):
    samples, whole = samples_and_whole
    boundaries = set()
    for layer in range(world.shape.num_layers):
        shares = dense_shares(whole.keys(layer), whole.ring(layer), 0, 8**-0.5)
        shares = shares.amax(2)  # [num_sequences, num_kv_heads, queries, keys]
        angles = torch.arange(32)[:, None, None] * world.frequencies
        keys = turn_back(whole.keys(layer), angles)  # [num_sequences, 32, num_kv_heads, head_dim]
        for index, sequence in enumerate(samples.sequence.tolist()):
            distance = (keys[sequence] - samples.key[layer, index]).abs().amax((1, 2))
            slot = int(distance.argmin())
            assert distance[slot] < 1e-4
            assert torch.allclose(
                whole.values(layer)[sequence, slot], samples.value[layer, index], atol=1e-4
            )
            boundary = slot + round(float(samples.age[index].exp()))
            length = int(whole.lens[sequence])
            assert boundary % 4 == 0
            assert boundary + 4 <= length
            later = shares[sequence, :, max(boundary, slot + 2) : length, slot].amax(1)
            target = (later + 1e-3).log().float()
            assert torch.allclose(samples.target[layer, index], target, atol=1e-3)
            boundaries.add(boundary)
    assert len(boundaries) > 4


def test_equal_texts_give_equal_samples(world):
    drawn = [
        collect_samples(world.writer(), world.frequencies, 3, torch.Generator().manual_seed(2))
        for _ in range(2)
    ]
    for name in ("key", "value", "target", "age", "sequence"):
        assert torch.equal(*(getattr(one, name) for one in drawn)), name


def test_half_of_the_places_are_among_the_newest():
    generator = torch.Generator().manual_seed(4)
    boundaries, slots = future_attention._draw_places(6, 32, 64, 20, generator)
    assert slots.shape == (6, 31 * 20)
    assert bool((slots >= 0).all() and (slots < boundaries).all())
    late = boundaries >= 1024
    is_newest = (boundaries - slots <= future_attention.NUM_NEWEST)[:, late]
    assert 0.5 <= is_newest.float().mean() < 0.65
    assert (slots[:, late] < 256).float().mean() > 0.05
