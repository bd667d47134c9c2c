"""How many blocks the KV pool has: arithmetic on what was asked for and what was measured.

Knows nothing of how memory is measured or allocated.

On a card the pool gets what is left of `gpu_memory_share` once everything else is counted that a
worst step, a worst compaction and the CUDA graphs take; `kv_cache_memory` or `num_blocks` override
that, and are only checked against the card.
"""

import dataclasses
from collections.abc import Sequence

from zipage_lang.runtime.config import CacheConfig

GIB = 2**30
CPU_POOL_GIB = 1.0  # where nothing was asked for and nothing is measured
NUM_DUMMY_BLOCKS = 1  # block 0 takes memory but holds nothing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """Bytes of a card's memory by what takes them, all but the pool."""

    total: int  # the card has
    others: int  # in use before the engine loads anything: the CUDA context, other processes
    weights: int
    fixed: int  # query rings, sampling state, staging of swaps: set by options, not by the load
    step: int  # largest step: activations, logits, sampling, attention workspaces, code of kernels
    compaction: int
    graphs: int

    @property
    def sum(self) -> int:
        """All of them together."""
        return self.others + self.weights + self.fixed + self.step + self.compaction + self.graphs

    def describe(self) -> str:
        """In GiB: "of 139.8 GiB: weights 15.3, ..."."""
        named = {
            "in use before": self.others,
            "weights": self.weights,
            "query rings and staging": self.fixed,
            "largest step": self.step,
            "compaction": self.compaction,
            "CUDA graphs": self.graphs,
        }
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in named.items())
        return f"of {self.total / GIB:.2f} GiB: {parts}"


def asked_blocks(cache: CacheConfig, block_bytes: int) -> int | None:
    """Usable blocks by explicit options; None: none was given.

    Raises ValueError when the memory asked for holds no block.
    """
    if cache.num_blocks is not None:
        return cache.num_blocks
    if cache.kv_cache_memory is None:
        return None
    num_blocks = int(cache.kv_cache_memory * GIB) // block_bytes
    if num_blocks < 1:
        raise ValueError(
            f"kv_cache_memory={cache.kv_cache_memory} GiB is less than one block of "
            f"{block_bytes} bytes; raise it or lower block_size"
        )
    return num_blocks


def unmeasured_blocks(cache: CacheConfig, block_bytes: int) -> int:
    """Usable blocks where memory is not measured: as asked, else CPU_POOL_GIB of them.

    Raises ValueError as `asked_blocks` does, or when not even one block fits.
    """
    asked = asked_blocks(cache, block_bytes)
    if asked is None:
        asked = asked_blocks(dataclasses.replace(cache, kv_cache_memory=CPU_POOL_GIB), block_bytes)
    assert asked is not None, "kv_cache_memory was given"
    return asked


def fitting_blocks(needs: MemoryNeeds, cache: CacheConfig, block_bytes: int) -> int:
    """Usable blocks of a pool on the measured card.

    Raises ValueError with all the numbers and what to change when what was asked for does not fit
    the card, or when no block is left of the share.
    """
    asked = asked_blocks(cache, block_bytes)
    if asked is not None:
        _check_fits(needs, asked, block_bytes)
        return asked
    room = int(cache.gpu_memory_share * needs.total) - needs.sum
    num_blocks = room // block_bytes - NUM_DUMMY_BLOCKS
    if num_blocks < 1:
        raise ValueError(
            f"no memory is left for the KV pool within gpu_memory_share={cache.gpu_memory_share} "
            f"{needs.describe()}; {_remedies('raise gpu_memory_share')}"
        )
    return num_blocks


def graph_bytes(
    largest: int,
    next_largest: int,
    buckets: Sequence[int],
    logits_row_bytes: int,
    second_buckets: Sequence[int] = (),
) -> int:
    """What the graphs of all buckets take, from what the two largest took.

    Graphs share their activations, so the first pays for them. Each of the others keeps logits of
    its own and what the driver needs for a graph.

    Args:
        largest, next_largest: bytes by which the captures of these two buckets grew.
        buckets: batch sizes, ascending; may be empty: no graphs.
        logits_row_bytes: of one row's logits.
        second_buckets: those of them that have a second graph.
    """
    if len(buckets) < 2:
        return largest
    per_graph = max(0, next_largest - buckets[-2] * logits_row_bytes)
    rest = (*buckets[:-1], *second_buckets)
    return largest + sum(rest) * logits_row_bytes + len(rest) * per_graph


def _check_fits(needs: MemoryNeeds, num_blocks: int, block_bytes: int) -> None:
    pool = (num_blocks + NUM_DUMMY_BLOCKS) * block_bytes
    if pool + needs.sum <= needs.total:
        return
    left = max(0, needs.total - needs.sum)
    most = max(0, left // block_bytes - NUM_DUMMY_BLOCKS)
    raise ValueError(
        f"a KV pool of {pool / GIB:.2f} GiB ({num_blocks} blocks) does not fit the "
        f"{left / GIB:.2f} GiB that are left {needs.describe()}; "
        f"{_remedies(f'set kv_cache_memory or num_blocks to at most {most} blocks')}"
    )


def _remedies(first: str) -> str:
    return (
        f"{first}, free memory that other processes hold, lower max_step_tokens, max_running or "
        "num_query_slots, or take a smaller model"
    )
