"""Whether decodes too few to fill the card are read whole all the same, or split and merged.

Where FlashInfer attends to them: our own kernel cuts them as it needs (`kernels/decode_items.py`).
The card goes through (row, KV head) pairs. One pair alone reads at most a fixed share of the card's
bandwidth, so few rows, or one much longer than the others, are read faster in parts. Figures are of
an H200, attention and the product behind it, 2,304 slots a row (`benchmarks/card/decode_ways.py`).
Knows nothing of launches or of blocks.
"""

import numpy as np

from zipage_lang.kernels.flashinfer_module import ELEMENT_BYTES, Heads

# A pair reads this share of what the whole card can: 51 of 4,280 GB/s.
PAIR_SHARE = 1 / 84
# From as many pairs a multiprocessor on, equal rows are faster whole: 20 rows take 69 us against
# 75, 33 rows 88 against 94; 16 rows, one pair each, 73 against 58.
MIN_PAIRS_PER_SM = 1.2
# What splitting and merging cost, as bytes that the card reads meanwhile: 6 us.
SPLIT_BYTES = 25 * 2**20


def may_be_faster_whole(num_rows: int, heads: Heads, num_sms: int) -> bool:
    """Whether so many equal rows would be."""
    return num_rows * heads.num_kv_heads >= MIN_PAIRS_PER_SM * num_sms


def is_faster_whole(kv_lens: np.ndarray, heads: Heads, num_sms: int) -> bool:
    """Whether these rows are.

    Args:
        kv_lens: int32 [num_rows], of the step's own rows, without padding.
    """
    if not may_be_faster_whole(len(kv_lens), heads, num_sms):
        return False
    slot_bytes = 2 * heads.head_dim * ELEMENT_BYTES  # of one head
    all_bytes = int(kv_lens.sum()) * heads.num_kv_heads * slot_bytes
    longest_bytes = int(kv_lens.max()) * slot_bytes
    return longest_bytes / PAIR_SHARE <= all_bytes + SPLIT_BYTES
