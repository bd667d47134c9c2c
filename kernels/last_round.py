"""When a decode launch leaves the card idle at its end, and what is done about it.

The card goes through (row, KV head) pairs in rounds, as many at a time as its multiprocessors
hold. One pair alone reads at most a fixed share of the card's bandwidth, so a last round of few
rows takes as long as a larger one. All figures are of an H200.
Knows nothing of launches or of what rows share.
"""

import numpy as np

from zipage_lang.kernels.flashinfer_module import Heads
from zipage_lang.kernels.shared_prefix import PrefixGroup

# A pair reads this share of what the whole card can: 51 of 4,280 GB/s, with 2,304 slots a row. With
# 33 rows a round, 34 rows take 107 us a layer and 44 take 113, where 33 take 84.
PAIR_SHARE = 1 / 84
# Rows of a last round that are read in halves: with more, halves save less than their merge costs.
MAX_HALVED_ROWS = 6
# A row is cut where half of it is longer than the merge takes, by far: 3 us, at the rate above.
MIN_HALVED_SLOTS = 768
# From as many pairs a multiprocessor on, rows read whole are faster than split and merged ones:
# 20 rows take 69 us against 75, 33 rows 88 against 94; 16 rows, one pair each, 73 against 58.
MIN_SHARE_WHOLE = 1.2
# What splitting and merging cost, as bytes that the card reads meanwhile: 6 us.
SPLIT_BYTES = 25 * 2**20
_ELEMENT_BYTES = 2


def halved_rows(
    kv_lens: np.ndarray, rows_per_round: int, block_size: int, max_rows: int
) -> list[PrefixGroup]:
    """Rows to be read in halves, as groups of one row whose first half of blocks is the group's.

    They are the shortest, which the launch begins last, as many as the last round would have.

    Args:
        kv_lens: int32 [num_rows], of the step's own rows, without padding.
        rows_per_round: rows whose pairs the card holds at once.
        max_rows: as many at most, or none.
    """
    num_last = len(kv_lens) % rows_per_round
    if not 0 < num_last <= min(MAX_HALVED_ROWS, max_rows) or len(kv_lens) < rows_per_round:
        return []
    longest = int(kv_lens.max())
    shortest = np.sort(np.argsort(kv_lens, kind="stable")[:num_last])
    # Unequal rows end at many times, and the card is not left with the last alone.
    if int(kv_lens[shortest].min()) < max(MIN_HALVED_SLOTS, longest // 2):
        return []
    halves = kv_lens[shortest] // (2 * block_size)  # blocks
    return [
        PrefixGroup(row, row + 1, half, 0)
        for row, half in zip(shortest.tolist(), halves.tolist(), strict=True)
    ]


def is_faster_whole(kv_lens: np.ndarray, heads: Heads, num_sms: int) -> bool:
    """Whether rows fewer than the card holds are read faster whole than split and merged.

    Args:
        kv_lens: int32 [num_rows], of the step's own rows, without padding.
    """
    if len(kv_lens) * heads.num_kv_heads < MIN_SHARE_WHOLE * num_sms:
        return False
    slot_bytes = 2 * heads.head_dim * _ELEMENT_BYTES  # of one head
    all_bytes = int(kv_lens.sum()) * heads.num_kv_heads * slot_bytes
    longest_bytes = int(kv_lens.max()) * slot_bytes
    return longest_bytes / PAIR_SHARE <= all_bytes + SPLIT_BYTES
