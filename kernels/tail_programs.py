"""What kernels with a whole tail in one program share: their launch, and the remembered mass.

Knows nothing of policies, or of which slots are kept.
"""

import triton
import triton.language as tl

from zipage_lang.kernels.select import row_config

_MAX_REGISTERS = 40  # three programs of 16 warps share an SM: each waits at a barrier per bit
_MOST_SLOTS = 4096  # that fit those registers, but for some 30 numbers at most

NO_POSITION = tl.constexpr(0x7FFF_FFFF)


def tight_row_config(max_tail: int) -> dict[str, int]:
    """As `row_config`, with few enough registers that several programs share an SM."""
    config = row_config(max_tail)
    return config if config["SLOTS"] > _MOST_SLOTS else {**config, "maxnreg": _MAX_REGISTERS}


@triton.jit
def remembered_mass(
    mass,
    score_blocks,
    slots,
    stored,
    program,
    tail_len,
    stateful_len,
    max_tail,
    decay,
    HEADS: tl.constexpr,
    REACH: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """max(mass, decay * what was stored before), which is stored; returned pooled over neighbours
    where there is nothing stored yet, since slot order is token order there.
    """
    index = tl.arange(0, SLOTS)
    base = program.to(tl.int64) * max_tail
    real = index < tail_len
    own = tl.load(mass + base + index, mask=real, other=0.0)
    at = slots + (program // HEADS).to(tl.int64) * max_tail + index
    place = tl.load(at, mask=real, other=0) * HEADS + program % HEADS
    history = tl.load(score_blocks + place, mask=real & (index < stateful_len), other=0.0)
    own = tl.maximum(own, decay * history)
    tl.store(stored + base + index, own, mask=real)
    if stateful_len == 0:
        for step in tl.static_range(-REACH, REACH + 1):
            near = index + step
            there = (near >= 0) & (near < tail_len)
            own = tl.maximum(own, tl.load(mass + base + near, mask=there, other=0.0))
    return own
