"""Device code that scores one chunk of 16-bit keys: attention mass and redundancy from one read.

Knows nothing of rows' lengths beyond its arguments; `kernels/scores.py` checks and launches.

The chunk's keys are read once, into shared memory, in tiles; every product is a bfloat16 (float16)
tensor-core product accumulated in float32. A pair of keys (j, i) costs few vector operations:
    total_j += k_j.k_i * (huge / |k_i|)                                        one FMA
    hit = saturate(k_j.k_i * (huge / |k_i|) - huge * threshold * |k_j|): 1, 0  one FMA
    candidate = hit * (position_i + 1), the largest of a row is the newest     multiply, maximum
Which cosine is dropped is looked up only for tiles that hold a newer similar key than those before;
the tiles that are likely newest come first. What key i loses is added up in fixed point, so that
the order of the additions does not matter. Positions below 2^24 are exact.
"""

# Triton's compiler grows tuples by adding to them, which has no type in Python.
# ruff: noqa: RUF005
# mypy: ignore-errors

import triton
import triton.language as tl

from zipage_lang.kernels.score_kernels import INTERPRETED, products

_TINY_NORM = tl.constexpr(1e-12)
_HUGE = tl.constexpr(2.0**80)
_FIXED_POINT = tl.constexpr(4194304.0)  # 2^22: 256 cosines of at most 1 fit an int32


@triton.jit(do_not_specialize=["max_tail", "num_chunks", "chunk", "num_queries"])
def chunk_kernel(
    kv,
    slots,
    positions,
    ring,
    ring_lse,
    ring_slots,
    query_at,
    mass,  # holds huge / |k| first
    similarity,
    lost_sums,  # int32, may be the memory of `similarity`
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
    lost_sums += out
    lane = tl.arange(0, TILE)
    found, keys = (), ()
    for tile in tl.static_range(TILES):
        inside = lane < length - tile * TILE
        slot = tl.load(slots + tile * TILE + lane, mask=inside, other=-1)
        found = found + (slot.to(tl.int32),)
        tl.store(lost_sums + tile * TILE + lane, tl.zeros((TILE,), tl.int32), mask=inside)
    for tile in tl.static_range(TILES):  # all loads first: the whole chunk is in flight at once
        keys = keys + (_load_keys(kv, found[tile], head, BLOCK_SIZE, HEADS, DIM, DIM_PADDED),)
    num_keys = tl.zeros((), tl.int32)
    for tile in tl.static_range(TILES):
        wide = keys[tile].to(tl.float32)
        inside = lane < length - tile * TILE
        norm = tl.maximum(tl.sqrt(tl.sum(wide * wide, axis=1)), _TINY_NORM)
        tl.store(mass + tile * TILE + lane, 1.0 / norm * _HUGE, mask=inside)
        num_keys += tl.sum((found[tile] >= 0).to(tl.int32), axis=0)
    tl.debug_barrier()  # what one thread wrote, another reads and adds to
    states = _compare(keys, mass, positions, length, threshold, TILE, TILES)
    for tile in tl.static_range(TILES):
        _, newest, newest_index, cosine = states[tile]
        lost = tl.floor(cosine * _FIXED_POINT + 0.5).to(tl.int32)
        at_newest = lost_sums + newest_index.to(tl.int32)
        tl.atomic_add(at_newest, lost, mask=newest > 0, sem="relaxed", scope="cta")
    tl.debug_barrier()  # squares are read, sums are complete
    share = 1.0 / tl.maximum(num_keys, 1).to(tl.float32)
    for tile in tl.static_range(TILES):
        inside = lane < length - tile * TILE
        lost = tl.load(lost_sums + tile * TILE + lane, mask=inside, other=0, volatile=True)
        result = (states[tile][0] - lost.to(tl.float32) / _FIXED_POINT) * share
        tl.store(similarity + tile * TILE + lane, result, mask=inside)
    _store_mass(
        keys, found, positions, ring, ring_lse, ring_slots, query_at, mass, row, head, length,
        num_queries, scale_log2,
        HEADS, DIM, DIM_PADDED, GROUP, GROUP_PADDED, QUERIES, QUERY_PARTS, TILE, TILES,
    )  # fmt: skip


@triton.jit
def _load_keys(
    kv,
    slot,
    head,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """Keys of a tile; zero where there is no slot, so that such a key is similar to none."""
    block = tl.maximum(slot, 0).to(tl.uint32) // BLOCK_SIZE
    line = tl.maximum(slot, 0) + (block * BLOCK_SIZE).to(tl.int32)  # values lie between keys
    dims = tl.arange(0, DIM_PADDED)
    where = (kv + head * DIM + dims)[None, :] + line.to(tl.int64)[:, None] * (HEADS * DIM)
    return tl.load(where, mask=(slot >= 0)[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def _store_mass(
    keys,
    found,
    positions,
    ring,
    ring_lse,
    ring_slots,
    query_at,
    mass,
    row,
    head,
    length,
    num_queries,
    scale_log2,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    QUERY_PARTS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Mean over queries of the group's largest share.

    A column of the product is member * QUERIES + query, so that a thread holds all members of its
    queries: one product per part of the queries and tile, one exponential per key and query.
    """
    dims = tl.arange(0, DIM_PADDED)
    column = tl.arange(0, GROUP_PADDED * QUERIES)
    member = column // QUERIES
    lane = tl.arange(0, TILE)
    sums = ()
    for _ in tl.static_range(TILES):
        sums = sums + (tl.zeros((TILE,), tl.float32),)
    num_stored = tl.zeros((), tl.int32)
    for part in tl.static_range(QUERY_PARTS):
        query = part * QUERIES + column % QUERIES
        real = (query < num_queries) & (member < GROUP)
        entry = tl.load(ring_slots + row * num_queries + query, mask=real, other=-1)
        real = entry >= 0
        q_head = tl.where(real, entry, 0) * (HEADS * GROUP) + head * GROUP + member
        mask = real[:, None] & (dims < DIM)[None, :]
        q = tl.load(ring + q_head[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
        lse = tl.load(ring_lse + q_head, mask=real, other=float("inf"))
        own = part * QUERIES + tl.arange(0, QUERIES)
        inside = own < num_queries
        seen_until = tl.load(query_at + row * num_queries + own, mask=inside, other=-1)
        own_entry = tl.load(ring_slots + row * num_queries + own, mask=inside, other=-1)
        seen_until = tl.where(own_entry >= 0, seen_until, -1)
        num_stored += tl.sum((own_entry >= 0).to(tl.int32), axis=0)
        updated = ()
        for tile in tl.static_range(TILES):
            logits = products(keys[tile], q) * scale_log2 - lse[None, :]
            best = tl.max(tl.reshape(logits, (TILE, GROUP_PADDED, QUERIES)), axis=1)
            inside = lane < length - tile * TILE
            at = tl.load(positions + tile * TILE + lane, mask=inside, other=0)
            seen = at[:, None] <= seen_until[None, :]
            part_sum = tl.sum(tl.where(seen, tl.exp2(best), 0.0), axis=1)
            updated = updated + (sums[tile] + part_sum,)
        sums = updated
    share = 1.0 / tl.maximum(num_stored, 1).to(tl.float32)
    for tile in tl.static_range(TILES):
        result = tl.where(found[tile] >= 0, sums[tile] * share, 0.0)
        tl.store(mass + tile * TILE + lane, result, mask=lane < length - tile * TILE)


@triton.jit
def _compare(keys, inverses, positions, length, threshold, TILE: tl.constexpr, TILES: tl.constexpr):
    """All keys of the chunk with each other. Returns a tile's state for every tile of keys j, all
    float32 [TILE]: (sum of cosines with the other keys, position + 1 of the newest similar key or
    0, its index in the chunk, its cosine).

    inverses: pointer to the keys' huge / |k|; they are read in every layout they are needed in,
    which costs fewer registers than to hold them.
    """
    lane = tl.arange(0, TILE)
    zero = tl.zeros((TILE,), tl.float32)
    states = ()
    for _ in tl.static_range(TILES):
        states = states + ((zero, zero, zero, zero),)
    for other in tl.static_range(TILES - 1, -1, -1):  # outside: its columns fill many registers
        inside = lane < length - other * TILE
        inverse = tl.load(inverses + other * TILE + lane, mask=inside, other=0.0)
        at = tl.load(positions + other * TILE + lane, mask=inside, other=0)
        age = (at + 1).to(tl.float32)
        updated = ()
        for tile in tl.static_range(TILES):
            norm = _norm(inverses + tile * TILE + lane, lane < length - tile * TILE)
            offset = norm * -(threshold * _HUGE)
            state = _compare_tiles(
                keys[tile], keys[other], offset, inverse, age, states[tile], tile, other, TILE
            )
            updated = updated + (state,)
        states = updated
    finished = ()
    for tile in tl.static_range(TILES):
        total, newest, newest_index, lost = states[tile]
        norm = _norm(inverses + tile * TILE + lane, lane < length - tile * TILE)
        scale = 1.0 / norm / _HUGE
        itself = tl.where(norm > 2 * _TINY_NORM, 1.0, 0.0)
        finished = finished + ((total * scale - itself, newest, newest_index, lost * scale),)
    return finished


@triton.jit
def _norm(inverses, inside):
    return 1.0 / tl.load(inverses, mask=inside, other=_HUGE) * _HUGE


@triton.jit
def _compare_tiles(
    own, others, offset, inverse, age, state, tile: tl.constexpr, other: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The state of keys j after they have also seen the keys i of another tile, or of their own;
    sums and cosines still lack the factor 1 / (huge * |k_j|).
    """
    total, newest, newest_index, lost = state
    lane = tl.arange(0, TILE)
    product = products(own, others)  # [j, i]
    total += tl.sum(product * inverse[None, :], axis=1)
    hit = _exceeds(product, inverse[None, :], offset[:, None])
    if other == tile:
        hit = tl.where(lane[:, None] == lane[None, :], 0.0, hit)
    candidate = hit * age[None, :]
    found = tl.max(candidate, axis=1)
    is_newer = found > newest
    if tl.max(is_newer.to(tl.int32), axis=0) > 0:
        is_it = candidate == found[:, None]  # one of a row, where one was found
        value = tl.sum(tl.where(is_it, product * inverse[None, :], 0.0), axis=1)
        here = (other * TILE + lane).to(tl.float32)
        place = tl.sum(tl.where(is_it, here[None, :], 0.0), axis=1)
        lost = tl.where(is_newer, value, lost)
        newest_index = tl.where(is_newer, place, newest_index)
    return total, tl.maximum(newest, found), newest_index, lost


@triton.jit
def _exceeds(value, factor, offset):
    """1.0 where value * factor + offset > 0, else 0.0: one instruction. The numbers are so huge
    that what is not 0 saturates.
    """
    if INTERPRETED:
        result = (value * factor + offset > 0).to(tl.float32)
    else:
        result = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [value, factor, offset],
            tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return result
