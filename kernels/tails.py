"""Triton layout of tails: slots, positions, rings and facts of all rows in one launch.

Knows nothing of scores. What it means stands at its twin in `kernels/reference/tails.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zipage_lang.kernels.backend import TailRequests, TailRows
from zipage_lang.kernels.reference.tails import NUM_FACTS

_SLOTS = 256
_NUM_ROW_FACTS = 6


def expand_tails(
    requests: TailRequests,
    position_blocks: Tensor,
    first_layer: int,
    num_layers: int,
    entries_per_layer: int,
) -> TailRows:
    """See the twin. A program per row and 256 slots; reads and writes 4 bytes a slot and head, and
    writes 8 a slot.
    """
    lines = requests.lines
    num_rows, max_tail = num_layers * len(lines), requests.max_tail
    _, num_blocks, block_size, num_kv_heads = position_blocks.shape
    assert position_blocks.is_contiguous(), f"positions of strides {position_blocks.stride()}"
    assert position_blocks.dtype == torch.int32, f"positions in {position_blocks.dtype}"
    assert lines.is_contiguous(), f"lines of strides {lines.stride()}"
    assert lines.dtype == torch.int64, f"lines in {lines.dtype}"
    slots = lines.new_empty((num_rows, max_tail))
    positions = torch.empty(
        (num_rows, num_kv_heads, max_tail), dtype=torch.int32, device=lines.device
    )
    # Every fact begins at 16 bytes, so that no kernel is compiled again for another alignment.
    facts = lines.new_empty((_NUM_ROW_FACTS, num_rows + num_rows % 2))[:, :num_rows]
    queries = lines.new_empty((2, num_rows, requests.num_queries))
    tiles = triton.cdiv(max_tail, _SLOTS)
    _expand_kernel[(num_rows * tiles,)](
        lines,
        position_blocks,
        slots,
        positions,
        facts,
        queries,
        lines.shape[1],
        max_tail,
        tiles,
        len(lines),
        num_rows,
        facts.stride(0),
        first_layer,
        num_blocks * block_size,
        entries_per_layer,
        requests.window,
        requests.num_queries,
        FACTS=NUM_FACTS,
        BLOCK_SIZE=block_size,
        HEADS=num_kv_heads,
        HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
        QUERIES=triton.next_power_of_2(max(requests.num_queries, 1)),
        SLOTS=_SLOTS,
        num_warps=4,
    )
    ring_slots, query_positions = queries.unbind(0)
    lens, num_keep, stateful_lens, logical_lens, seeds, layers = facts.unbind(0)
    return TailRows(
        slots=slots,
        positions=positions,
        lens=lens,
        num_keep=num_keep,
        stateful_lens=stateful_lens,
        logical_lens=logical_lens,
        seeds=seeds,
        layers=layers,
        ring_slots=ring_slots,
        query_positions=query_positions,
    )


@triton.jit(
    do_not_specialize=[
        "width",
        "max_tail",
        "tiles",
        "num_requests",
        "num_rows",
        "fact_stride",
        "first_layer",
        "window",
        "num_queries",
        "entries_per_layer",
    ]
)
def _expand_kernel(
    lines,
    position_blocks,
    slots,
    positions,
    facts,
    queries,
    width,
    max_tail,
    tiles,
    num_requests,
    num_rows,
    fact_stride,
    first_layer,
    slots_per_layer,
    entries_per_layer,
    window,
    num_queries,
    FACTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    layer = first_layer + row // num_requests
    line = lines + row % num_requests * width
    offset, tail_len, num_keep = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    stateful_len, logical_len = tl.load(line + 3), tl.load(line + 4)
    seed, query_slot, num_stored = tl.load(line + 5), tl.load(line + 6), tl.load(line + 7)
    if tile == 0:
        tl.store(facts + row, tail_len)
        tl.store(facts + fact_stride + row, num_keep)
        tl.store(facts + 2 * fact_stride + row, stateful_len)
        tl.store(facts + 3 * fact_stride + row, logical_len)
        tl.store(facts + 4 * fact_stride + row, seed)
        tl.store(facts + 5 * fact_stride + row, layer)
        query = tl.arange(0, QUERIES)
        at = tl.where(query < num_stored, logical_len - num_stored + query, -1)
        ring = layer * entries_per_layer + query_slot * window + at % window
        out = queries + row * num_queries + query
        tl.store(out, tl.where(at < 0, -1, ring), mask=query < num_queries)
        tl.store(out + num_rows * num_queries, at, mask=query < num_queries)
    index = tile * SLOTS + tl.arange(0, SLOTS)
    inside, real = index < max_tail, index < tail_len
    resident = offset + index
    block = tl.load(line + FACTS + resident // BLOCK_SIZE, mask=real, other=0)
    slot = layer * slots_per_layer + block * BLOCK_SIZE + resident % BLOCK_SIZE
    tl.store(slots + row * max_tail + index, tl.where(real, slot, -1), mask=inside)
    head = tl.arange(0, HEADS_PADDED)
    has_state = (index < stateful_len)[:, None] & (head < HEADS)[None, :]
    stored = tl.load(
        position_blocks + slot[:, None] * HEADS + head[None, :], mask=has_state, other=0
    )
    in_order = (index + (logical_len - tail_len)).to(tl.int32)
    position = tl.where(has_state, stored, in_order[:, None])
    out = positions + (row * HEADS + head)[None, :] * max_tail + index[:, None]
    tl.store(out, position, mask=inside[:, None] & (head < HEADS)[None, :])
