"""What the machine and the model decide: results of start-up that the scheduler must respect.

Knows nothing of how they were found.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Found once at start, never a setting."""

    num_blocks: int  # usable blocks of the pool (without the dummy block 0)
    num_host_blocks: int  # blocks of host memory for swapped requests
    num_query_slots: int
    window: int  # queries kept per slot
    max_model_len: int
    vocab_size: int
    eos_token_ids: Sequence[int]
    # Nothing that a request computes may depend on the others: strict mode, see docs/determinism.md
    deterministic: bool = False
