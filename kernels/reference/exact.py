"""Sums, powers and logarithms whose bits depend on nothing but their arguments, in plain torch.

Every step is one IEEE operation per element (add, multiply, divide, round, integer arithmetic), so
neither the vector width, nor a loop's scalar rest, nor the number of threads can change a result,
as they do for torch's own exp, silu and sum. Sums are trees of a shape that is fixed by the length
alone. Knows nothing of attention, norms or batches.
"""

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634

# Least squares on Chebyshev nodes: 2^x over [-1/2, 1/2] (relative error 3e-9, below float32's
# rounding), and log2((1 + s) / (1 - s)) / s in powers of s^2, for arguments in [1/sqrt 2, sqrt 2].
_EXP2 = (
    1.0,
    0.6931472067106198,
    0.24022651213596563,
    0.05550327214209915,
    0.009618025602807178,
    0.0013400432165100828,
    0.0001546973202032385,
)
_LOG2 = (2.8853900797912, 0.9617988462494618, 0.5767145101916383, 0.43173301910478384)
_MIN_EXPONENT, _MAX_EXPONENT = -127, 126  # the first stands for 0: its bits are a float32's zero
_MANTISSA_BITS, _BIAS = 23, 127
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_SQRT_HALF_MANTISSA = 0x3504F3  # of sqrt(2): from there on the exponent is one higher


def exp2(x: Tensor) -> Tensor:
    """2^x, float32; exactly 0 below about 2^-126, for -inf too, and at most 2^126."""
    bounded = x.clamp(_MIN_EXPONENT, _MAX_EXPONENT)
    whole = bounded.round()
    share = bounded.sub_(whole)  # in [-1/2, 1/2]
    power = _polynomial(share, _EXP2)
    scale = whole.to(torch.int32).add_(_BIAS).bitwise_left_shift_(_MANTISSA_BITS)
    return power.mul_(scale.view(torch.float32))


def log2(x: Tensor) -> Tensor:
    """log2 of positive float32 that are neither denormal nor infinite."""
    bits = x.contiguous().view(torch.int32)
    mantissa = bits & _MANTISSA
    is_high = (mantissa > _SQRT_HALF_MANTISSA).int()
    exponent = (bits >> _MANTISSA_BITS) - _BIAS + is_high
    reduced = (mantissa | ((_BIAS - is_high) << _MANTISSA_BITS)).view(torch.float32)
    ratio = (reduced - 1) / (reduced + 1)
    return _polynomial(ratio * ratio, _LOG2).mul_(ratio).add_(exponent)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)) of any float dtype; float32 inside, one rounding at the end."""
    wide = x.float()
    return wide.div(exp2(wide.mul(-LOG2_E)).add_(1.0)).to(x.dtype)


def sum_last(x: Tensor) -> Tensor:
    """Sum over the last axis, kept as one of length 1: the halves are added until one is left."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        if x.shape[-1] % 2:
            folded[..., :1] += x[..., -1:]
        x = folded
    return x


def sum_parts(parts: Tensor, axis: int) -> Tensor:
    """Sum over `axis`, which goes: neighbours are added, pairs of pairs, and so on.

    Zeros behind the last part change no bit, so parts of different counts may be padded together.
    """
    parts = parts.movedim(axis, 0)
    while len(parts) > 1:
        pairs = parts[: len(parts) // 2 * 2].unflatten(0, (-1, 2))
        sums = pairs[:, 0] + pairs[:, 1]
        parts = torch.cat([sums, parts[-1:]]) if len(parts) % 2 else sums
    return parts[0]


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    value = x.mul(coefficients[-1]).add_(coefficients[-2])
    for coefficient in coefficients[-3::-1]:
        value.mul_(x).add_(coefficient)
    return value
