"""Scores of tail slots: attention mass, key redundancy, and how the two are combined.

Knows nothing of requests, policies or which slots are kept.

A *row* is one request in one layer. Every slot is named by its physical number
`block * block_size + offset` in a pool that may hold the blocks of all layers one after the other,
so that many layers are scored in one call. Only slots named in `slots` are ever read; what lies
in the others (NaN, say) does not matter.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from zipage_lang.kernels.backend import TailQueries

_LOG2_E = math.log2(math.e)
_FLASH_COLUMNS = 256  # keys compared with all others at a time by flash_similarity


def gather_keys(kv_blocks: Tensor, slots: Tensor) -> Tensor:
    """Keys of the named slots.

    kv_blocks: [num_blocks, 2, block_size, num_kv_heads, head_dim], keys at index 0 of axis 1.
    slots: int64 [num_rows, max_tail], padding -1.
    Returns float32 [num_rows, num_kv_heads, max_tail, head_dim]; padding reads as zero.
    """
    return _gather_slots(kv_blocks, slots, 0)


def gather_values(kv_blocks: Tensor, slots: Tensor) -> Tensor:
    """Values of the named slots; shapes as in `gather_keys`."""
    return _gather_slots(kv_blocks, slots, 1)


def attention_mass(
    kv_blocks: Tensor, slots: Tensor, positions: Tensor, queries: TailQueries, scale: float
) -> Tensor:
    """How much attention the newest queries pay to each slot (S of the paper, before history).

    The share that query q gives key k is exp2(q.k * scale * log2(e) - lse), with the log-sum-exp of
    q's own decode step: a true softmax share over all that q attended to, protected prefix
    included. Then the maximum over the query heads of a KV head, then the mean over the queries.
    A key newer than the query gets no share. Zipage (arXiv 2603.08743), local attention score.

    kv_blocks, slots: as in `gather_keys`.
    positions: int32 [num_rows, num_kv_heads, max_tail], logical positions.
    queries: ring entries of each row, see `TailQueries`.
    Returns float32 [num_rows, num_kv_heads, max_tail]; padding gets 0.
    """
    return _mass_of_keys(gather_keys(kv_blocks, slots), slots, positions, queries, scale)


def squared_mass(
    kv_blocks: Tensor, slots: Tensor, positions: Tensor, queries: TailQueries, scale: float
) -> Tensor:
    """Squared attention shares, summed over queries and over the query heads of a KV head.

    Shares, shapes and padding as in `attention_mass`. KV-Compress (arXiv 2410.00161), section 3.
    """
    keys = gather_keys(kv_blocks, slots)
    share, seen = _shares_of_keys(keys, slots, positions, queries, scale)
    return share.square_().sum(dim=3).masked_fill(~seen, 0.0).sum(dim=2)


def lightning_similarity(
    kv_blocks: Tensor, slots: Tensor, positions: Tensor, chunk: int, threshold: float
) -> Tensor:
    """Mean cosine similarity of each key to the other keys of its own chunk of the tail.

    The tail is cut into chunks of `chunk` slots in slot order (the paper's chunk is its 256-slot
    block). Per chunk and head a matrix of cosines is formed with a zero diagonal; in each column j
    the entry of the newest key that is more similar to key j than `threshold` is zeroed, so that
    of several duplicates the newest looks least redundant and survives (of exactly two, each is
    the other's newest and both look unique, as in the published code). A key's similarity is
    the sum of its row divided by the number of keys in its chunk: `chunk` itself for full chunks,
    the paper's b, and the true count in the last one, so that a short chunk is neither favoured
    nor punished and one chunk over the whole tail equals `flash_similarity`.

    kv_blocks, slots, positions: as in `attention_mass`.
    Returns float32 [num_rows, num_kv_heads, max_tail]; padding gets 0.
    """
    return _lightning_of_keys(gather_keys(kv_blocks, slots), slots, positions, chunk, threshold)


def flash_similarity(
    kv_blocks: Tensor, slots: Tensor, positions: Tensor, threshold: float
) -> Tensor:
    """Mean cosine similarity of each key to all other keys of the tail.

    As `lightning_similarity` with one chunk over the whole tail; the row sum is divided by the
    number of tail slots. Works through the columns in tiles, so memory grows with the tail's length
    only.
    """
    unit = _unit_keys(gather_keys(kv_blocks, slots))
    counts = (slots >= 0).sum(-1).clamp(min=1)  # [num_rows]
    total = torch.zeros(positions.shape, dtype=torch.float32, device=unit.device)
    for start in range(0, slots.shape[1], _FLASH_COLUMNS):
        columns = slice(start, start + _FLASH_COLUMNS)
        total += _row_sums(unit, positions, columns, threshold)
    return total / counts[:, None, None]


def mass_and_similarity(
    kv_blocks: Tensor,
    slots: Tensor,
    positions: Tensor,
    queries: TailQueries,
    scale: float,
    chunk: int,
    threshold: float,
) -> tuple[Tensor, Tensor]:
    """`attention_mass` and `lightning_similarity` together: one pass over the keys, read once."""
    keys = gather_keys(kv_blocks, slots)
    mass = _mass_of_keys(keys, slots, positions, queries, scale)
    return mass, _lightning_of_keys(keys, slots, positions, chunk, threshold)


def global_score(mass: Tensor, history: Tensor, decay: float) -> Tensor:
    """max(S, alpha * F): what a slot earned now, or earned once and has not yet lost to decay.

    mass, history: float32 [num_rows, num_kv_heads, max_tail]; slots without history have F = 0.
    """
    return torch.maximum(mass, decay * history)


def max_pool(score: Tensor, lens: Tensor, kernel: int) -> Tensor:
    """Each slot takes the highest score within kernel // 2 slots of it, in slot order.

    score: float32 [num_rows, num_kv_heads, max_tail]; lens: int64 [num_rows], real slots of each.
    Returns the same shape. Raises AssertionError for an even kernel.
    """
    assert kernel % 2 == 1, f"pooling kernel {kernel} must be odd to be centred on its slot"
    masked = score.masked_fill(~_in_tail(score, lens), -math.inf)
    return F.max_pool1d(masked, kernel, stride=1, padding=kernel // 2)


def redundancy_share(similarity: Tensor, lens: Tensor, temperature: float) -> Tensor:
    """Softmax of similarity / temperature over the tail (R of the paper): sums to 1 per head.

    similarity: float32 [num_rows, num_kv_heads, max_tail]; lens: int64 [num_rows], at least 1.
    Returns the same shape; padding gets 0.
    """
    logits = (similarity / temperature).masked_fill(~_in_tail(similarity, lens), -math.inf)
    return logits.softmax(dim=-1)


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
    """The Zipage score: lambda * pooled max(S, alpha * F) - (1 - lambda) * R.

    Published code's form (the paper's equation 4 prints S - lambda * R). Pooling happens only where
    slot order is still token order, that is before a row's first compaction.

    mass, similarity, history: float32 [num_rows, num_kv_heads, max_tail].
    lens: int64 [num_rows]. in_order: bool [num_rows], rows that are pooled.
    Returns (score to keep by, F to store), each float32 of the same shape; F is taken before
    pooling, so decay applies once per compaction.
    """
    kept_score = global_score(mass, history, decay)
    pooled = max_pool(kept_score, lens, pool_kernel)
    importance = torch.where(in_order[:, None, None], pooled, kept_score)
    redundancy = redundancy_share(similarity, lens, temperature)
    return mass_weight * importance - (1 - mass_weight) * redundancy, kept_score


def _gather_slots(kv_blocks: Tensor, slots: Tensor, part: int) -> Tensor:
    block_size, num_kv_heads, head_dim = kv_blocks.shape[2:]
    real = slots.clamp(min=0)
    lines = (real // block_size * 2 + part) * block_size + real % block_size
    flat = kv_blocks.view(-1, num_kv_heads, head_dim).index_select(0, lines.flatten())
    found = flat.view(*slots.shape, num_kv_heads, head_dim).float()
    found = found.masked_fill((slots < 0)[..., None, None], 0.0)
    return found.transpose(1, 2)  # [num_rows, num_kv_heads, max_tail, head_dim]


def _mass_of_keys(
    keys: Tensor, slots: Tensor, positions: Tensor, queries: TailQueries, scale: float
) -> Tensor:
    share, seen = _shares_of_keys(keys, slots, positions, queries, scale)
    num_queries = (queries.ring_slots >= 0).sum(-1).clamp(min=1)  # [num_rows]
    return share.amax(dim=3).masked_fill(~seen, 0.0).sum(dim=2) / num_queries[:, None, None]


def _shares_of_keys(
    keys: Tensor, slots: Tensor, positions: Tensor, queries: TailQueries, scale: float
) -> tuple[Tensor, Tensor]:
    """Each key's share of each query, float32 [num_rows, num_kv_heads, num_queries, group, tail],
    and which count: neither padding nor newer than the query, bool [.., num_queries, tail]."""
    num_rows, num_kv_heads, max_tail, _ = keys.shape
    q, lse = _read_ring(queries, num_kv_heads)
    logits = q.flatten(2, 3) @ keys.transpose(2, 3)  # [num_rows, heads, num_queries * group, tail]
    logits = logits.view(num_rows, num_kv_heads, -1, lse.shape[3], max_tail)
    share = torch.exp2(logits * (scale * _LOG2_E) - lse[..., None])
    seen = (slots >= 0)[:, None, None] & (
        positions[:, :, None] <= queries.positions[:, None, :, None]
    )
    return share, seen


def _read_ring(queries: TailQueries, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """Queries [rows, kv heads, num_queries, group, head_dim] and lse [.., num_queries, group]."""
    num_rows, num_queries = queries.ring_slots.shape
    index = queries.ring_slots.clamp(min=0).flatten()
    q = queries.ring.index_select(0, index).float()
    q = q.view(num_rows, num_queries, num_kv_heads, -1, q.shape[-1])
    lse = queries.ring_lse.index_select(0, index).view(num_rows, num_queries, num_kv_heads, -1)
    return q.transpose(1, 2), lse.transpose(1, 2)


def _lightning_of_keys(
    keys: Tensor, slots: Tensor, positions: Tensor, chunk: int, threshold: float
) -> Tensor:
    unit = _unit_keys(keys)
    means = []
    for start in range(0, slots.shape[1], chunk):
        own = slice(start, start + chunk)
        counts = (slots[:, own] >= 0).sum(-1).clamp(min=1)  # [num_rows]
        sums = _row_sums(unit[:, :, own], positions[:, :, own], slice(0, None), threshold)
        means.append(sums / counts[:, None, None])
    return torch.cat(means, dim=-1)  # [num_rows, num_kv_heads, max_tail]


def _row_sums(unit: Tensor, positions: Tensor, columns: slice, threshold: float) -> Tensor:
    """Sum over `columns` of each key's cosines, less itself and what newest duplicates drop.

    The matrix lies transposed, so that the search for the newest runs along contiguous memory.
    """
    assert threshold >= 0, f"threshold {threshold} would call the zeroed diagonal similar"
    cosine = unit[:, :, columns] @ unit.transpose(2, 3)  # [rows, heads, num_columns, num_keys]
    cosine.diagonal(offset=columns.start, dim1=2, dim2=3).zero_()
    order = positions.argsort(dim=-1)  # [num_rows, num_kv_heads, num_keys], oldest first
    age_rank = order.argsort(dim=-1).int() + 1  # 0 stands for "none is similar"
    similar_rank = torch.where(cosine > threshold, age_rank[:, :, None], 0)
    newest_rank = similar_rank.amax(dim=-1).long()  # [num_rows, num_kv_heads, num_columns]
    newest = order.gather(-1, (newest_rank - 1).clamp(min=0))[..., None]
    kept = cosine.gather(-1, newest).masked_fill(newest_rank[..., None] > 0, 0.0)
    return cosine.scatter_(-1, newest, kept).sum(dim=2)  # [num_rows, num_kv_heads, num_keys]


def _unit_keys(keys: Tensor) -> Tensor:
    return F.normalize(keys, dim=-1)  # padding stays zero, so its cosines are zero


def _in_tail(score: Tensor, lens: Tensor) -> Tensor:
    """bool [num_rows, 1, max_tail]: real slots."""
    return (torch.arange(score.shape[-1], device=score.device) < lens[:, None])[:, None]
