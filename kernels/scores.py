"""Scoring of tail slots on a card: attention mass, key redundancy, and their combination.

Knows nothing of requests, policies or which slots are kept. What each function means stands at its
twin in `kernels/reference/scores.py`; here stands how it is computed, and what it moves. All in
Triton, but that `kernels/hopper/scoring.py` scores bfloat16 chunks of the sizes that it takes.

No cosine matrix is stored and no key is normalised: products of raw keys are accumulated in
float32 and compared with threshold * |k_i| * |k_j|, so bfloat16 keys lose nothing to rounding.
A key's dropped entries are found through positions, which are distinct within a row and head.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from zipage_lang.kernels.backend import TailQueries
from zipage_lang.kernels.chunk_kernels import chunk_kernel
from zipage_lang.kernels.hopper import scoring
from zipage_lang.kernels.reference.scores import gather_keys, gather_values
from zipage_lang.kernels.score_kernels import drop_kernel, mass_kernel, pairs_kernel

__all__ = [
    "attention_mass",
    "combine_scores",
    "flash_similarity",
    "gather_keys",
    "gather_values",
    "lightning_similarity",
    "mass_and_similarity",
    "mass_and_similarity_by_triton",
]

_LOG2_E = math.log2(math.e)
_LONGEST_FUSED_CHUNK = 256  # 64 KiB of keys of 128 dimensions: two programs and more fit an SM
_COMBINE_SLOTS = 1024
_QUERY_COLUMNS = 32  # queries times group in one product: 8 KiB of shared memory
_LEAST_COLUMNS = 16  # the narrowest product


def attention_mass(
    kv_blocks: Tensor, slots: Tensor, positions: Tensor, queries: TailQueries, scale: float
) -> Tensor:
    """See the twin. Reads each key once and each query once per 64 keys; writes 4 bytes a key."""
    _check_tail(kv_blocks, slots, positions)
    mass = torch.empty(positions.shape, dtype=torch.float32, device=positions.device)
    tile = 64 if kv_blocks.element_size() == 2 else 32
    num_rows, num_kv_heads, max_tail = positions.shape
    num_tiles = triton.cdiv(max_tail, tile)
    mass_kernel[(num_rows * num_tiles * num_kv_heads,)](
        kv_blocks,
        slots,
        positions,
        *_query_tensors(queries, kv_blocks, slots),
        mass,
        max_tail,
        num_tiles,
        queries.ring_slots.shape[1],
        scale * _LOG2_E,
        **_sizes(kv_blocks),
        **_query_sizes(queries, num_kv_heads),
        TILE=tile,
        num_warps=4,
        num_stages=2,
    )
    return mass


def lightning_similarity(
    kv_blocks: Tensor, slots: Tensor, positions: Tensor, chunk: int, threshold: float
) -> Tensor:
    """See the twin. Two launches, which read a chunk's keys from the L2 once per 64 of its keys.

    Between them 12 bytes a key lie in scratch. `mass_and_similarity` is the fast way for chunks.
    """
    _check_tail(kv_blocks, slots, positions)
    assert chunk >= 1, f"chunk {chunk} must hold a slot"
    assert threshold >= 0, f"threshold {threshold} would call the zeroed diagonal similar"
    shape, device = positions.shape, positions.device
    sums = torch.empty(shape, dtype=torch.float32, device=device)
    newest = torch.empty(shape, dtype=torch.int32, device=device)
    dropped = torch.empty(shape, dtype=torch.float32, device=device)
    similarity = torch.empty(shape, dtype=torch.float32, device=device)
    num_rows, num_kv_heads, max_tail = shape
    chunk = min(chunk, max_tail)
    tile = 64 if kv_blocks.element_size() == 2 else 32
    num_chunks, chunk_tiles = triton.cdiv(max_tail, chunk), triton.cdiv(chunk, tile)
    grid = (num_rows * num_chunks * chunk_tiles * num_kv_heads,)
    pairs_kernel[grid](
        kv_blocks,
        slots,
        positions,
        sums,
        newest,
        dropped,
        max_tail,
        num_chunks,
        chunk_tiles,
        chunk,
        threshold,
        **_sizes(kv_blocks),
        TILE=tile,
        num_warps=4,
        num_stages=2,
    )
    drop_kernel[grid](
        slots,
        positions,
        sums,
        newest,
        dropped,
        similarity,
        max_tail,
        num_chunks,
        chunk_tiles,
        chunk,
        HEADS=num_kv_heads,
        TILE=tile,
        num_warps=4,
    )
    return similarity


def flash_similarity(
    kv_blocks: Tensor, slots: Tensor, positions: Tensor, threshold: float
) -> Tensor:
    """See the twin. One chunk over the whole tail: N^2 * head_dim * 2 operations per head.

    Memory beside the result: 12 bytes a key and head.
    """
    chunk = max(slots.shape[1], 1)
    return lightning_similarity(kv_blocks, slots, positions, chunk, threshold)


def mass_and_similarity(
    kv_blocks: Tensor,
    slots: Tensor,
    positions: Tensor,
    queries: TailQueries,
    scale: float,
    chunk: int,
    threshold: float,
) -> tuple[Tensor, Tensor]:
    """See the twin. Chunks of up to 256 bfloat16 keys are read once, in one launch: of the Hopper
    kernel where the card is one and the kernel takes these sizes, else of Triton's.
    """
    _check_chunks(kv_blocks, slots, positions, queries, chunk, threshold)
    args = (kv_blocks, slots, positions, queries, scale, chunk, threshold)
    if scoring.takes(kv_blocks, queries, chunk):
        return scoring.mass_and_similarity(*args)
    return mass_and_similarity_by_triton(*args)


def mass_and_similarity_by_triton(
    kv_blocks: Tensor,
    slots: Tensor,
    positions: Tensor,
    queries: TailQueries,
    scale: float,
    chunk: int,
    threshold: float,
) -> tuple[Tensor, Tensor]:
    """See the twin. One launch: reads each bfloat16 key once, writes 8 bytes a key and head.

    One program per (row, KV head, chunk of up to 256 slots) holds the chunk's keys in shared
    memory; `redundancy_kernels` says how it avoids comparing all with all. Counted at 256 slots of
    128 dimensions and 64 query columns, with bytes of the rest (queries, notes) in the L2:
        bytes         64 KiB of keys from memory
        products      4.2 MFLOP of queries with keys, 4.2 of each tile with itself, 3.1 slim ones,
                      and up to 6.3 of tiles with one another where keys stay open
        instructions  20,000 of warps where all find their newest similar key among the newest 16,
                      24,000 where no key has one, and 2,800 more for every two tiles compared
                      in full, of which there are 16
    An SM issues 4 of those a cycle at best: instructions and the waits between them bind this
    kernel, then products, then bandwidth.
    Longer chunks, float16 and float32 keys take the separate kernels and are read more often.
    """
    if kv_blocks.dtype != torch.bfloat16 or chunk > _LONGEST_FUSED_CHUNK:
        mass = attention_mass(kv_blocks, slots, positions, queries, scale)
        return mass, lightning_similarity(kv_blocks, slots, positions, chunk, threshold)
    _check_chunks(kv_blocks, slots, positions, queries, chunk, threshold)
    num_rows, num_kv_heads, max_tail = positions.shape
    mass = torch.empty(positions.shape, dtype=torch.float32, device=positions.device)
    similarity = torch.empty_like(mass)
    num_chunks = triton.cdiv(max_tail, chunk)
    config = _chunk_config(queries, num_kv_heads, chunk)
    num_programs = num_rows * num_chunks * num_kv_heads
    notes = torch.empty(num_programs * _notes_len(config), device=positions.device)
    chunk_kernel[(num_programs,)](
        kv_blocks,
        slots,
        positions,
        *_query_tensors(queries, kv_blocks, slots),
        mass,
        similarity,
        similarity.view(torch.int32),
        notes,
        max_tail,
        num_chunks,
        chunk,
        queries.ring_slots.shape[1],
        scale * _LOG2_E,
        threshold,
        **_sizes(kv_blocks),
        **config,
    )
    return mass, similarity


def combine_scores(
    mass: Tensor,
    similarity: Tensor,
    history: Tensor,
    lens: Tensor,
    in_order: Tensor,
    *,
    decay: float,
    pool_kernel: int,
    temperature: float,
    mass_weight: float,
) -> tuple[Tensor, Tensor]:
    """See the twin. One launch: reads 16 bytes a slot and head (similarity twice), writes 8."""
    assert pool_kernel % 2 == 1, f"pooling kernel {pool_kernel} must be odd to be centred"
    num_rows, num_kv_heads, max_tail = mass.shape
    assert similarity.shape == history.shape == mass.shape, f"{similarity.shape}, {history.shape}"
    keep = torch.empty(mass.shape, dtype=torch.float32, device=mass.device)
    stored = torch.empty_like(keep)
    _combine_kernel[(num_rows * num_kv_heads,)](
        mass.contiguous(),
        similarity.contiguous(),
        history.contiguous(),
        lens,
        in_order.int(),
        keep,
        stored,
        max_tail,
        decay,
        1.0 / temperature,
        mass_weight,
        HEADS=num_kv_heads,
        REACH=pool_kernel // 2,
        SLOTS=min(_COMBINE_SLOTS, max(16, triton.next_power_of_2(max_tail))),
        num_warps=4,
    )
    return keep, stored


def _chunk_config(queries: TailQueries, num_kv_heads: int, chunk: int) -> dict[str, int]:
    """For 256 slots: 4 tiles of 64, one warp group, at most 168 registers and 72 KiB of shared
    memory, so that three programs share an SM: one loads while the others compute.
    """
    tile = min(max(triton.next_power_of_2(chunk), 16), 64)
    group = queries.ring.shape[1] // num_kv_heads
    padded = triton.next_power_of_2(group)
    num_queries = triton.next_power_of_2(queries.ring_slots.shape[1])
    part = min(num_queries, max(_QUERY_COLUMNS // padded, 1))
    part = max(part, -(-_LEAST_COLUMNS // padded))
    return {
        "GROUP": group,
        "GROUP_PADDED": padded,
        "QUERIES": part,
        "QUERY_PARTS": triton.cdiv(num_queries, part),
        "TILE": tile,
        "TILES": triton.cdiv(chunk, tile),
        "TILES_PADDED": triton.next_power_of_2(triton.cdiv(chunk, tile)),
        "num_warps": 4,
        "num_stages": 1,
        "maxnreg": 168,
    }


def _notes_len(config: dict[str, int]) -> int:
    """float32 numbers of a program, see `chunk_kernels`."""
    columns = config["GROUP_PADDED"] * config["QUERIES"] * config["QUERY_PARTS"]
    return 4 * config["TILE"] * config["TILES_PADDED"] + 16 + 2 * columns


def _check_tail(kv_blocks: Tensor, slots: Tensor, positions: Tensor) -> None:
    assert kv_blocks.is_contiguous(), "pool and slots must be contiguous"
    assert slots.is_contiguous(), "pool and slots must be contiguous"
    assert positions.is_contiguous(), f"positions of strides {positions.stride()}"
    assert kv_blocks.dim() == 5, f"pool of shape {kv_blocks.shape}"
    assert kv_blocks.shape[1] == 2, f"pool of shape {kv_blocks.shape}"
    assert slots.dtype == torch.int64, f"slots in {slots.dtype}"
    assert positions.dtype == torch.int32, f"positions in {positions.dtype}"
    wanted = (slots.shape[0], kv_blocks.shape[3], slots.shape[1])
    assert tuple(positions.shape) == wanted, f"positions {positions.shape}, expected {wanted}"


def _check_chunks(
    kv_blocks: Tensor,
    slots: Tensor,
    positions: Tensor,
    queries: TailQueries,
    chunk: int,
    threshold: float,
) -> None:
    _check_tail(kv_blocks, slots, positions)
    _query_tensors(queries, kv_blocks, slots)
    assert chunk >= 1, f"chunk {chunk} must hold a slot"
    assert threshold >= 0, f"threshold {threshold} would call the zeroed diagonal similar"
    num_lines = kv_blocks.numel() // kv_blocks.shape[4]
    assert num_lines < 2**31, f"{num_lines} keys and values do not fit 32-bit numbers"
    num_q_heads = queries.ring_lse.numel()
    assert num_q_heads < 2**31, f"{num_q_heads} heads' queries do not fit 32-bit numbers"


def _query_tensors(queries: TailQueries, kv_blocks: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    ring, ring_lse, ring_slots, at = queries
    assert ring.dtype == kv_blocks.dtype, f"queries {ring.dtype}, keys {kv_blocks.dtype}"
    assert ring_lse.dtype == torch.float32, f"log-sum-exp in {ring_lse.dtype}"
    assert all(part.is_contiguous() for part in queries), "query tensors must be contiguous"
    assert ring_slots.dtype == at.dtype == torch.int64, f"{ring_slots.dtype}, {at.dtype}"
    assert len(ring_slots) == len(slots), f"{len(ring_slots)} query rows for {len(slots)} tails"
    return ring, ring_lse, ring_slots, at


def _sizes(kv_blocks: Tensor) -> dict[str, int]:
    _, _, block_size, num_kv_heads, head_dim = kv_blocks.shape
    padded = max(16, triton.next_power_of_2(head_dim))
    return {"BLOCK_SIZE": block_size, "HEADS": num_kv_heads, "DIM": head_dim, "DIM_PADDED": padded}


def _query_sizes(queries: TailQueries, num_kv_heads: int) -> dict[str, int]:
    num_queries = max(16, triton.next_power_of_2(queries.ring_slots.shape[1]))
    return {"GROUP": queries.ring.shape[1] // num_kv_heads, "QUERIES": num_queries}


@triton.jit
def _combine_kernel(
    mass,
    similarity,
    history,
    lens,
    in_order,
    keep,
    stored,
    max_tail,
    decay,
    inverse_temperature,
    mass_weight,
    HEADS: tl.constexpr,
    REACH: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """One row and head: the softmax's normaliser in a first pass over the tail, then the scores."""
    program = tl.program_id(0)
    row = program // HEADS
    base = program.to(tl.int64) * max_tail
    tail_len = tl.load(lens + row).to(tl.int32)
    pooled_len = tail_len * tl.load(in_order + row)  # no neighbour counts where there is no order
    highest = tl.full((SLOTS,), -float("inf"), tl.float32)
    for first in range(0, tail_len, SLOTS):
        index = first + tl.arange(0, SLOTS)
        highest = tl.maximum(
            highest,
            tl.load(similarity + base + index, mask=index < tail_len, other=-float("inf")),
        )
    peak = tl.max(highest, axis=0)
    weights = tl.zeros((SLOTS,), tl.float32)
    for first in range(0, tail_len, SLOTS):
        index = first + tl.arange(0, SLOTS)
        near = tl.load(similarity + base + index, mask=index < tail_len, other=-float("inf"))
        weights += tl.exp((near - peak) * inverse_temperature)
    normaliser = tl.sum(weights, axis=0)
    for first in range(0, max_tail, SLOTS):
        index = first + tl.arange(0, SLOTS)
        real = index < tail_len
        own = tl.load(mass + base + index, mask=real, other=0.0)
        own = tl.maximum(own, decay * tl.load(history + base + index, mask=real, other=0.0))
        pooled = own
        for step in tl.static_range(-REACH, REACH + 1):
            near = index + step
            there = (near >= 0) & (near < pooled_len)
            other = tl.load(mass + base + near, mask=there, other=0.0)
            past = tl.load(history + base + near, mask=there, other=0.0)
            other = tl.maximum(other, decay * past)
            pooled = tl.maximum(pooled, tl.where(there, other, -float("inf")))
        likeness = tl.load(similarity + base + index, mask=real, other=0.0)
        share = tl.exp((likeness - peak) * inverse_temperature) / normaliser
        score = mass_weight * pooled - (1.0 - mass_weight) * share
        tl.store(keep + base + index, tl.where(real, score, 0.0), mask=index < max_tail)
        tl.store(stored + base + index, own, mask=index < max_tail)
