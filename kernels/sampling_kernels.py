"""Device code of `sampling.py`: random stream, settings of lines, penalties, weights of tokens.

Knows nothing of launches; what each act means stands at its twin in `reference/sampling.py`.
"""

import triton
import triton.language as tl

from zipage_lang.kernels.reference import sampling as reference

WEIGHT_ONE = tl.constexpr(reference.WEIGHT_ONE)
MIN_TEMPERATURE = tl.constexpr(reference.MIN_TEMPERATURE)
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
NO_LINES, SOME_LINES, ALL_LINES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 30)) * MIX_1
    bits = (bits ^ (bits >> 27)) * MIX_2
    return bits ^ (bits >> 31)


@triton.jit
def _uniform(seed, position):
    steps = (position + 1).to(tl.uint64) * GOLDEN
    bits = _mix(_mix(seed.to(tl.uint64) + GOLDEN) + steps)
    return (bits >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def random_uniform_kernel(seeds, positions, out, num_lines, BLOCK: tl.constexpr):
    lines = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = lines < num_lines
    seed = tl.load(seeds + lines, mask=mask, other=0)
    position = tl.load(positions + lines, mask=mask, other=0)
    tl.store(out + lines, _uniform(seed, position), mask=mask)


@triton.jit
def row_of(rows, line):
    """The row whose settings a line has: its own number where no rows are given."""
    if rows is None:
        return line
    else:
        return tl.load(rows + line)


@triton.jit
def setting_of(settings, row, neutral):
    """A row's setting; `neutral` for padding, and where no line has the setting."""
    if settings is None:
        return neutral
    else:
        return tl.load(settings + row, mask=row >= 0, other=neutral)


@triton.jit
def has_filter(top_k, top_p, row, vocab_size):
    is_cut = setting_of(top_k, row, vocab_size) < vocab_size
    return is_cut | (setting_of(top_p, row, 1.0) < 1.0)


@triton.jit
def uniform_of(uniform, seeds, num_generated, line, row):
    if uniform is None:
        return _uniform(setting_of(seeds, row, 0), setting_of(num_generated, row, 0))
    else:
        return tl.load(uniform + line)


@triton.jit
def penalize_kernel(
    logits,
    in_prompt,
    num_generated,
    repetition,
    presence,
    frequency,
    out,
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < vocab_size
    x = tl.load(logits + line * row_stride + columns, mask=mask, other=0.0)
    prompt = tl.load(in_prompt + line * vocab_size + columns, mask=mask, other=0)
    count = tl.load(num_generated + line * vocab_size + columns, mask=mask, other=0)
    by = tl.load(repetition + line).to(tl.float32)
    repeated = tl.where(x < 0, x * by, tl.div_rn(x, by + tl.zeros_like(x)))
    x = tl.where((prompt != 0) | (count > 0), repeated, x)
    x -= tl.load(presence + line).to(tl.float32) * (count > 0).to(tl.float32)
    x -= tl.load(frequency + line).to(tl.float32) * count.to(tl.float32)
    tl.store(out + line * vocab_size + columns, x, mask=mask)


@triton.jit
def scale_of(temperature):
    return tl.maximum(temperature.to(tl.float32), MIN_TEMPERATURE)


@triton.jit
def ceil_of(exact):
    whole = exact.to(tl.int64)
    return whole + (whole.to(tl.float64) < exact).to(tl.int64)


@triton.jit
def weights_of(x, best, scale):
    share = tl.exp(tl.div_rn(x - best, scale + tl.zeros_like(x)))
    return (share * WEIGHT_ONE).to(tl.int64)
