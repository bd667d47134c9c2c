"""The fit: of rules that are known, and of what a random model pays attention to."""

import logging

import pytest
import torch

from zipage_lang.runtime import forecast_fit
from zipage_lang.runtime.forecast_fit import fit_forecast
from zipage_lang.runtime.forecast_making import choose_text_size, make_forecast
from zipage_lang.runtime.future_attention import Samples, collect_samples

NUM_SAMPLES, HEAD_DIM = 4000, 6
FREQUENCIES = torch.ones(HEAD_DIM // 2)


def planted(make_target):
    """Samples of 2 layers and 2 heads; make_target(key, value, age, noise) -> target."""
    generator = torch.Generator().manual_seed(9)
    shape = (2, NUM_SAMPLES, 2, HEAD_DIM)
    key = torch.randn(shape, generator=generator) * torch.tensor([1, 9, 1, 0.2, 1, 1]) + 3
    value = torch.randn(shape, generator=generator)
    age = torch.rand(NUM_SAMPLES, generator=generator) * 7
    noise = torch.randn(shape[:3], generator=generator)
    sequence = torch.arange(NUM_SAMPLES) // 250
    return Samples(key, value, make_target(key, value, age[:, None], noise), age, sequence)


def test_a_linear_rule_is_found_in_the_features_own_units():
    def rule(key, value, age, noise):
        return 0.3 * key[..., 1] - 2.0 * key[..., 3] + 0.5 * value[..., 2] - 0.4 * age + 0.2 * noise

    fit = fit_forecast(planted(rule), FREQUENCIES)
    expected_key = torch.tensor([0, 0.3, 0, -2.0, 0, 0]).expand(2, 2, -1)
    expected_value = torch.tensor([0, 0, 0.5, 0, 0, 0]).expand(2, 2, -1)
    assert torch.allclose(fit.forecast.key, expected_key, atol=0.12)
    assert torch.allclose(fit.forecast.value, expected_value, atol=0.06)
    assert torch.allclose(fit.forecast.age, torch.full((2, 2), -0.4), atol=0.03)
    assert fit.rank_correlation.min() > 0.97


def test_heads_are_told_apart():
    def rule(key, value, age, noise):
        target = key[..., 0].clone()
        target[1, :, 1] = -value[1, :, 1, 5]
        return target + 0.1 * noise

    weights = fit_forecast(planted(rule), FREQUENCIES).forecast
    assert weights.key[0, 0, 0] > 0.9
    assert weights.key[1, 1, 0].abs() < 0.1
    assert weights.value[1, 1, 5] < -0.9


def test_what_may_matter_much_ranks_above_what_never_does():
    """The mean is the same for all; a high quantile is not."""

    def rule(key, value, age, noise):
        return noise * (0.1 + value[..., 0].abs().clamp(max=3) * (value[..., 0] > 0))

    weights = fit_forecast(planted(rule), FREQUENCIES).forecast
    assert (weights.value[..., 0] > 0.25).all()


def test_the_fit_is_the_same_every_time_and_in_pieces(monkeypatch):
    samples = planted(lambda key, value, age, noise: key[..., 0] + noise)
    first, again = fit_forecast(samples, FREQUENCIES), fit_forecast(samples, FREQUENCIES)
    assert all(torch.equal(*pair) for pair in zip(first.forecast, again.forecast, strict=True))
    monkeypatch.setattr(forecast_fit, "_GROUP_BYTES", 1)
    pieces = fit_forecast(samples, FREQUENCIES)
    for whole, piece in zip(first.forecast, pieces.forecast, strict=True):
        assert torch.allclose(whole, piece, atol=1e-5)


def test_chance_has_no_rank_correlation():
    fit = fit_forecast(planted(lambda key, value, age, noise: noise), FREQUENCIES)
    assert fit.rank_correlation.abs().max() < 0.15


def test_what_a_random_model_attends_to_is_forecast_better_than_by_chance(world):
    writer = world.writer(num_sequences=24, max_len=128, window=16)
    samples = collect_samples(writer, world.frequencies, 24, torch.Generator().manual_seed(1))
    fit = fit_forecast(samples, world.frequencies)
    assert fit.rank_correlation.min() > 0.25


def test_a_forecast_is_made_whole_and_twice_the_same(world, caplog):
    caplog.set_level(logging.INFO, "zipage.engine")
    size = choose_text_size(world.shape, 256, world.backend.device, num_texts=12, max_len=64)
    made = [make_forecast(world.loaded, world.shape, world.backend, size=size) for _ in range(2)]
    assert "takes a while" in caplog.text
    assert "rank correlation" in made[0].about
    first, again = (one.forecast for one in made)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert first.key.shape == first.value.shape == (2, 2, 8)
    assert first.age.shape == (2, 2)
    assert torch.equal(first.frequencies, world.frequencies)
    assert all(bool(weights.isfinite().all()) for weights in first)


def test_texts_that_end_at_once_leave_a_forecast_by_age(world_of, caplog):
    world = world_of(eos_token_id=list(range(23)))
    forecast, about = make_forecast(world.loaded, world.shape, world.backend)
    assert "too short" in caplog.text
    assert "by age alone" in about
    assert (forecast.age < 0).all()
    assert forecast.key.abs().max() == forecast.value.abs().max() == 0


@pytest.mark.parametrize("max_model_len", [2, 9, 64, 200, 4096])
def test_texts_keep_within_the_context_and_end_with_a_block(world, max_model_len):
    size = choose_text_size(world.shape, max_model_len, world.backend.device)
    assert 1 <= size.max_len <= max_model_len
    assert size.max_len % size.block_len == 0
    assert size.max_len > max_model_len / 2 or size.max_len == 768


def test_a_large_model_writes_in_rounds_that_fit(world):
    shape = world.shape
    small = choose_text_size(shape, 4096, torch.device("cuda"))
    assert (small.num_rounds, small.num_sequences, small.max_len) == (1, 64, 1024)
    big = type(shape)(
        num_layers=36, num_q_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16
    )
    large = choose_text_size(big, 32768, torch.device("cuda"))
    assert large.num_rounds == 3
    assert 16 <= large.num_rounds * large.num_sequences < 64
    assert large.num_sequences * big.block_bytes(1) * large.max_len <= 2**30
