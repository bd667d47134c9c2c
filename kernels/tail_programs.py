"""What kernels with a whole tail in one program share: their launch, and what is no position.

Knows nothing of policies, or of which slots are kept.
"""

import triton.language as tl

from zipage_lang.kernels.select import row_config

_MAX_REGISTERS = 40  # three programs of 16 warps share an SM: each waits at a barrier per bit
_MOST_SLOTS = 4096  # that fit those registers, but for some 30 numbers at most

NO_POSITION = tl.constexpr(0x7FFF_FFFF)


def tight_row_config(max_tail: int) -> dict[str, int]:
    """As `row_config`, with few enough registers that several programs share an SM."""
    config = row_config(max_tail)
    return config if config["SLOTS"] > _MOST_SLOTS else {**config, "maxnreg": _MAX_REGISTERS}
