"""What kernels with a whole tail in one program share: their launch, and what is no position.

Knows nothing of policies, or of which slots are kept.
"""

import triton.language as tl

from zipage_lang.kernels.select import row_config

_MAX_REGISTERS = 80  # three programs of 8 warps share an SM: each waits at a barrier per bit
_SLOTS_PER_WARP = 512
_MOST_SLOTS = 4096  # that fit those registers, but for some 20 numbers at most

NO_POSITION = tl.constexpr(0x7FFF_FFFF)


def tight_row_config(max_tail: int) -> dict[str, int]:
    """As `row_config`, with few enough registers that several programs share an SM."""
    config = row_config(max_tail)
    slots = config["SLOTS"]
    if slots > _MOST_SLOTS:
        return config
    num_warps = max(slots // _SLOTS_PER_WARP, 1)
    return {"SLOTS": slots, "num_warps": num_warps, "maxnreg": _MAX_REGISTERS}
