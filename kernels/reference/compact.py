"""Hole filling: survivors behind the kept length move into the holes in front of it.

Knows nothing of scores or of who owns which block.

Attention does not care about slot order, so a tail of K + E slots of which K survive needs no
repacking: exactly as many survivors lie behind slot K (movers) as slots before it were dropped.
Those are the holes.
With K = 4, E = 2 and survivors 0, 2, 3, 5:   [0 . 2 3 | . 5]  ->  [0 5 2 3].
At most E slots move per head, never K.
"""

import torch
from torch import Tensor


def fill_holes(
    kv_blocks: Tensor,
    score_blocks: Tensor,
    position_blocks: Tensor,
    slots: Tensor,
    keep: Tensor,
    num_keep: Tensor,
    positions: Tensor,
    scores: Tensor | None,
) -> None:
    """Compact every row's tail in place; writes only into its first `num_keep` tail slots.

    Movers and holes of a row and head are matched in ascending order. K and V of movers are copied
    from the pool. Slot state comes from the arguments, not from the pool, since slots behind
    `num_keep` may be shared and read-only: it is written for all kept slots.

    kv_blocks: [num_blocks, 2, block_size, num_kv_heads, head_dim], written.
    score_blocks: float32 [num_blocks, block_size, num_kv_heads], written unless `scores` is None.
    position_blocks: int32, same shape, written.
    slots: int64 [num_rows, max_tail], physical slot (block * block_size + offset), padding -1.
        The first num_keep of a row must occur in no other row.
    keep: bool [num_rows, num_kv_heads, max_tail], exactly num_keep true per row and head.
    num_keep: int64 [num_rows].
    positions: int32 [num_rows, num_kv_heads, max_tail]. scores: float32, same shape, or None.
    """
    front = torch.arange(slots.shape[1], device=slots.device) < num_keep[:, None]
    movers = (keep & ~front[:, None]).nonzero()  # [num_moved, 3]: row, head, tail slot
    holes = (~keep & front[:, None]).nonzero()  # sorted alike, so the k-th mover fits the k-th hole
    assert len(movers) == len(holes), f"{len(movers)} movers for {len(holes)} holes"
    # All is gathered before anything is written, so that a refusal of memory leaves no half move.
    moved = _gathered(kv_blocks, slots, movers)
    states = [(position_blocks, _kept(positions, front, movers, holes))]
    if scores is not None:
        states.append((score_blocks, _kept(scores, front, movers, holes)))
    block_size, num_kv_heads = kv_blocks.shape[2:4]
    dst = slots[holes[:, 0], holes[:, 2]]  # [num_moved]
    kv_blocks[dst // block_size, :, dst % block_size, holes[:, 1]] = moved
    for state_blocks, kept in states:
        state_blocks.view(-1, num_kv_heads).index_copy_(0, slots[front], kept)


def _gathered(kv_blocks: Tensor, slots: Tensor, movers: Tensor) -> Tensor:
    """Keys and values of the movers, [num_moved, 2, head_dim]."""
    block_size = kv_blocks.shape[2]
    src = slots[movers[:, 0], movers[:, 2]]  # [num_moved]
    return kv_blocks[src // block_size, :, src % block_size, movers[:, 1]]


def _kept(state: Tensor, front: Tensor, movers: Tensor, holes: Tensor) -> Tensor:
    """The state as it lies after the move, of kept slots only: [num_kept, num_kv_heads]."""
    moved = state.clone()
    moved[holes.unbind(1)] = state[movers.unbind(1)]
    return moved.transpose(1, 2)[front]
