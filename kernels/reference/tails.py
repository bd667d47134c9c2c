"""Tails laid out for the kernels: a line of numbers per request becomes rows per (layer, request).

Knows nothing of scores or of why a tail is compacted.
"""

import torch
from torch import Tensor

from zipage_lang.kernels.backend import TailRequests, TailRows

NUM_FACTS = 8


def expand_tails(
    requests: TailRequests,
    position_blocks: Tensor,
    first_layer: int,
    num_layers: int,
    entries_per_layer: int,
) -> TailRows:
    """The rows of some layers, by layer and then by request.

    Positions are those stored for slots compacted before; newer slots lie in order and end at
    logical_len - 1. The newest `num_stored` queries of a request lie in its ring at position modulo
    window.

    position_blocks: int32 [all layers, num_blocks, block_size, num_kv_heads].
    entries_per_layer: query ring entries of one layer.
    """
    facts, tables = requests.lines.split((NUM_FACTS, requests.lines.shape[1] - NUM_FACTS), dim=1)
    offsets, lens, num_keep, stateful_lens, logical_lens, seeds, query_slots, num_stored = (
        facts.unbind(1)
    )
    _, num_blocks, block_size, _ = position_blocks.shape
    layers = torch.arange(first_layer, first_layer + num_layers, device=tables.device)
    slots = _slots(tables, offsets, lens, requests.max_tail, block_size)
    slots = _in_layers(slots, layers, num_blocks * block_size)
    at = _query_positions(logical_lens, num_stored, requests.num_queries)
    rings = torch.where(at < 0, -1, query_slots[:, None] * requests.window + at % requests.window)
    lens, num_keep, stateful_lens, logical_lens, seeds = (
        fact.repeat(num_layers) for fact in (lens, num_keep, stateful_lens, logical_lens, seeds)
    )  # each [num_rows]
    return TailRows(
        slots=slots,
        positions=_positions(position_blocks, slots, lens, stateful_lens, logical_lens),
        lens=lens,
        num_keep=num_keep,
        stateful_lens=stateful_lens,
        logical_lens=logical_lens,
        seeds=seeds,
        layers=layers[:, None].expand(-1, len(tables)).flatten(),
        ring_slots=_in_layers(rings, layers, entries_per_layer),
        query_positions=at.repeat(num_layers, 1),
    )


def gather_state(state_blocks: Tensor, slots: Tensor) -> Tensor:
    """Slot state [num_blocks, block_size, num_kv_heads] -> [num_rows, num_kv_heads, max_tail].

    slots: int64 [num_rows, max_tail]; padding (-1) reads slot 0, so mask what comes of it.
    """
    flat = state_blocks.view(-1, state_blocks.shape[-1])
    found = flat.index_select(0, slots.clamp(min=0).flatten())
    return found.view(*slots.shape, -1).transpose(1, 2)


def stored_history(score_blocks: Tensor, slots: Tensor, stateful_lens: Tensor) -> Tensor:
    """Global score F of the slots, float32 [num_rows, num_kv_heads, max_tail]; 0 where there is
    none, that is past the first `stateful_lens` slots.
    """
    index = torch.arange(slots.shape[1], device=slots.device)
    stateful = index < stateful_lens[:, None]  # [num_rows, max_tail]
    return gather_state(score_blocks, slots).masked_fill(~stateful[:, None], 0.0)


def _slots(tables: Tensor, offsets: Tensor, lens: Tensor, max_tail: int, block_size: int) -> Tensor:
    """int64 [num_requests, max_tail], slots within one layer, padding -1."""
    index = torch.arange(max_tail, device=tables.device)
    in_tail = index < lens[:, None]  # [num_requests, max_tail]
    resident = torch.where(in_tail, index + offsets[:, None], 0)
    slots = tables.gather(1, resident // block_size) * block_size + resident % block_size
    return torch.where(in_tail, slots, -1)


def _query_positions(logical_lens: Tensor, num_stored: Tensor, num_queries: int) -> Tensor:
    """int64 [num_requests, num_queries], oldest first, padding -1."""
    index = torch.arange(num_queries, device=logical_lens.device)
    at = (logical_lens - num_stored)[:, None] + index  # [num_requests, num_queries]
    return torch.where(index < num_stored[:, None], at, -1)


def _positions(
    position_blocks: Tensor,
    slots: Tensor,
    lens: Tensor,
    stateful_lens: Tensor,
    logical_lens: Tensor,
) -> Tensor:
    index = torch.arange(slots.shape[1], device=slots.device)
    in_order = (index + (logical_lens - lens)[:, None]).int()  # [num_rows, max_tail]
    stateful = (index < stateful_lens[:, None])[:, None]  # [num_rows, 1, max_tail]
    stored = gather_state(position_blocks.flatten(0, 1), slots)
    return torch.where(stateful, stored, in_order[:, None]).contiguous()


def _in_layers(index: Tensor, layers: Tensor, num_per_layer: int) -> Tensor:
    """Indices within one layer -> the same in each layer, [num_layers * num_requests, ...]."""
    shifted = index + (layers * num_per_layer)[:, None, None]  # [num_layers, num_requests, length]
    return shifted.masked_fill(index < 0, -1).flatten(0, 1)
