"""Compaction by a blended score in one call: the Zipage score, protection, top K, hole filling.

Knows nothing of policies. It is the composition of its parts, to the bit.
"""

from torch import Tensor

from zipage_lang.kernels.backend import ScoreBlend, TailRows
from zipage_lang.kernels.reference.compact import fill_holes
from zipage_lang.kernels.reference.scores import combine_scores
from zipage_lang.kernels.reference.select import protect_slots, select_top_k
from zipage_lang.kernels.reference.tails import stored_history


def compact_blend(
    kv_blocks: Tensor,
    score_blocks: Tensor,
    position_blocks: Tensor,
    rows: TailRows,
    blend: ScoreBlend,
    num_recent: int,
    num_sinks: int,
) -> None:
    """Keep the best `rows.num_keep` slots of every row and head, and move them to the front.

    A row is pooled where it was never compacted before: there slot order is token order.

    kv_blocks: [num_blocks, 2, block_size, num_kv_heads, head_dim] of all layers, written.
    score_blocks: float32 [num_blocks, block_size, num_kv_heads], read as history, then written.
    position_blocks: int32, same shape, written.
    num_recent, num_sinks: see `protect_slots`.
    """
    history = stored_history(score_blocks, rows.slots, rows.stateful_lens)
    scores, stored = combine_scores(
        blend.mass,
        blend.similarity,
        history,
        rows.lens,
        rows.stateful_lens == 0,
        decay=blend.decay,
        pool_kernel=blend.pool_kernel,
        temperature=blend.temperature,
        mass_weight=blend.mass_weight,
    )
    tails = (rows.positions, rows.lens)
    scores = protect_slots(scores, *tails, rows.logical_lens, num_recent, num_sinks)
    fill_holes(
        kv_blocks,
        score_blocks,
        position_blocks,
        rows.slots,
        select_top_k(scores, *tails, rows.num_keep),
        rows.num_keep,
        rows.positions,
        stored,
    )
