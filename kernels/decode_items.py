"""Divides the slots of decodes into items of work for a card: whole pairs, then parts of some.

A pair is one row and one KV head. The card takes items in order, `num_ctas` at a time, so pairs
that don't fill its last round are cut into parts, and so is a pair much longer than the others.
Knows nothing of kernels, devices or blocks' numbers.
"""

from typing import NamedTuple

import numpy as np

TILE_BLOCKS = 4  # blocks of 16 slots that the kernel reads at a time; parts begin at whole tiles
ITEM_NUMBERS = 8
LONG_PAIR = 2  # times the mean: such a pair is always cut
# What a part costs beside its tiles, in tiles: its first loads' latency and the meeting of sums.
PART_TILES = 1.5
MIN_PART_TILES = 2
MAX_PART_ROUNDS = 4  # of parts that share the work of a last round
WHOLE = -1


class DecodeItems(NamedTuple):
    """The items of one launch."""

    numbers: np.ndarray  # int32 [num_items, ITEM_NUMBERS], as the kernel's AttentionItem
    num_parts: int  # places for the sums of parts


def divide(
    kv_lens: np.ndarray, num_kv_heads: int, num_ctas: int, num_padding: int, block_size: int
) -> DecodeItems:
    """Items for these rows, and one of a single slot for each head of the padding rows behind.

    How rows are cut depends on `kv_lens` alone, not on the padding, so padding changes no result.

    Args:
        kv_lens: int32 [num_rows], each at least 1; padding rows not among them.
        num_ctas: how many items the card works on at once.
        num_padding: rows of one slot that follow.
        block_size: slots of a block; the rows' blocks lie one row after the other.
    """
    num_blocks = -(-kv_lens // block_size)  # [num_rows]
    tiles = -(-num_blocks // TILE_BLOCKS)  # [num_rows]
    num_rows = len(kv_lens)
    counts = part_counts(np.tile(tiles, num_kv_heads), num_ctas)  # [num_pairs], head by head
    pair = np.repeat(np.arange(len(counts)), counts)  # [num_items]
    firsts = np.cumsum(counts) - counts  # [num_pairs]
    within = np.arange(len(pair)) - firsts[pair]  # which part of its pair
    row, head = pair % max(num_rows, 1), pair // max(num_rows, 1)
    first_tile = tiles[row] * within // counts[pair]
    end_tile = tiles[row] * (within + 1) // counts[pair]
    first_block = first_tile * TILE_BLOCKS
    end_block = np.minimum(end_tile * TILE_BLOCKS, num_blocks[row])
    starts = np.cumsum(num_blocks) - num_blocks  # [num_rows]
    last_slots = np.where(
        end_block == num_blocks[row], kv_lens[row] - (num_blocks[row] - 1) * block_size, block_size
    )
    is_cut = counts > 1  # [num_pairs]
    first_parts = np.cumsum(counts * is_cut) - counts * is_cut  # [num_pairs]
    cut = is_cut[pair]
    numbers = np.empty((len(pair) + num_padding * num_kv_heads, ITEM_NUMBERS), dtype=np.int32)
    own = numbers[: len(pair)]
    own[:, 0], own[:, 1] = row, head
    own[:, 2], own[:, 3] = starts[row] + first_block, end_block - first_block
    own[:, 4] = last_slots
    own[:, 5] = np.where(cut, first_parts[pair] + within, WHOLE)
    own[:, 6], own[:, 7] = np.where(cut, first_parts[pair], 0), counts[pair]
    padding = numbers[len(pair) :].reshape(num_padding, num_kv_heads, ITEM_NUMBERS)
    padding[..., 0] = num_rows + np.arange(num_padding)[:, None]
    padding[..., 1] = np.arange(num_kv_heads)
    padding[..., 2] = int(num_blocks.sum()) + np.arange(num_padding)[:, None]
    padding[..., 3:] = (1, 1, WHOLE, 0, 1)
    return DecodeItems(numbers, int((counts * is_cut).sum()))


def max_parts(num_pairs: int, num_ctas: int) -> int:
    """No more parts than this need a place at once."""
    return num_pairs + (MAX_PART_ROUNDS + 3) * num_ctas


def part_counts(tiles: np.ndarray, num_ctas: int) -> np.ndarray:
    """Into how many parts each pair is cut: int64 [num_pairs].

    Args:
        tiles: [num_pairs], at least 1 each, in the order in which pairs are begun.
    """
    if len(tiles) == 0:
        return np.zeros(0, dtype=np.int64)
    share = -(-int(tiles.sum()) // num_ctas)  # parts finer than this leave no CTA less to do
    longest = max(int(LONG_PAIR * float(tiles.mean())), MIN_PART_TILES, share)
    counts = -(-tiles // longest)  # [num_pairs]
    num_rounds, left = divmod(int(counts.sum()), num_ctas)
    if left == 0:
        return counts
    # The pairs whose items begin in the last round, which they don't fill.
    begins = np.cumsum(counts) - counts  # [num_pairs]
    is_last = begins >= num_rounds * num_ctas
    last = tiles[is_last]
    if len(last):
        sizes = np.unique(-(-int(last.max()) // np.arange(1, 1 + num_ctas)))  # tiles of a part
        sizes = sizes[sizes >= min(MIN_PART_TILES, int(last.max()))]
        items = (-(-last[:, None] // sizes)).sum(0)  # [num_sizes]
        rounds = -(-items // num_ctas)  # [num_sizes]
        costs = np.where(rounds <= MAX_PART_ROUNDS, rounds * (sizes + PART_TILES), np.inf)
        size = int(sizes[len(sizes) - 1 - int(costs[::-1].argmin())])
        counts[is_last] = np.maximum(counts[is_last], -(-last // size))
    return counts
