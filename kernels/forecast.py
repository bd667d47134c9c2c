"""Triton forecast of later attention: one launch, reads keys and values of new slots only.

Knows nothing of policies. What it means stands at its twin in `kernels/reference/forecast.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zipage_lang.kernels.backend import Forecast
from zipage_lang.kernels.dependent_launch import (
    launch_options,
    release_successor,
    wait_for_predecessor,
)

_TILE = 128  # slots of a program, one a thread
_PIECE = 16  # frequencies at a time: each slot's share of them is a sector in 16 bits

# A turn in three parts. The first two have 5 bits each, so that their products with up to 2^19
# turns are exact.
_TURN_HIGH = tl.constexpr(6.25)
_TURN_MIDDLE = tl.constexpr(17 / 512)
_TURN_LOW = tl.constexpr(-1.7817820413768004e-05)
_TURNS_PER_RADIAN = tl.constexpr(0.15915494309189535)

# Coefficients of r, r^3 .. r^11 and of r^2, r^4 .. r^12 whose largest error between -pi and pi is
# least: 1e-7 and 1e-8, with rounding 6e-7 and 4e-7. The libraries' functions also take angles of
# many turns, for which they need twice the registers.
_SINE = tl.constexpr(
    (0.99999958, -0.16666554, 0.0083324071, -1.9808722e-4, 2.6998018e-6, -2.0365379e-8)
)
_COSINE = tl.constexpr(
    (-0.49999988, 0.041666489, -1.3887807e-3, 2.4769948e-5, -2.7079597e-7, 1.7246943e-9)
)


def forecast_scores(
    kv_blocks: Tensor,
    score_blocks: Tensor,
    slots: Tensor,
    positions: Tensor,
    stateful_lens: Tensor,
    logical_lens: Tensor,
    layers: Tensor,
    forecast: Forecast,
) -> tuple[Tensor, Tensor]:
    """See the twin. Reads 16 bytes a slot and head and 2 * head_dim numbers more where it is new,
    writes 8.

    A program takes a tile of a row's slots in one head; neighbouring programs take its other heads,
    whose keys and values lie beside.
    """
    num_rows, max_tail = slots.shape
    _, _, block_size, num_kv_heads, head_dim = kv_blocks.shape
    facts = (stateful_lens, logical_lens, layers)
    _check(kv_blocks, score_blocks, slots, positions, facts, forecast)
    score = torch.empty_like(positions, dtype=torch.float32)
    base = torch.empty_like(score)
    num_tiles = -(-max_tail // _TILE)
    _forecast_kernel[(num_rows * num_tiles * num_kv_heads,)](
        kv_blocks,
        score_blocks,
        slots,
        positions,
        *facts,
        *forecast,
        score,
        base,
        max_tail,
        num_tiles,
        BLOCK_SIZE=block_size,
        HEADS=num_kv_heads,
        HALF=head_dim // 2,
        PIECE=_PIECE,
        TILE=_TILE,
        num_warps=4,
        enable_fp_fusion=False,  # an angle must be rounded before turns are taken from it
        **launch_options(slots.device),
    )
    return score, base


def _check(
    kv_blocks: Tensor,
    score_blocks: Tensor,
    slots: Tensor,
    positions: Tensor,
    facts: tuple[Tensor, ...],
    forecast: Forecast,
) -> None:
    num_kv_heads, head_dim = kv_blocks.shape[3:]
    shape = (slots.shape[0], num_kv_heads, slots.shape[1])
    for tensor in (kv_blocks, score_blocks, slots, positions, *facts, *forecast):
        assert tensor.is_contiguous(), f"{tuple(tensor.shape)} of strides {tensor.stride()}"
    for number in (slots, *facts):
        assert number.dtype == torch.int64, f"{tuple(number.shape)} in {number.dtype}"
    for number in (score_blocks, *forecast):
        assert number.dtype == torch.float32, f"{tuple(number.shape)} in {number.dtype}"
    assert positions.dtype == torch.int32, f"positions in {positions.dtype}"
    assert positions.shape == shape, f"positions of {tuple(positions.shape)}, not {shape}"
    heads = forecast.key.shape
    assert heads[1:] == (num_kv_heads, head_dim), f"{heads}, not {(num_kv_heads, head_dim)}"
    assert forecast.value.shape == heads, f"{forecast.value.shape}, {heads}"
    assert forecast.age.shape == heads[:2], f"{forecast.age.shape}, {heads}"
    assert 2 * len(forecast.frequencies) == head_dim, f"{len(forecast.frequencies)}, {head_dim}"


@triton.jit(do_not_specialize=["max_tail", "num_tiles"])
def _forecast_kernel(
    kv,
    score_blocks,
    slots,
    positions,
    stateful_lens,
    logical_lens,
    layers,
    key_weights,
    value_weights,
    age_weights,
    frequencies,
    score,
    base,
    max_tail,
    num_tiles,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    release_successor(PDL)
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS
    row = (tile // num_tiles).to(tl.int64)
    index = tile % num_tiles * TILE + tl.arange(0, TILE)
    inside = index < max_tail
    slot = tl.load(slots + row * max_tail + index, mask=inside, other=-1)
    real = slot >= 0
    slot = tl.where(real, slot, 0)
    place = (row * HEADS + head) * max_tail + index
    position = tl.load(positions + place, mask=real, other=0)
    stateful_len = tl.load(stateful_lens + row)
    is_old, is_new = real & (index < stateful_len), real & (index >= stateful_len)
    own = tl.load(score_blocks + slot * HEADS + head, mask=is_old, other=0.0)
    weights = tl.load(layers + row) * HEADS + head
    if tl.max(is_new.to(tl.int32), axis=0) > 0:
        line = slot // BLOCK_SIZE * (2 * BLOCK_SIZE) + slot % BLOCK_SIZE
        own += _new_base(
            kv, (line * HEADS + head) * (2 * HALF), BLOCK_SIZE * HEADS * 2 * HALF, is_new,
            key_weights + weights * (2 * HALF), value_weights + weights * (2 * HALF),
            frequencies, position.to(tl.float32), HALF, PIECE, TILE,
        )  # fmt: skip
    num_since = (tl.load(logical_lens + row) - 1 - position).to(tl.float32)
    aged = own + _of_age(num_since, tl.load(age_weights + weights))
    tl.store(score + place, tl.where(real, aged, 0.0), mask=inside)
    tl.store(base + place, own, mask=inside)


@triton.jit
def _new_base(
    kv,
    where,
    to_value,
    is_new,
    key_weights,
    value_weights,
    frequencies,
    position,
    HALF: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Bases of the new slots of a tile, 0 for the others. float32 [TILE].

    where: int64 [TILE], of each slot's key; its value lies `to_value` numbers behind.
    """
    found = tl.zeros((TILE, PIECE), dtype=tl.float32)
    for first in range(0, HALF, PIECE):
        dims = first + tl.arange(0, PIECE)
        inside = dims < HALF
        there = is_new[:, None] & inside[None, :]
        low = kv + where[:, None] + dims[None, :]
        key_low = tl.load(low, mask=there, other=0.0).to(tl.float32)
        key_high = tl.load(low + HALF, mask=there, other=0.0).to(tl.float32)
        value_low = tl.load(low + to_value, mask=there, other=0.0).to(tl.float32)
        value_high = tl.load(low + to_value + HALF, mask=there, other=0.0).to(tl.float32)
        weight_low = tl.load(value_weights + dims, mask=inside, other=0.0)[None, :]
        weight_high = tl.load(value_weights + HALF + dims, mask=inside, other=0.0)[None, :]
        found += value_low * weight_low + value_high * weight_high
        weight_low = tl.load(key_weights + dims, mask=inside, other=0.0)[None, :]
        weight_high = tl.load(key_weights + HALF + dims, mask=inside, other=0.0)[None, :]
        frequency = tl.load(frequencies + dims, mask=inside, other=0.0)
        cos, sin = _cos_sin(position[:, None] * frequency[None, :])
        found += cos * (weight_low * key_low + weight_high * key_high)
        found += sin * (weight_low * key_high - weight_high * key_low)
    return tl.sum(found, axis=1)


@triton.jit
def _cos_sin(angle):
    """Both to 1e-6, of angles up to 2^19 turns."""
    num_turns = tl.floor(angle * _TURNS_PER_RADIAN + 0.5)
    left = tl.fma(num_turns, -_TURN_HIGH, angle)
    left = tl.fma(num_turns, -_TURN_MIDDLE, left)
    left = tl.fma(num_turns, -_TURN_LOW, left)
    square = left * left
    return tl.fma(_polynomial(square, _COSINE), square, 1.0), _polynomial(square, _SINE) * left


@triton.jit
def _polynomial(x, COEFFICIENTS: tl.constexpr):
    value = tl.full(x.shape, COEFFICIENTS[5], tl.float32)
    for power in tl.static_range(4, -1, -1):
        value = tl.fma(value, x, COEFFICIENTS[power])
    return value


@triton.jit
def _of_age(num_since, weight):
    """What the tokens that came since change in the forecast."""
    return weight * tl.log(1.0 + num_since)
