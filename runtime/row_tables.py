"""The runner's memory of rows between steps: each row's block table.

Knows nothing of tensors on the device or of what the blocks hold.
"""

import numpy as np

from zipage_lang.runtime.step_plan import BlockUpdate


class RowTables:
    """Block tables of all rows as one padded array, so that a step's batch is one fancy index."""

    def __init__(self, max_rows: int, max_blocks: int) -> None:
        self._tables = np.full((max_rows, max_blocks), -1, dtype=np.int32)  # padding -1
        self._num_blocks = np.zeros(max_rows, dtype=np.int32)

    def update(self, update: BlockUpdate) -> None:
        """Row's table from `first` on becomes the given blocks."""
        end = update.first + len(update.block_ids)
        self._tables[update.row, update.first : end] = update.block_ids
        self._tables[update.row, end : self._num_blocks[update.row]] = -1
        self._num_blocks[update.row] = end

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """int32 [num_rows, longest table among them], padding -1."""
        longest = int(self._num_blocks[rows].max(initial=1))
        return self._tables[rows, :longest]
