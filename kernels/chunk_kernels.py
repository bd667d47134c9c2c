"""Device code that scores one chunk of bfloat16 keys: attention mass and redundancy, one read.

Knows nothing of rows' lengths beyond its arguments; `kernels/scores.py` checks and launches.

The chunk's keys are read once, into shared memory, in tiles; every product is a tensor-core product
accumulated in float32. How redundancy avoids comparing all keys with all stands in
`kernels/redundancy_kernels.py`.

What a program must know in more than one register layout it notes in memory, float32 each:
    lines    [slots]    number of the key's line in the pool, as int32; of a real key for padding
    inverses [slots]    1 / |k|, 0 for padding
    offsets  [slots]    -threshold * |k|, -inf for padding
    opens    [slots]    0 where the key's newest similar one is still to be found, else -0
    group    [16]       indices of the newest keys, as int32
    heads    [columns]  number of the query's line in the ring, as int32
    lses     [columns]  its log-sum-exp, inf where there is no query
A column is member * QUERIES + query, part after part of the queries, so that a thread holds all
members of its queries.
"""

# Triton's compiler grows tuples by adding to them, which has no type in Python.
# ruff: noqa: RUF005
# mypy: ignore-errors

import triton
import triton.language as tl

from zipage_lang.kernels.redundancy_kernels import (
    FIXED_POINT,
    NUM_NEWEST,
    drop_in_group,
    drop_newest,
    load_lines,
    note_group,
    note_norms,
    similar_tiles,
    store_sums,
)
from zipage_lang.kernels.score_kernels import products


@triton.jit(do_not_specialize=["max_tail", "num_chunks", "chunk", "num_queries"])
def chunk_kernel(
    kv,
    slots,
    positions,
    ring,
    ring_lse,
    ring_slots,
    query_at,
    mass,
    similarity,
    fixed_sums,  # int32, may be the memory of `similarity`
    notes,  # [num_programs, 4 * slots + 16 + 2 * columns]
    max_tail,
    num_chunks,
    chunk,
    num_queries,
    scale_log2,
    threshold,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    QUERY_PARTS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PADDED: tl.constexpr,
):
    """One chunk of one row and head, of at most TILE * TILES slots.

    Heads are the fastest axis of the grid, so that programs that run together read whole lines of
    the pool.
    """
    program = tl.program_id(0)
    head = program % HEADS
    start = (program // HEADS % num_chunks) * chunk
    row = (program // HEADS // num_chunks).to(tl.int64)
    length = tl.minimum(chunk, max_tail - start)
    out = (row * HEADS + head) * max_tail + start
    slots += row * max_tail + start
    positions += out
    mass += out
    similarity += out
    fixed_sums += out
    all_slots: tl.constexpr = TILE * TILES_PADDED
    columns: tl.constexpr = GROUP_PADDED * QUERIES * QUERY_PARTS
    notes += program.to(tl.int64) * (4 * all_slots + NUM_NEWEST + 2 * columns)
    lines, inverses, offsets = notes, notes + all_slots, notes + 2 * all_slots
    opens, group = notes + 3 * all_slots, notes + 4 * all_slots
    heads, lses = group + NUM_NEWEST, group + NUM_NEWEST + columns
    num_keys = _note_lines(slots, lines, inverses, length, BLOCK_SIZE, all_slots)
    index = tl.arange(0, all_slots)
    if num_keys == 0:
        tl.store(mass + index, 0.0, mask=index < length)
        tl.store(similarity + index, 0.0, mask=index < length)
    else:
        newest_outside = note_group(slots, positions, group, length, all_slots)
        num_stored = _note_queries(
            ring_lse, ring_slots + row * num_queries, heads, lses, head, num_queries,
            HEADS, GROUP, GROUP_PADDED, QUERIES, QUERY_PARTS,
        )  # fmt: skip
        tl.debug_barrier()  # what one thread noted, another reads
        head_keys = kv + head * DIM
        keys, hits = note_norms(
            head_keys, lines, inverses, offsets, threshold, HEADS, DIM, DIM_PADDED, TILE, TILES
        )
        store_sums(keys, fixed_sums, inverses, length, DIM_PADDED, TILE, TILES)
        tl.debug_barrier()  # sums are there to be added to
        similar = drop_in_group(
            head_keys, keys, hits, positions, lines, inverses, offsets, opens, group, fixed_sums,
            newest_outside, HEADS, DIM, DIM_PADDED, TILE, TILES,
        )  # fmt: skip
        if similar != 0:
            similar = similar_tiles(keys, inverses, offsets, opens, similar, TILE, TILES)
        _store_mass(
            keys, inverses, positions, ring, heads, lses, ring_slots + row * num_queries,
            query_at + row * num_queries, mass, length, num_queries, num_stored, scale_log2,
            DIM, DIM_PADDED, GROUP_PADDED, QUERIES, QUERY_PARTS, TILE, TILES,
        )  # fmt: skip
        if similar != 0:
            drop_newest(
                head_keys, positions, lines, inverses, offsets, opens, fixed_sums, length,
                similar, HEADS, DIM, DIM_PADDED, TILE, TILES, TILES_PADDED,
            )  # fmt: skip
        tl.debug_barrier()  # sums are complete
        total = tl.load(fixed_sums + index, mask=index < length, other=0, volatile=True)
        mean = total.to(tl.float32) / (FIXED_POINT * num_keys.to(tl.float32))
        tl.store(similarity + index, mean, mask=index < length)


@triton.jit
def _note_lines(slots, lines, inverses, length, BLOCK_SIZE: tl.constexpr, SLOTS: tl.constexpr):
    """The number of keys. Padding is given the line of a real key, so that no load has a mask.

    Of the inverses it is noted so far which are 0.
    """
    index = tl.arange(0, SLOTS)
    slot = tl.load(slots + index, mask=index < length, other=-1).to(tl.int32)
    real = tl.where(slot >= 0, slot, tl.maximum(tl.max(slot, axis=0), 0)).to(tl.uint32)
    line = real + real // BLOCK_SIZE * BLOCK_SIZE  # values lie between keys
    tl.store(lines + index, line.to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(inverses + index, (slot >= 0).to(tl.float32))
    return tl.sum((slot >= 0).to(tl.int32), axis=0)


@triton.jit
def _note_queries(
    ring_lse,
    ring_slots,
    heads,
    lses,
    head,
    num_queries,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    QUERY_PARTS: tl.constexpr,
):
    """The number of queries. A column without one is given another's line."""
    column = tl.arange(0, GROUP_PADDED * QUERIES * QUERY_PARTS)
    member = column % (GROUP_PADDED * QUERIES) // QUERIES
    query = column // (GROUP_PADDED * QUERIES) * QUERIES + column % QUERIES
    entry = tl.load(ring_slots + query, mask=query < num_queries, other=-1).to(tl.int32)
    some_entry = tl.maximum(tl.max(entry, axis=0), 0)
    q_head = tl.where(entry >= 0, entry, some_entry) * (HEADS * GROUP) + head * GROUP
    q_head += tl.minimum(member, GROUP - 1)
    lse = tl.load(ring_lse + q_head, mask=(entry >= 0) & (member < GROUP), other=float("inf"))
    tl.store(heads + column, q_head.to(tl.float32, bitcast=True))
    tl.store(lses + column, lse)
    return tl.sum(((entry >= 0) & (member == 0)).to(tl.int32), axis=0)


@triton.jit
def _store_mass(
    keys,
    inverses,
    positions,
    ring,
    heads,
    lses,
    ring_slots,
    query_at,
    mass,
    length,
    num_queries,
    num_stored,
    scale_log2,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    QUERY_PARTS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Mean over queries of the group's largest share: one product per part of the queries and tile,
    one exponential per key and query.
    """
    columns: tl.constexpr = GROUP_PADDED * QUERIES
    lane = tl.arange(0, TILE)
    sums = ()
    for _ in tl.static_range(TILES):
        sums = sums + (tl.zeros((TILE,), tl.float32),)
    for part in range(QUERY_PARTS):
        q = load_lines(ring, heads + part * columns, DIM, DIM, DIM_PADDED, columns)
        lse = tl.load(lses + part * columns + tl.arange(0, columns))
        query = part * QUERIES + tl.arange(0, QUERIES)
        entry = tl.load(ring_slots + query, mask=query < num_queries, other=-1)
        seen_until = tl.load(query_at + query, mask=query < num_queries, other=-1).to(tl.int32)
        seen_until = tl.where(entry >= 0, seen_until, -1)
        updated = ()
        for tile in tl.static_range(TILES):
            logits = products(keys[tile], q) * scale_log2 - lse[None, :]
            best = tl.max(tl.reshape(logits, (TILE, GROUP_PADDED, QUERIES)), axis=1)
            own = tile * TILE + lane
            at = tl.load(positions + own, mask=own < length, other=0)
            seen = at[:, None] <= seen_until[None, :]
            part_sum = tl.sum(tl.where(seen, tl.exp2(best), 0.0), axis=1)
            updated = updated + (sums[tile] + part_sum,)
        sums = updated
    share = 1.0 / tl.maximum(num_stored, 1).to(tl.float32)
    for tile in tl.static_range(TILES):
        own = tile * TILE + lane
        real = tl.load(inverses + own) > 0
        tl.store(mass + own, tl.where(real, sums[tile] * share, 0.0), mask=own < length)
