"""Device code of the scores that read keys: attention mass and the comparison of keys.

Knows nothing of tensors' shapes beyond its arguments; `kernels/scores.py` checks and launches.

A *tile* is (keys [tile, dim], 1 / norm [tile], positions [tile], self products [tile]); slots that
are none have zero keys and position -1. What a tile j has seen of other keys i so far is its state:
(total [tile], sum over i of cos(i, j) * |k_j|; newest [tile], position of the newest i that is
similar, -1 for none; dropped [tile], cos(newest, j) * |k_j|).
"""

import os

import triton
import triton.language as tl

_TINY_NORM = tl.constexpr(1e-12)
# Triton's interpreter holds bfloat16 as integers and would multiply those.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def products(left, right):
    """left @ right.T, accumulated in float32; products of 16-bit numbers are exact."""
    if INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, tl.trans(right), input_precision="ieee")


@triton.jit
def _load_tile(
    kv,
    slots,
    positions,
    row,
    head,
    index,
    end,
    max_tail,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    slot = tl.load(slots + row * max_tail + index, mask=index < end, other=-1)
    real = slot >= 0
    at = tl.load(positions + (row * HEADS + head) * max_tail + index, mask=real, other=-1)
    slot = tl.where(real, slot, 0)
    line = slot // BLOCK_SIZE * (2 * BLOCK_SIZE) + slot % BLOCK_SIZE
    dims = tl.arange(0, DIM_PADDED)
    where = (line * HEADS + head)[:, None] * DIM + dims[None, :]
    keys = tl.load(kv + where, mask=real[:, None] & (dims < DIM)[None, :], other=0.0)
    wide = keys.to(tl.float32)
    square = tl.sum(wide * wide, axis=1)
    inverse = 1.0 / tl.maximum(tl.sqrt(square), _TINY_NORM)
    return keys, inverse, at, square * inverse * inverse


@triton.jit
def _mass_of(
    keys,
    at,
    ring,
    ring_lse,
    ring_slots,
    query_at,
    row,
    head,
    num_queries,
    scale_log2,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Mean over queries of the group's largest share; one exponential per query, not per head."""
    query = tl.arange(0, QUERIES)
    dims = tl.arange(0, DIM_PADDED)
    entry = tl.load(ring_slots + row * num_queries + query, mask=query < num_queries, other=-1)
    seen_until = tl.load(query_at + row * num_queries + query, mask=query < num_queries, other=-1)
    stored = entry >= 0
    entry = tl.where(stored, entry, 0)
    best = tl.full((TILE, QUERIES), -float("inf"), tl.float32)
    for member in range(GROUP):
        q_head = entry * (HEADS * GROUP) + head * GROUP + member
        mask = stored[:, None] & (dims < DIM)[None, :]
        q = tl.load(ring + q_head[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
        lse = tl.load(ring_lse + q_head, mask=stored, other=float("inf"))
        best = tl.maximum(best, products(keys, q) * scale_log2 - lse[None, :])
    seen = (at[:, None] <= seen_until[None, :]) & (at >= 0)[:, None]
    total = tl.sum(tl.where(seen, tl.exp2(best), 0.0), axis=1)
    return total / tl.maximum(tl.sum(stored.to(tl.int32), axis=0), 1).to(tl.float32)


@triton.jit
def _new_state(TILE: tl.constexpr):
    return (
        tl.zeros((TILE,), tl.float32),
        tl.full((TILE,), -1, tl.int32),
        tl.zeros((TILE,), tl.float32),
    )


@triton.jit
def _compare(tile, state, other, threshold):
    """The state of tile j after it has also seen the keys i of `other`."""
    product = products(tile[0], other[0]) * other[1][None, :]  # [tile of j, tile of i]
    similar = product > (threshold / tile[1])[:, None]
    similar = similar & (tile[2][:, None] != other[2][None, :])
    candidate = tl.where(similar, other[2][None, :], -1)
    found = tl.max(candidate, axis=1)
    # Where nothing is similar this adds up all products, but such a sum is never taken.
    value = tl.sum(tl.where(candidate == found[:, None], product, 0.0), axis=1)
    dropped = tl.where(found > state[1], value, state[2])
    return state[0] + tl.sum(product, axis=1), tl.maximum(state[1], found), dropped


@triton.jit
def _dropped_from(at, newest, dropped):
    """[tile of i]: sum of `dropped` over the keys j whose newest similar key is i."""
    is_it = newest[None, :] == at[:, None]  # [tile of i, tile of j]
    return tl.sum(tl.where(is_it, dropped[None, :], 0.0), axis=1)


@triton.jit
def mass_kernel(
    kv,
    slots,
    positions,
    ring,
    ring_lse,
    ring_slots,
    query_at,
    mass,
    max_tail,
    num_tiles,
    num_queries,
    scale_log2,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of one row and head."""
    program = tl.program_id(0)
    head = program % HEADS
    row = (program // HEADS // num_tiles).to(tl.int64)
    index = (program // HEADS % num_tiles) * TILE + tl.arange(0, TILE)
    tile = _load_tile(
        kv, slots, positions, row, head, index, max_tail, max_tail,
        BLOCK_SIZE, HEADS, DIM, DIM_PADDED,
    )  # fmt: skip
    result = _mass_of(
        tile[0], tile[2], ring, ring_lse, ring_slots, query_at, row, head, num_queries, scale_log2,
        HEADS, DIM, DIM_PADDED, GROUP, QUERIES, TILE,
    )  # fmt: skip
    tl.store(mass + (row * HEADS + head) * max_tail + index, result, mask=index < max_tail)


@triton.jit
def pairs_kernel(
    kv,
    slots,
    positions,
    sums,
    newest_of,
    dropped_of,
    max_tail,
    num_chunks,
    chunk_tiles,
    chunk,
    threshold,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """A tile of keys j against all keys of its chunk."""
    program = tl.program_id(0)
    head = program % HEADS
    start = (program // HEADS // chunk_tiles % num_chunks) * chunk
    row = (program // HEADS // chunk_tiles // num_chunks).to(tl.int64)
    end = tl.minimum(start + chunk, max_tail)
    index = start + (program // HEADS % chunk_tiles) * TILE + tl.arange(0, TILE)
    tile = _load_tile(
        kv, slots, positions, row, head, index, end, max_tail, BLOCK_SIZE, HEADS, DIM, DIM_PADDED
    )
    total, newest, dropped = _new_state(TILE)
    for first in range(start, end, TILE):
        other = _load_tile(
            kv, slots, positions, row, head, first + tl.arange(0, TILE), end, max_tail,
            BLOCK_SIZE, HEADS, DIM, DIM_PADDED,
        )  # fmt: skip
        total, newest, dropped = _compare(tile, (total, newest, dropped), other, threshold)
    out = (row * HEADS + head) * max_tail + index
    tl.store(sums + out, total * tile[1] - tile[3], mask=index < end)
    tl.store(newest_of + out, newest, mask=index < end)
    tl.store(dropped_of + out, dropped * tile[1], mask=index < end)


@triton.jit
def drop_kernel(
    slots,
    positions,
    sums,
    newest_of,
    dropped_of,
    similarity,
    max_tail,
    num_chunks,
    chunk_tiles,
    chunk,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Take from a tile of keys i the entries dropped at them; divide by the chunk's count."""
    program = tl.program_id(0)
    head = program % HEADS
    start = (program // HEADS // chunk_tiles % num_chunks) * chunk
    row = (program // HEADS // chunk_tiles // num_chunks).to(tl.int64)
    end = tl.minimum(start + chunk, max_tail)
    index = start + (program // HEADS % chunk_tiles) * TILE + tl.arange(0, TILE)
    base = (row * HEADS + head) * max_tail
    real = tl.load(slots + row * max_tail + index, mask=index < end, other=-1) >= 0
    at = tl.load(positions + base + index, mask=real, other=-1)
    total = tl.load(sums + base + index, mask=real, other=0.0)
    count = tl.zeros((TILE,), tl.int32)
    for first in range(start, end, TILE):
        other = first + tl.arange(0, TILE)
        slot = tl.load(slots + row * max_tail + other, mask=other < end, other=-1)
        newest = tl.load(newest_of + base + other, mask=other < end, other=-1)
        dropped = tl.load(dropped_of + base + other, mask=other < end, other=0.0)
        count += (slot >= 0).to(tl.int32)
        total -= _dropped_from(at, newest, dropped)
    num_keys = tl.maximum(tl.sum(count, axis=0), 1).to(tl.float32)
    tl.store(similarity + base + index, tl.where(real, total / num_keys, 0.0), mask=index < end)
