"""Carries out a step's compactions: copy on write, score, select, fill holes.

Knows nothing of why a request is compacted, or of what happens to the blocks it no longer needs.

Requests with the same policy are worked on together, and so are layers: the pools of all layers
are seen as one long pool in which layer l's blocks follow those of layer l - 1, and a (layer,
request) pair is one row of a batch. A pass takes as many layers as fit a bound on memory.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor

from zipage_lang.kernels.backend import Backend, TailQueries
from zipage_lang.runtime.kv_cache import KVCache
from zipage_lang.runtime.policies.policy import Policy, TailView, gather_state
from zipage_lang.runtime.step_plan import Compaction

# Rows times longest tail of one pass. More spills a CPU's caches; on a card it bounds the scratch
# (about 40 bytes a slot and KV head), and fewer would leave launches unpaid for.
_MAX_PASS_SLOTS = {"cpu": 2_048, "cuda": 393_216}


@dataclasses.dataclass(frozen=True, slots=True)
class _Tails:
    """The tails of one policy's requests in this step, still without a layer. Device tensors."""

    slots: Tensor  # int64 [num_requests, max_tail], block * block_size + offset, padding -1
    lens: Tensor  # int64 [num_requests]
    num_keep: Tensor  # int64 [num_requests]
    stateful_lens: Tensor  # int64 [num_requests]
    logical_lens: Tensor  # int64 [num_requests]
    seeds: Tensor  # int64 [num_requests]
    ring_slots: Tensor  # int64 [num_requests, num_queries], padding -1
    query_positions: Tensor  # int64 [num_requests, num_queries], padding -1


class KVCompressor:
    """Executes `Compaction` items on a KV cache.

    Survivors, their positions and their global scores end up in each tail's first `num_keep` slots
    of the new block table. Besides the copy targets nothing else is written, so blocks behind the
    kept ones may be shared.
    """

    def __init__(
        self,
        cache: KVCache,
        backend: Backend,
        policies: Mapping[str, Policy],
        max_pass_slots: int | None = None,
    ) -> None:
        """max_pass_slots: rows times longest tail of one pass; None: what suits the device.

        Raises ValueError when a policy scores with more queries than the cache's rings hold.
        """
        for policy in policies.values():
            if policy.num_queries > cache.window:
                raise ValueError(
                    f"policy {policy.name!r} scores with {policy.num_queries} queries but the "
                    f"query rings hold {cache.window}; build the cache with a larger window"
                )
        self._cache, self._backend, self._policies = cache, backend, policies
        device_type = backend.device.type
        self._max_pass_slots = max_pass_slots or _MAX_PASS_SLOTS[device_type]
        self._pins_memory = device_type == "cuda"
        # Views with all layers' blocks (and all layers' ring entries) in one leading axis.
        self._kv = cache.kv.flatten(0, 1)  # [all_blocks, 2, block_size, num_kv_heads, head_dim]
        self._score = cache.score.flatten(0, 1)  # [all_blocks, block_size, num_kv_heads]
        self._position = cache.position.flatten(0, 1)  # [all_blocks, block_size, num_kv_heads]
        self._ring = cache.queries.flatten(0, 1)  # [all_entries, num_q_heads, head_dim]
        self._ring_lse = cache.query_lse.flatten(0, 1)  # [all_entries, num_q_heads]

    def run(self, compactions: tuple[Compaction, ...]) -> None:
        """Compact every item. Items are independent: no item's target is another's source."""
        self._check(compactions)
        self._copy_blocks(compactions)
        by_policy = defaultdict(list)
        for item in compactions:
            by_policy[item.policy].append(item)
        for name, items in by_policy.items():
            for batch in _split(items, self._max_pass_slots):
                self._compact(self._policies[name], batch)

    def _check(self, compactions: tuple[Compaction, ...]) -> None:
        targets = {copy.dst for item in compactions for copy in item.block_copies}
        for item in compactions:
            _check_item(item, self._cache.block_size)
            assert item.policy in self._policies, f"policy {item.policy!r} is not loaded"
            overlap = targets.intersection(item.block_ids_before)
            assert not overlap, f"copies overwrite blocks {overlap} that row {item.row} still reads"

    def _copy_blocks(self, compactions: tuple[Compaction, ...]) -> None:
        copies = [copy for item in compactions for copy in item.block_copies]
        if copies:
            ends = [[copy.src for copy in copies], [copy.dst for copy in copies]]
            src, dst = self._to_device(ends).unbind()  # each [num_copies]
            self._backend.copy_blocks(self._cache.block_pools, src, dst)

    def _compact(self, policy: Policy, batch: list[Compaction]) -> None:
        tails = self._build_tails(policy, batch)
        num_layers = self._cache.shape.num_layers
        layers_per_pass = max(1, self._max_pass_slots // tails.slots.numel())
        for start in range(0, num_layers, layers_per_pass):
            end = min(start + layers_per_pass, num_layers)
            layers = torch.arange(start, end, device=self._backend.device)
            self._compact_layers(policy, tails, layers)

    def _compact_layers(self, policy: Policy, tails: _Tails, layers: Tensor) -> None:
        view = self._view(tails, layers, policy.num_queries > 0)
        scores = policy.score(view)
        protected = self._backend.protect_slots(
            scores.keep,
            view.positions,
            view.lens,
            view.logical_lens,
            policy.num_recent,
            policy.num_sinks,
        )
        num_keep = tails.num_keep.repeat(len(layers))  # [num_rows]
        self._backend.fill_holes(
            self._kv,
            self._score,
            self._position,
            view.slots,
            self._backend.select_top_k(protected, view.positions, view.lens, num_keep),
            num_keep,
            view.positions,
            scores.history,
        )

    def _view(self, tails: _Tails, layers: Tensor, with_queries: bool) -> TailView:
        num_layers, num_requests = len(layers), len(tails.lens)
        slots = _in_layers(tails.slots, layers, self._cache.num_blocks * self._cache.block_size)
        lens, stateful_lens, logical_lens, seeds = (
            per_request.repeat(num_layers)
            for per_request in (tails.lens, tails.stateful_lens, tails.logical_lens, tails.seeds)
        )  # each [num_rows]
        return TailView(
            backend=self._backend,
            kv_blocks=self._kv,
            score_blocks=self._score,
            slots=slots,
            positions=self._positions(slots, lens, stateful_lens, logical_lens),
            lens=lens,
            stateful_lens=stateful_lens,
            logical_lens=logical_lens,
            layers=layers[:, None].expand(-1, num_requests).flatten(),
            num_layers=self._cache.shape.num_layers,
            seeds=seeds,
            queries=self._queries(tails, layers) if with_queries else None,
        )

    def _positions(
        self, slots: Tensor, lens: Tensor, stateful_lens: Tensor, logical_lens: Tensor
    ) -> Tensor:
        """Stored for slots compacted before; newer ones lie in order and end at logical_len - 1."""
        index = torch.arange(slots.shape[1], device=slots.device)
        in_order = (index + (logical_lens - lens)[:, None]).int()  # [num_rows, max_tail]
        stateful = (index < stateful_lens[:, None])[:, None]  # [num_rows, 1, max_tail]
        stored = gather_state(self._position, slots)
        return torch.where(stateful, stored, in_order[:, None]).contiguous()

    def _queries(self, tails: _Tails, layers: Tensor) -> TailQueries:
        return TailQueries(
            ring=self._ring,
            ring_lse=self._ring_lse,
            ring_slots=_in_layers(tails.ring_slots, layers, self._cache.queries.shape[1]),
            positions=tails.query_positions.repeat(len(layers), 1),
        )

    def _build_tails(self, policy: Policy, batch: list[Compaction]) -> _Tails:
        """All that the host knows of the batch goes over in one copy, a line per request."""
        positions = [_query_positions(item, policy.num_queries) for item in batch]
        ring_slots = [
            [(item.query_slot or 0) * self._cache.window + at % self._cache.window for at in newest]
            for item, newest in zip(batch, positions, strict=True)
        ]
        parts = [_tables(batch), _padded(ring_slots), _padded(positions), _facts(batch)]
        lines = [list(chain(*of_request)) for of_request in zip(*parts, strict=True)]
        widths = [len(part[0]) for part in parts]
        tables, rings, at, facts = self._to_device(lines).split(widths, dim=1)
        protected_lens, lens, num_keep, stateful_lens, logical_lens, seeds = facts.unbind(1)
        return _Tails(
            slots=self._slots(tables, protected_lens, lens, max(item.tail_len for item in batch)),
            lens=lens,
            num_keep=num_keep,
            stateful_lens=stateful_lens,
            logical_lens=logical_lens,
            seeds=seeds,
            ring_slots=rings,
            query_positions=at,
        )

    def _slots(self, tables: Tensor, protected_lens: Tensor, lens: Tensor, max_tail: int) -> Tensor:
        """Physical slots of each tail."""
        block_size = self._cache.block_size
        index = torch.arange(max_tail, device=tables.device)
        in_tail = index < lens[:, None]  # [num_requests, max_tail]
        resident = torch.where(in_tail, index + protected_lens[:, None], 0)
        slots = tables.gather(1, resident // block_size) * block_size + resident % block_size
        return torch.where(in_tail, slots, -1)

    def _to_device(self, numbers: list[list[int]]) -> Tensor:
        """int64 [num_lines, line_len], without waiting for the device: pinned where there is one.

        The allocator of pinned memory keeps the host's copy until the device has read it.
        """
        host = torch.tensor(numbers, dtype=torch.int64, pin_memory=self._pins_memory)
        return host.to(self._backend.device, non_blocking=True)


def _tables(batch: list[Compaction]) -> list[list[int]]:
    """The block table of each item. Past the new one the old one still holds."""
    return _padded([[*it.block_ids, *it.block_ids_before[len(it.block_ids) :]] for it in batch])


def _facts(batch: list[Compaction]) -> list[list[int]]:
    """Per item: protected_len, tail_len, num_keep, stateful_len, logical_len, seed."""
    return [
        [
            item.protected_len,
            item.tail_len,
            item.num_keep,
            item.stateful_len,
            item.logical_len,
            item.seed % 2**63,
        ]
        for item in batch
    ]


def _check_item(item: Compaction, block_size: int) -> None:
    assert 1 <= item.num_keep <= item.tail_len, f"keep {item.num_keep} of {item.tail_len} slots"
    assert item.stateful_len <= item.tail_len, f"{item.stateful_len} stateful of {item.tail_len}"
    kept_len = item.protected_len + item.num_keep
    assert len(item.block_ids) * block_size >= kept_len, f"{item.block_ids} for {kept_len} slots"
    copies = {(copy.src, copy.dst) for copy in item.block_copies}
    moved = set(zip(item.block_ids_before, item.block_ids, strict=False)) - copies
    strays = [pair for pair in moved if pair[0] != pair[1]]
    assert not strays, f"row {item.row}: blocks (before, after) {strays} differ without a copy"


def _query_positions(item: Compaction, num_queries: int) -> list[int]:
    """Positions of the newest queries in the ring, oldest first."""
    num_stored = min(num_queries, item.num_queries, item.logical_len)
    if num_queries > 0:
        assert item.query_slot is not None, f"row {item.row}: {item.policy} needs a query slot"
        assert num_stored > 0, f"row {item.row}: query slot {item.query_slot} is empty"
    return list(range(item.logical_len - num_stored, item.logical_len))


def _in_layers(index: Tensor, layers: Tensor, num_per_layer: int) -> Tensor:
    """Indices within one layer -> the same in each layer, [num_layers * num_requests, ...]."""
    shifted = index + (layers * num_per_layer)[:, None, None]  # [num_layers, num_requests, length]
    return shifted.masked_fill(index < 0, -1).flatten(0, 1)


def _padded(rows: list[list[int]]) -> list[list[int]]:
    longest = max(len(row) for row in rows)
    return [row + [-1] * (longest - len(row)) for row in rows]


def _split(items: list[Compaction], max_slots: int) -> Iterator[list[Compaction]]:
    """Batches of at most `max_slots` padded slots, or one item; sorted by length to pad less."""
    batch: list[Compaction] = []
    for item in sorted(items, key=lambda item: item.tail_len):
        if batch and (len(batch) + 1) * item.tail_len > max_slots:
            yield batch
            batch = []
        batch.append(item)
    yield batch
