"""Query statistics: of queries that are known, and of a model that writes to itself."""

import types

import pytest
import torch

from zipage_lang.kernels.backend import choose_backend
from zipage_lang.kernels.reference.fused_ops import rope, turn_back
from zipage_lang.runtime import query_stats
from zipage_lang.runtime.calibrations import MeasuredOnce
from zipage_lang.runtime.kv_cache import KVShape
from zipage_lang.runtime.models.rope import rotary_frequencies
from zipage_lang.runtime.query_stats import measure_query_stats

NUM_LAYERS, NUM_Q_HEADS, HEAD_DIM, VOCAB = 2, 4, 8, 11
SHAPE = KVShape(
    num_layers=NUM_LAYERS,
    num_q_heads=NUM_Q_HEADS,
    num_kv_heads=2,
    head_dim=HEAD_DIM,
    dtype=torch.float32,
)
ARCH = types.SimpleNamespace(head_dim=HEAD_DIM, rope_theta=10_000.0, rope_scaling=None)


class KnownQueries:
    """A model whose queries, before rotation, are one vector per layer and head, plus or minus."""

    def __init__(self, signs):
        generator = torch.Generator().manual_seed(3)
        shape = (NUM_LAYERS, NUM_Q_HEADS, HEAD_DIM)
        self.vectors = torch.randn(shape, generator=generator)
        self.signs = signs  # by step modulo their number
        self.frequencies = rotary_frequencies(ARCH, 40)[0]
        self.seen = []

    def forward(self, batch, cache):
        step = int(batch.positions[0])
        assert batch.positions.tolist() == [step] * query_stats.NUM_SEQUENCES
        self.seen.append(batch.token_ids.tolist())
        angles = (self.frequencies * step).expand(NUM_LAYERS, -1)
        q = self.vectors * self.signs[step % len(self.signs)]
        rotated, _ = rope(q, q, angles.cos(), angles.sin())
        cache.queries.copy_(rotated[:, None])
        return torch.zeros(query_stats.NUM_SEQUENCES, 4)

    def logits(self, hidden):
        return torch.zeros(len(hidden), VOCAB)


def measure(model):
    loaded = types.SimpleNamespace(arch=ARCH, max_model_len=40, model=model)
    return measure_query_stats(loaded, SHAPE, choose_backend("cpu"), start_token=7)


def pair_lengths(vectors):
    return torch.hypot(*vectors.chunk(2, dim=-1))


def test_queries_that_never_change_are_their_own_mean_wherever_they_stand():
    model = KnownQueries([1.0])
    stats = measure(model)
    assert torch.allclose(stats.center, model.vectors, atol=1e-4)
    assert torch.allclose(stats.length, pair_lengths(model.vectors), atol=1e-4)
    assert torch.equal(stats.frequencies, model.frequencies)


def test_queries_of_both_signs_have_no_mean_but_a_length():
    model = KnownQueries([1.0, -1.0])
    stats = measure(model)
    assert stats.center.abs().max() < 1e-4
    assert torch.allclose(stats.length, pair_lengths(model.vectors), atol=1e-4)


def test_the_text_starts_as_told_and_is_drawn_the_same_every_time():
    texts = []
    for _ in range(2):
        model = KnownQueries([1.0])
        measure(model)
        texts.append(model.seen)
    assert texts[0] == texts[1]
    assert texts[0][0] == [7] * query_stats.NUM_SEQUENCES
    assert len(texts[0]) == 40  # no longer than the model's context
    assert len({token for line in texts[0][1:] for token in line}) == VOCAB


def test_turning_back_undoes_the_rotation():
    q = torch.randn(5, 3, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    angles = torch.rand(5, HEAD_DIM // 2, generator=torch.Generator().manual_seed(2)) * 9
    rotated, _ = rope(q, q, angles.cos(), angles.sin())
    assert torch.allclose(turn_back(rotated, angles[:, None]), q, atol=1e-6)


def test_statistics_are_measured_once_and_only_when_asked_for():
    calls = []
    source = MeasuredOnce(lambda: calls.append(1) or "statistics")
    with pytest.raises(AssertionError, match="not prepared"):
        source.get()
    source.prepare()
    source.prepare()
    assert source.get() == "statistics"
    assert calls == [1]
