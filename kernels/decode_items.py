"""Divides the slots of decodes into items of work for a card: whole pairs, then parts of some.

A pair is one row and one KV head. The card takes items in order, `num_ctas` at a time, so pairs
that don't fill its last round are cut into parts, and so is a pair much longer than the others.
Where and how finely was measured on an H200 (BENCHMARKS.md); nothing depends on it but speed.
Knows nothing of kernels, devices or blocks' numbers.
"""

from typing import NamedTuple

import numpy as np

TILE_BLOCKS = 4  # blocks of 16 slots that the kernel reads at a time; parts begin at whole tiles
ITEM_NUMBERS = 8
LONG_PAIR = 2  # times the mean: such a pair is always cut
MIN_PART_TILES = 2
MAX_PART_ROUNDS = 8  # of parts that share the work of a cut round
WHOLE = -1

# Pairs of one round: what a size of parts costs, in tiles.
PART_TILES = 1.0  # beside its own tiles: the meeting of sums
IDLE_SHARE = 0.3  # of a part: how much later than the others the last CTA is done

# Pairs of more rounds: up to so many, all behind the first are cut into parts of so many tiles.
SECOND_ROUND, SECOND_TILES = 2.0, 6
THIRD_ROUND, THIRD_TILES = 2.6, 12
# With more, the last round is cut unless more of it than this is filled.
CUT_FILL = 0.6
LAST_TILES = 12


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
    # Row by row, so that what lies together in memory is read at about the same time.
    counts = part_counts(np.repeat(tiles, num_kv_heads), num_ctas)  # [num_pairs]
    pair = np.repeat(np.arange(len(counts)), counts)  # [num_items]
    firsts = np.cumsum(counts) - counts  # [num_pairs]
    within = np.arange(len(pair)) - firsts[pair]  # which part of its pair
    row, head = np.divmod(pair, num_kv_heads)
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
    return 2 * num_pairs + (MAX_PART_ROUNDS + 1) * num_ctas


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
    first, size = _cut_from(tiles, counts, num_ctas)
    counts[first:] = np.maximum(counts[first:], -(-tiles[first:] // size))
    return counts


def _cut_from(tiles: np.ndarray, counts: np.ndarray, num_ctas: int) -> tuple[int, int]:
    """From which pair on pairs are cut, and into parts of how many tiles."""
    rounds = int(counts.sum()) / num_ctas
    if rounds <= 1:
        return 0, _best_size(tiles, num_ctas)
    begins = np.cumsum(counts) - counts  # [num_pairs]: items ahead of each
    if rounds <= THIRD_ROUND:
        kept, size = 1, SECOND_TILES if rounds <= SECOND_ROUND else THIRD_TILES
    elif 0 < rounds % 1 <= CUT_FILL:
        kept, size = int(rounds), LAST_TILES
    else:
        return len(tiles), 1
    first = int(np.searchsorted(begins, kept * num_ctas))
    return first, max(size, _least_size(int(tiles[first:].sum()), num_ctas))


def _least_size(num_tiles: int, num_ctas: int) -> int:
    """Parts of so many tiles are no more than MAX_PART_ROUNDS rounds, and one a pair."""
    return max(-(-num_tiles // (MAX_PART_ROUNDS * num_ctas)), MIN_PART_TILES)


def _best_size(tiles: np.ndarray, num_ctas: int) -> int:
    """The size of parts with which pairs that fill no round are done first, in tiles."""
    longest, total = int(tiles.max()), int(tiles.sum())
    sizes = np.unique(-(-longest // np.arange(1, 1 + num_ctas)))  # [num_sizes], rising
    sizes = sizes[sizes >= min(_least_size(total, num_ctas), longest)]
    items = (-(-tiles[:, None] // sizes)).sum(0)  # [num_sizes]
    rounds = items / num_ctas  # [num_sizes]
    even = total / num_ctas + PART_TILES * rounds + IDLE_SHARE * sizes
    # CTAs that have no item leave their bandwidth to the others, but not all of it can be used.
    alone = sizes * (1 + np.minimum(rounds, 1)) / 2 + PART_TILES
    in_step = np.ceil(rounds) * (sizes + PART_TILES)
    costs = np.where(rounds <= 1, alone, np.where(rounds > 2, np.minimum(even, in_step), even))
    return int(sizes[len(sizes) - 1 - int(costs[::-1].argmin())])
