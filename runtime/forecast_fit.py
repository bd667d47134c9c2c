"""Fits a linear forecast of later attention to samples: quantile regression, per layer and KV head.

Knows nothing of models or of where the samples come from.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from zipage_lang.kernels.backend import Forecast
from zipage_lang.runtime.future_attention import Samples

QUANTILE = 0.95  # of later attention: to lose what turns out to matter costs most
MIN_SAMPLES = 256
_NUM_STEPS = 500
_BATCH_LEN = 512
_RATE = 1e-2
_WEIGHT_DECAY = 0.05
_MIN_DEVIATION = 1e-3
_HELD_OUT_SHARE = 8  # one in so many texts
_GROUP_BYTES = 128 * 2**20
_SEED = 41


class Fit(NamedTuple):
    """A forecast and how well it orders texts that it was not fitted to."""

    forecast: Forecast
    # float32 [num_layers, num_kv_heads], rank correlation of forecast and later attention
    rank_correlation: Tensor


@torch.inference_mode()
def fit_forecast(samples: Samples, frequencies: Tensor) -> Fit:
    """The weights that forecast the QUANTILE of `Samples.target` best.

    Features and targets are standardised, the pinball loss (Koenker and Bassett 1978, "Regression
    Quantiles") is minimised by AdamW, and the standardisation is folded back into the weights.
    There is no constant: it would change no order. Equal samples give equal weights.

    Args:
        samples: at least MIN_SAMPLES of at least two texts.
        frequencies: float32 [head_dim / 2]; they go into the forecast, and their device computes.
    """
    assert len(samples.age) >= MIN_SAMPLES, f"{len(samples.age)} samples, {MIN_SAMPLES} are needed"
    is_held_out = _held_out(samples.sequence)  # [num_samples]
    num_layers, num_samples, num_kv_heads, head_dim = samples.key.shape
    layer_bytes = 4 * num_samples * num_kv_heads * (2 * head_dim + 2)
    step = max(1, _GROUP_BYTES // layer_bytes)
    weights, ranks = [], []
    for first in range(0, num_layers, step):
        x, y = _features(samples, slice(first, first + step), frequencies.device)
        fitted = _fit_heads(x[:, ~is_held_out], y[:, ~is_held_out])
        weights.append(fitted)
        ranks.append(_rank_correlation(_times(x[:, is_held_out], fitted), y[:, is_held_out]))
    joined = torch.cat(weights).view(num_layers, num_kv_heads, -1)  # [.., 2 * head_dim + 1]
    key, value, age = joined.split([head_dim, head_dim, 1], dim=-1)
    forecast = Forecast(key.contiguous(), value.contiguous(), age[..., 0].contiguous(), frequencies)
    return Fit(forecast, torch.cat(ranks).view(num_layers, num_kv_heads))


def _held_out(sequence: Tensor) -> Tensor:
    """bool [num_samples]: those of the last texts, one in _HELD_OUT_SHARE and at least one."""
    texts = sequence.unique()
    assert len(texts) >= 2, "samples of one text alone leave none to hold out"
    num_held_out = max(1, len(texts) // _HELD_OUT_SHARE)
    return sequence >= texts[-num_held_out]


def _features(samples: Samples, layers: slice, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of all heads of some layers: [heads, num_samples, num_features] and [heads, num_samples]."""
    key, value = samples.key[layers].to(device).float(), samples.value[layers].to(device).float()
    age = samples.age.to(device)[:, None, None].expand(*key.shape[:-1], 1)
    x = torch.cat([key, value, age], dim=-1).transpose(1, 2)
    y = samples.target[layers].to(device).transpose(1, 2)
    return x.flatten(0, 1).contiguous(), y.flatten(0, 1).contiguous()


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """x: [heads, num_samples, num_features]; weight: [heads, num_features]."""
    return torch.bmm(x, weight[..., None])[..., 0]  # [heads, num_samples]


def _fit_heads(x: Tensor, y: Tensor) -> Tensor:
    """Weights [heads, num_features] of features that are not standardised."""
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(_SEED))
    x, y = x[:, order.to(x.device)], y[:, order.to(x.device)]
    mean = x.mean(1, keepdim=True)
    deviation = x.std(1, keepdim=True).clamp(min=_MIN_DEVIATION)
    x = (x - mean) / deviation
    spread = y.std(1, keepdim=True).clamp(min=_MIN_DEVIATION)  # [heads, 1]
    y = y / spread
    weight = torch.zeros_like(x[:, 0])  # [heads, num_features]
    constant = y.mean(1)  # [heads]
    optimizer = torch.optim.AdamW([weight, constant], lr=_RATE, weight_decay=_WEIGHT_DECAY)
    num_batches = max(1, x.shape[1] // _BATCH_LEN)
    for step in range(_NUM_STEPS):
        optimizer.param_groups[0]["lr"] = _RATE * min(1.0, 2 * (1 - step / _NUM_STEPS) + 0.02)
        first = step % num_batches * _BATCH_LEN
        some, aims = x[:, first : first + _BATCH_LEN], y[:, first : first + _BATCH_LEN]
        is_below = aims > _times(some, weight) + constant[:, None]
        # The pinball loss falls by QUANTILE for what is forecast too low, else rises by the rest.
        slope = torch.where(is_below, -QUANTILE, 1 - QUANTILE) / aims.shape[1]  # [heads, batch_len]
        weight.grad = torch.bmm(slope[:, None], some)[:, 0]
        constant.grad = slope.sum(1)
        optimizer.step()
    return weight * spread / deviation[:, 0]


def _rank_correlation(forecast: Tensor, target: Tensor) -> Tensor:
    """Spearman's, per line; ties are ranked as they stand. [heads, num_samples] to [heads]."""
    ranks = [values.argsort(1).argsort(1).float() for values in (forecast, target)]
    first, second = (rank - rank.mean(1, keepdim=True) for rank in ranks)
    both = (first.square().sum(1) * second.square().sum(1)).sqrt()
    return (first * second).sum(1) / both.clamp(min=1e-9)
