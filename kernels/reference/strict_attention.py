"""Paged attention whose every token has the same bits in any step, in plain torch.

A token's result depends on its query and on the keys and values of its resident slots in order:
not on the step's other sequences, on how the prompt was cut into chunks, on block ids, or on
whether it is computed as a decode or in a prefill. Slots are worked on in tiles of fixed length;
each tile's products run in shapes that were found to give the same bits (`same_bits.py`), the rest
is exact per element (`exact.py`), and tiles are added as neighbours, pairs of pairs, and so on.
A tile behind a token's last slot adds zeros. Knows nothing of requests or how blocks were filled.
"""

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from zipage_lang.kernels.backend import AttentionBatch
from zipage_lang.kernels.reference import exact
from zipage_lang.kernels.reference.same_bits import (
    Product,
    agreeing_sizes,
    cancelling,
    in_sizes,
)

TILE = 64  # slots per product
QUERY_ROWS = (1, 2, 4, 8, 16, 32, 64)  # of one product: query tokens times query heads per KV head
NUM_PROBES = 4  # rows by which shapes are told apart, of TILE or head_dim elements each
ITEM_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)  # products of one batch
MAX_LINES = 2048  # rows of scores and of keys, over all tiles, worked on at a time: fit a cache


@dataclasses.dataclass(frozen=True, slots=True)
class QueryGroup:
    """Runs of query tokens of one sequence each, worked on together, padded to one shape."""

    tokens: Tensor  # int64 [num_runs, run_len], flat query tokens; a short run repeats its last
    rows: Tensor  # int64 [num_runs, kv_len], slots as rows of the layer's pool: keys
    is_hidden: Tensor  # bool [num_runs, 1, run_len, 1, kv_len], slots behind a token's last


@dataclasses.dataclass(frozen=True, slots=True)
class StrictPlan:
    """Index and mask tensors of one step, shared by all layers."""

    groups: tuple[QueryGroup, ...]
    num_kv_heads: int
    block_size: int


class StrictAttention:
    """Plans and runs; holds which shapes of product agree, tried when first needed."""

    def __init__(self) -> None:
        self._shapes: dict[int, _Shapes] = {}  # by head_dim

    def plan_attention(
        self,
        batch: AttentionBatch,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
    ) -> StrictPlan:
        """As the plain twin's: host metadata into what `attention` needs, once per step."""
        row_counts = self._shapes_for(head_dim).row_counts
        group_size = num_q_heads // num_kv_heads
        assert group_size <= row_counts[-1], f"{group_size} query heads share a KV head"
        runs = _Runs.of(batch, row_counts[-1] // group_size)
        groups = tuple(
            _plan_group(runs.part(members), block_size) for members in runs.groups(group_size)
        )
        return StrictPlan(groups, num_kv_heads, block_size)

    def attention(
        self,
        q: Tensor,
        layer_kv: Tensor,
        plan: StrictPlan,
        scale: float,
        need_lse: bool,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As the plain twin's: out [num_tokens, num_q_heads, head_dim] of q's dtype, and float32
        lse [num_tokens, num_q_heads], base 2, when asked."""
        out = torch.empty_like(q)
        lse = None
        if need_lse:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32) if lse_out is None else lse_out
        for group in plan.groups:
            tokens = group.tokens.flatten()
            found, log_sum = self._attend(q, layer_kv, plan, group, scale)
            out[tokens] = found.to(q.dtype)
            if lse is not None:
                lse[tokens] = log_sum
        return out, lse

    def _attend(
        self, q: Tensor, layer_kv: Tensor, plan: StrictPlan, group: QueryGroup, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Outputs float32 [num_runs * run_len, num_q_heads, head_dim] and log-sum-exps, base 2."""
        num_heads, head_dim = plan.num_kv_heads, q.shape[2]
        num_runs, run_len = group.tokens.shape
        shapes = self._shapes_for(head_dim)
        queries = q.index_select(0, group.tokens.flatten()).float().mul_(scale * exact.LOG2_E)
        queries = queries.view(num_runs, run_len, num_heads, -1, head_dim).transpose(1, 2)
        group_size = queries.shape[3]
        keys, values = _gathered(layer_kv, group.rows, plan.block_size)
        scores = shapes.scores(queries.flatten(2, 3), keys)  # [runs, heads, run_len * group, kv]
        scores = scores.unflatten(2, (run_len, group_size)).masked_fill_(group.is_hidden, -math.inf)
        best = scores.amax(-1, keepdim=True)  # [num_runs, num_heads, run_len, group_size, 1]
        weights = exact.exp2(scores.sub_(best)).flatten(2, 3)  # [.., run_len * group_size, kv_len]
        tiles = weights.unflatten(-1, (-1, TILE))
        total = exact.sum_parts(exact.sum_last(tiles), -2)  # [.., run_len * group_size, 1]
        out = shapes.weighted(weights, values).div_(total)  # [.., run_len * group_size, head_dim]
        log_sum = exact.log2(total).add_(best.flatten(2, 3))
        return (
            _by_token(out, run_len).reshape(-1, q.shape[1], head_dim),
            _by_token(log_sum, run_len).reshape(-1, q.shape[1]),
        )

    def _shapes_for(self, head_dim: int) -> "_Shapes":
        if head_dim not in self._shapes:
            self._shapes[head_dim] = _Shapes(head_dim)
        return self._shapes[head_dim]


class _Shapes:
    """The two products of attention over tiles, in shapes that agree for one head size."""

    def __init__(self, head_dim: int) -> None:
        queries, keys = cancelling(torch.empty(NUM_PROBES, head_dim), torch.empty(head_dim, TILE))
        weights, values = cancelling(torch.empty(NUM_PROBES, TILE), torch.empty(TILE, head_dim))
        keys = keys.T.contiguous()
        both = _agreeing_rows(_times_keys, queries, keys) & _agreeing_rows(_times, weights, values)
        assert both, f"no number of query rows suits both products of head size {head_dim}"
        self.row_counts = tuple(sorted(both))
        self._counts = {}
        for count in self.row_counts:
            self._counts[count] = (
                _agreeing_items(_times_keys, queries[:1].expand(count, -1), keys),
                _agreeing_items(_times, weights[:1].expand(count, -1), values),
            )

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """queries [num_runs, num_heads, num_rows, head_dim] and keys [num_runs, num_heads,
        num_tiles, TILE, head_dim] -> [num_runs, num_heads, num_rows, num_tiles * TILE]."""
        num_rows, num_tiles = queries.shape[2], keys.shape[2]
        padded = self._padded(queries)
        items = padded[:, :, None].expand(-1, -1, num_tiles, -1, -1)
        sizes = self._counts[padded.shape[2]][0]
        found = in_sizes(_times_keys, [items.flatten(0, 2), keys.flatten(0, 2)], sizes)
        found = found.view(*keys.shape[:3], -1, TILE)[:, :, :, :num_rows]
        return found.transpose(2, 3).flatten(3)

    def weighted(self, weights: Tensor, values: Tensor) -> Tensor:
        """weights [num_runs, num_heads, num_rows, num_tiles * TILE] and values as keys ->
        their products, added over the tiles, [num_runs, num_heads, num_rows, head_dim]."""
        num_rows = weights.shape[2]
        padded = self._padded(weights)
        items = padded.unflatten(3, (-1, TILE)).transpose(2, 3)
        sizes = self._counts[padded.shape[2]][1]
        found = in_sizes(_times, [items.flatten(0, 2), values.flatten(0, 2)], sizes)
        found = found.view(*values.shape[:3], -1, values.shape[-1])
        return exact.sum_parts(found, 2)[:, :, :num_rows]

    def _padded(self, rows: Tensor) -> Tensor:
        num_rows = rows.shape[2]
        wanted = next(count for count in self.row_counts if count >= num_rows)
        return torch.nn.functional.pad(rows, (0, 0, 0, wanted - num_rows))


@dataclasses.dataclass(frozen=True, slots=True)
class _Runs:
    """Query tokens cut into runs of one sequence; one entry or row each."""

    starts: Tensor  # int64 [num_runs], first flat query token
    lens: Tensor  # int64 [num_runs]
    kv_lens: Tensor  # int64 [num_runs], slots of the last token
    tables: Tensor  # int64 [num_runs, max_blocks]

    @classmethod
    def of(cls, batch: AttentionBatch, run_len: int) -> "_Runs":
        starts, kv_lens = batch.q_starts.long(), batch.kv_lens.long()
        q_lens = starts.diff()  # [num_seqs]
        num_runs = -(-q_lens // run_len)  # [num_seqs]
        owner = torch.arange(len(q_lens)).repeat_interleave(num_runs)  # [num_runs]
        first_run = num_runs.cumsum(0) - num_runs  # [num_seqs]
        offset = (torch.arange(len(owner)) - first_run[owner]) * run_len  # [num_runs]
        lens = (q_lens[owner] - offset).clamp(max=run_len)
        behind = q_lens[owner] - offset - lens  # tokens of the sequence that follow the run
        return cls(
            starts[:-1][owner] + offset,
            lens,
            kv_lens[owner] - behind,
            batch.block_tables.long()[owner],
        )

    def part(self, members: Tensor) -> "_Runs":
        return _Runs(
            self.starts[members], self.lens[members], self.kv_lens[members], self.tables[members]
        )

    def groups(self, group_size: int) -> Iterator[Tensor]:
        """Runs of like length over like numbers of tiles, as many as are worked on at a time."""
        num_tiles = (-(-self.kv_lens // TILE)).tolist()
        lens = self.lens.tolist()
        group: list[int] = []
        for index in sorted(range(len(lens)), key=lambda i: (lens[i] > 1, num_tiles[i])):
            num_lines = num_tiles[index] * (TILE + lens[index] * group_size)
            is_other_kind = group and (lens[index] > 1) != (lens[group[0]] > 1)
            if group and (is_other_kind or (len(group) + 1) * num_lines > MAX_LINES):
                yield torch.tensor(group)
                group = []
            group.append(index)
        yield torch.tensor(group)


def _plan_group(runs: _Runs, block_size: int) -> QueryGroup:
    num_tiles = -(-int(runs.kv_lens.max()) // TILE)
    slot, token = torch.arange(num_tiles * TILE), torch.arange(int(runs.lens.max()))
    block = (slot // block_size).clamp(max=runs.tables.shape[1] - 1)
    rows = runs.tables[:, block] * (2 * block_size) + slot % block_size
    rows = torch.where(slot < runs.kv_lens[:, None], rows, rows[:, :1])  # [num_runs, kv_len]
    place = torch.minimum(token, runs.lens[:, None] - 1)  # [num_runs, run_len]
    last_slot = runs.kv_lens[:, None] - runs.lens[:, None] + place  # [num_runs, run_len]
    return QueryGroup(
        tokens=runs.starts[:, None] + place,
        rows=rows,
        is_hidden=(slot > last_slot[:, :, None])[:, None, :, None],
    )


def _gathered(layer_kv: Tensor, rows: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Keys and values float32 [num_runs, num_heads, num_tiles, TILE, head_dim], contiguous."""
    num_heads, head_dim = layer_kv.shape[3:]
    pool = layer_kv.view(-1, num_heads * head_dim)
    flat = rows.flatten()
    shape = (len(rows), -1, TILE, num_heads, head_dim)
    keys, values = (
        pool.index_select(0, index).float().view(shape).movedim(3, 1).contiguous()
        for index in (flat, flat + block_size)
    )
    return keys, values


def _by_token(rows: Tensor, run_len: int) -> Tensor:
    """[num_runs, num_heads, run_len * group_size, n] -> [num_runs, run_len, heads, group, n]."""
    return rows.unflatten(2, (run_len, -1)).transpose(1, 2)


def _times_keys(queries: Tensor, keys: Tensor) -> Tensor:
    return torch.bmm(queries, keys.transpose(1, 2))


def _times(weights: Tensor, values: Tensor) -> Tensor:
    return torch.bmm(weights, values)


def _agreeing_rows(product: Product, probes: Tensor, other: Tensor) -> set[int]:
    def of_rows(rows: Tensor) -> Tensor:
        return product(rows[None], other[None])[0]

    return set(agreeing_sizes(of_rows, [probes], QUERY_ROWS))


def _agreeing_items(product: Product, first: Tensor, second: Tensor) -> tuple[int, ...]:
    return agreeing_sizes(product, [first[None], second[None]], ITEM_COUNTS, bases=(1,))
