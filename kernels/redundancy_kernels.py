"""Device code of one chunk's redundancy: sums of cosines, less those with newest similar keys.

Knows nothing of queries, or of rows' lengths beyond its arguments; `kernels/chunk_kernels.py` says
where the keys are and what is noted in memory.

The sum over i of cos(j, i) takes no work per pair of keys:
    k_j . (sum over i of k_i / |k_i|) / |k_j|
is two slim products, for which float32 factors are split into three bfloat16 numbers each.
Each key's newest similar key is looked for among few keys first:
1. The chunk's 16 newest keys, in one slim product. Where many keys are alike, most find theirs.
2. A key that did not is open, and each two tiles with open keys are multiplied once. The signs of
       excess = k_j . k_i / |k_i| - threshold * |k_j|
   are joined by "and", half an instruction a pair of keys beside the multiply-add. Where no keys
   are alike, this is all.
3. Where an open key has a similar one, the two tiles are read again from the L2 and compared in
   full: newest tiles first, until no tile left holds a position newer than what was found.
What a key loses is added up in fixed point, so that the order of the additions does not matter.
"""

# Triton's compiler grows tuples by adding to them, which has no type in Python.
# ruff: noqa: RUF005
# mypy: ignore-errors

import triton
import triton.language as tl

from zipage_lang.kernels.score_kernels import INTERPRETED, products

FIXED_POINT = tl.constexpr(4194304.0)  # 2^22: 256 cosines of at most 1 fit an int32 twice
NUM_NEWEST = tl.constexpr(16)  # keys that all others are compared with, another slim product
_TINY_NORM = tl.constexpr(1e-12)
_NEWEST = tl.constexpr(0x7FFF_FFFF)
_SIGN = tl.constexpr(-0x8000_0000)
_UPPER_HALF = tl.constexpr(-65536)  # of an int32: what bfloat16 keeps of a float32
_PART_COLUMNS = tl.constexpr(16)  # of a slim product, three of them used
_LONGEST_BACK = tl.constexpr(2**22)


@triton.jit
def note_group(slots, positions, group, length, SLOTS: tl.constexpr):
    """Notes which keys are the newest. Returns the highest age, position + 1, of the others.

    Of keys whose positions lie millions apart it may name others, but what it returns holds.
    """
    index = tl.arange(0, SLOTS)
    real = tl.load(slots + index, mask=index < length, other=-1) >= 0
    age = tl.load(positions + index, mask=real, other=-1) + 1
    back = tl.minimum(tl.max(age, axis=0) - age, _LONGEST_BACK - 1)
    order = ((_LONGEST_BACK - 1 - back) * 256) | index
    newest = tl.topk(order, NUM_NEWEST)
    tl.store(group + tl.arange(0, NUM_NEWEST), (newest & 255).to(tl.float32, bitcast=True))
    outside = order < tl.min(newest, axis=0)
    return tl.max(tl.where(outside, age, 0), axis=0)


@triton.jit
def load_lines(
    base, lines, STRIDE: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """[ROWS, DIM_PADDED]: the noted lines, STRIDE elements apart, zeros behind DIM."""
    line = tl.load(lines + tl.arange(0, ROWS)).to(tl.int32, bitcast=True)
    return _load_rows(base, line, STRIDE, DIM, DIM_PADDED)


@triton.jit
def _load_rows(base, line, STRIDE: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    dims = tl.arange(0, DIM_PADDED)
    where = (base + dims)[None, :] + line.to(tl.int64)[:, None] * STRIDE
    if DIM == DIM_PADDED:
        found = tl.load(where)
    else:
        found = tl.load(where, mask=(dims < DIM)[None, :], other=0.0)
    return found


@triton.jit
def note_norms(
    head_keys,
    lines,
    inverses,
    offsets,
    threshold,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The tiles' keys, and for each tile int1 [TILE]: whether a key is similar to one of its tile.

    The norms lie on the diagonals.
    """
    lane = tl.arange(0, TILE)
    itself = lane[:, None] == lane[None, :]
    keys, hits = (), ()
    for tile in tl.static_range(TILES):  # the whole chunk is in flight at once
        own = lines + tile * TILE
        keys = keys + (load_lines(head_keys, own, HEADS * DIM, DIM, DIM_PADDED, TILE),)
    for tile in tl.static_range(TILES):
        own = tile * TILE + lane
        product = products(keys[tile], keys[tile])
        square = tl.sum(tl.where(itself, product, 0.0), axis=1)
        square = tl.maximum(square, _TINY_NORM * _TINY_NORM)
        real = tl.load(inverses + own)
        inverse = tl.rsqrt(square)  # approximate, so refined once
        inverse = inverse * (1.5 - 0.5 * square * inverse * inverse)
        tl.debug_barrier()  # all threads that hold a row have read
        tl.store(inverses + own, inverse * real)
        tl.store(offsets + own, tl.where(real > 0, square * inverse * -threshold, -float("inf")))
        tl.debug_barrier()  # what one thread noted, another reads
        excess = product * tl.load(inverses + own)[None, :] + tl.load(offsets + own)[:, None]
        hits = hits + (_is_any_positive(tl.where(itself, -1.0, excess)),)
    return keys, hits


@triton.jit
def drop_in_group(
    head_keys,
    keys,
    hits,
    positions,
    lines,
    inverses,
    offsets,
    opens,
    group,
    fixed_sums,
    newest_outside,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Takes from the newest keys' sums what keys whose newest similar key is one of them drop.

    Notes which keys stay open. Returns bit `tile` for every tile where one is, and bit TILES + tile
    where it has a similar key in its own tile.
    """
    lane = tl.arange(0, TILE)
    column = tl.load(group + tl.arange(0, NUM_NEWEST)).to(tl.int32, bitcast=True)
    line = tl.load(lines + column).to(tl.int32, bitcast=True)
    near = _load_rows(head_keys, line, HEADS * DIM, DIM, DIM_PADDED)
    column_inverse = tl.load(inverses + column)
    age = tl.load(positions + column, mask=column_inverse > 0, other=-1) + 1
    lost = tl.zeros((TILE, NUM_NEWEST), tl.float32)
    bits = tl.zeros((TILE,), tl.int32)
    for tile in tl.static_range(TILES):
        own = tile * TILE + lane
        inverse = tl.load(inverses + own)
        cosine = products(keys[tile], near) * column_inverse[None, :]  # lacks 1 / |k_j|
        is_similar = cosine + tl.load(offsets + own)[:, None] > 0
        is_similar = is_similar & (own[:, None] != column[None, :])
        candidate = tl.where(is_similar, age[None, :], 0)
        best = tl.max(candidate, axis=1)
        is_found = best > newest_outside
        is_it = (candidate == best[:, None]) & is_found[:, None]
        lost += tl.where(is_it, cosine * inverse[:, None], 0.0)
        is_open = (inverse > 0) & (best <= newest_outside)
        tl.store(opens + own, tl.where(is_open, 0, _SIGN).to(tl.float32, bitcast=True))
        bits |= tl.where(is_open, 1 << tile, 0)
        bits |= tl.where(is_open & hits[tile], 1 << (TILES + tile), 0)
    taken = -_to_fixed(tl.sum(lost, axis=0))
    tl.atomic_add(fixed_sums + column, taken, mask=taken != 0, sem="relaxed", scope="cta")
    tl.debug_barrier()  # what one thread noted, another reads
    return tl.reduce(bits, 0, _either)


@triton.jit
def similar_tiles(keys, inverses, offsets, opens, found, TILE: tl.constexpr, TILES: tl.constexpr):
    """Bit tile * TILES + other of the result says that an open key of the one tile is similar to a
    key of the other. found: as `drop_in_group` returns it.
    """
    lane = tl.arange(0, TILE)
    similar = tl.zeros((TILE,), tl.int32)
    for other in tl.static_range(1, TILES):
        inverse = tl.load(inverses + other * TILE + lane)
        closed = tl.load(opens + other * TILE + lane).to(tl.int32, bitcast=True)
        for tile in tl.static_range(other):
            if (found & ((1 << tile) | (1 << other))) != 0:
                offset = tl.load(offsets + tile * TILE + lane)
                is_open = tl.load(opens + tile * TILE + lane).to(tl.int32, bitcast=True) >= 0
                excess = products(keys[tile], keys[other]) * inverse[None, :] + offset[:, None]
                is_any = _is_any_positive(excess)
                similar |= tl.where(is_any & is_open, 1 << (tile * TILES + other), 0)
                is_any = _is_any_positive_of(excess, closed[None, :])
                similar |= tl.where(is_any, 1 << (other * TILES + tile), 0)
    result = tl.reduce(similar, 0, _either)
    for tile in tl.static_range(TILES):
        result |= ((found >> (TILES + tile)) & 1) << (tile * TILES + tile)
    return result


@triton.jit
def _is_any_positive(values):
    """int1 [rows]: whether one of a row's values is not negative; half an instruction a value."""
    if INTERPRETED:
        result = tl.max(values, axis=1) >= 0
    else:
        result = tl.reduce(values.to(tl.int32, bitcast=True), 1, _both) >= 0
    return result


@triton.jit
def _is_any_positive_of(values, closed):
    """As `_is_any_positive`, of the columns where `closed` lacks the sign bit."""
    if INTERPRETED:
        result = tl.max(tl.where(closed < 0, -1.0, values), axis=1) >= 0
    else:
        result = tl.reduce(values.to(tl.int32, bitcast=True) | closed, 1, _both) >= 0
    return result


@triton.jit
def _both(left, right):
    return left & right


@triton.jit
def _either(left, right):
    return left | right


@triton.jit
def store_sums(
    keys, fixed_sums, inverses, length, DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Sums of each key's cosines with the chunk's others."""
    lane = tl.arange(0, TILE)
    parts = tl.zeros((DIM_PADDED, _PART_COLUMNS), tl.float32)
    for tile in tl.static_range(TILES):
        weights = _split(tl.load(inverses + tile * TILE + lane))
        parts = _add_product(tl.trans(keys[tile]), weights, parts)
    direction = _split(tl.sum(parts, axis=1))  # [DIM_PADDED, _PART_COLUMNS]
    for tile in tl.static_range(TILES):
        zero = tl.zeros((TILE, _PART_COLUMNS), tl.float32)
        total = tl.sum(_add_product(keys[tile], direction, zero), axis=1)
        inverse = tl.load(inverses + tile * TILE + lane)
        itself = tl.where((inverse > 0) & (inverse < 0.5 / _TINY_NORM), 1.0, 0.0)  # no zero key
        own = tile * TILE + lane
        tl.store(fixed_sums + own, _to_fixed(total * inverse - itself), mask=own < length)


@triton.jit
def _split(values):
    """bfloat16 [len, _PART_COLUMNS]: three numbers that sum to a float32 one, then zeros."""
    column = tl.arange(0, _PART_COLUMNS)[None, :]
    rest = values[:, None]
    for step in tl.static_range(2):  # a column beyond takes away what those before it hold
        upper = rest.to(tl.int32, bitcast=True) & tl.where(column > step, _UPPER_HALF, 0)
        rest = rest - upper.to(tl.float32, bitcast=True)
    upper = rest.to(tl.int32, bitcast=True) & tl.where(column < 3, _UPPER_HALF, 0)
    return upper.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _add_product(left, right, total):
    if INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def _to_fixed(value):
    return tl.floor(value * FIXED_POINT + 0.5).to(tl.int32)


@triton.jit
def drop_newest(
    head_keys,
    positions,
    lines,
    inverses,
    offsets,
    opens,
    fixed_sums,
    length,
    similar,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PADDED: tl.constexpr,
):
    """Takes from each key's sum the cosines with the open keys whose newest similar key it is.

    An age is a position + 1; 0 stands for no key.
    """
    lane = tl.arange(0, TILE)
    tiles = tl.arange(0, TILES_PADDED)
    everywhere = tiles[:, None] * TILE + lane[None, :]
    there = tl.load(inverses + everywhere) > 0
    ages = tl.load(positions + everywhere, mask=there, other=-1) + 1
    newest_ages = tl.max(ages, axis=1)  # [TILES_PADDED]
    for tile in range(TILES):
        others = (similar >> (tile * TILES)) & ((1 << TILES) - 1)
        if others != 0:
            index = tile * TILE + lane
            is_open = tl.load(opens + index).to(tl.int32, bitcast=True) >= 0
            keys = load_lines(head_keys, lines + tile * TILE, HEADS * DIM, DIM, DIM_PADDED, TILE)
            offset = tl.load(offsets + index)
            newest = tl.where(is_open, 0, _NEWEST)
            place = tl.zeros((TILE,), tl.int32)
            lost = tl.zeros((TILE,), tl.float32)
            least = tl.full((), 0, tl.int32)
            age = tl.max(newest_ages, axis=0)
            while age > least:
                other = tl.max(tl.where(newest_ages == age, tiles, 0), axis=0)
                if (others >> other) & 1:
                    column = other * TILE + lane
                    near = load_lines(
                        head_keys, lines + other * TILE, HEADS * DIM, DIM, DIM_PADDED, TILE
                    )
                    own_age = tl.load(positions + column, mask=column < length, other=-1) + 1
                    cosine = products(keys, near) * tl.load(inverses + column)[None, :]
                    is_similar = cosine + offset[:, None] > 0  # cosine lacks 1 / |k_j|
                    is_similar = is_similar & (index[:, None] != column[None, :])
                    candidate = tl.where(is_similar, own_age[None, :], 0)
                    best = tl.max(candidate, axis=1)
                    is_newer = best > newest
                    is_it = candidate == best[:, None]  # one of a row, where one was found
                    value = tl.sum(tl.where(is_it, cosine, 0.0), axis=1)
                    at = tl.sum(tl.where(is_it, column[None, :], 0), axis=1)
                    lost = tl.where(is_newer, value, lost)
                    place = tl.where(is_newer, at, place)
                    newest = tl.maximum(newest, best)
                    least = tl.min(newest, axis=0)
                age = tl.max(tl.where(newest_ages < age, newest_ages, 0), axis=0)
            is_found = (newest > 0) & (newest < _NEWEST)
            taken = -_to_fixed(lost * tl.load(inverses + index))
            tl.atomic_add(fixed_sums + place, taken, mask=is_found, sem="relaxed", scope="cta")
