"""Carries out a step's compactions: copy on write, score, select, fill holes.

Knows nothing of why a request is compacted, or of what happens to the blocks it no longer needs.

Requests with the same policy are worked on together, and so are layers: the pools of all layers
are seen as one long pool in which layer l's blocks follow those of layer l - 1, and a (layer,
request) pair is one row of a batch. A pass takes as many layers as fit a bound on memory.

On a card a pass is few launches (lay out, score, choose, move), since each costs the host about
15 us while the decoding waits for it; what the host knows goes over in one copy.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from zipage_lang.kernels.backend import (
    Backend,
    ScoreBlend,
    ScoreTiers,
    TailQueries,
    TailRequests,
    TailRows,
)
from zipage_lang.runtime.device_copy import send_array
from zipage_lang.runtime.kv_cache import KVCache
from zipage_lang.runtime.out_of_memory import Retries, halved
from zipage_lang.runtime.policies.policy import NOTHING_KNOWN, Calibration, Policy, Scores, TailView
from zipage_lang.runtime.step_plan import Compaction

# Rows times longest tail of one pass. More spills a CPU's caches; on a card it bounds the scratch
# (about 40 bytes a slot and KV head), and fewer would leave launches unpaid for.
_MAX_PASS_SLOTS = {"cpu": 2_048, "cuda": 786_432}


class _Pass(NamedTuple):
    """Some layers of some rows, worked on at once."""

    batch: tuple[Compaction, ...]
    start: int  # first layer
    num_layers: int
    requests: TailRequests | None  # of all of the batch, if they are on the device already


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
        calibration_of: Callable[[Policy], Calibration] = lambda _: NOTHING_KNOWN,
        retries: Retries | None = None,
    ) -> None:
        """max_pass_slots: rows times longest tail of one pass; None: what suits the device.
        calibration_of: what each policy says that it needs; else no policy may need any.
        retries: where refusals of memory are counted; None: nobody asks.

        Raises ValueError when a policy scores with more queries than the cache's rings hold.
        """
        for policy in policies.values():
            if policy.num_queries > cache.window:
                raise ValueError(
                    f"policy {policy.name!r} scores with {policy.num_queries} queries but the "
                    f"query rings hold {cache.window}; build the cache with a larger window"
                )
        self._cache, self._backend, self._policies = cache, backend, policies
        self._calibration_of = calibration_of
        self._retries = retries or Retries()
        device_type = backend.device.type
        self._max_pass_slots = max_pass_slots or _MAX_PASS_SLOTS[device_type]
        # Views with all layers' blocks (and all layers' ring entries) in one leading axis.
        self._kv = cache.kv.flatten(0, 1)  # [all_blocks, 2, block_size, num_kv_heads, head_dim]
        self._score = cache.score.flatten(0, 1)  # [all_blocks, block_size, num_kv_heads]
        self._position = cache.position.flatten(0, 1)  # [all_blocks, block_size, num_kv_heads]
        self._ring = cache.queries.flatten(0, 1)  # [all_entries, num_q_heads, head_dim]
        self._ring_lse = cache.query_lse.flatten(0, 1)  # [all_entries, num_q_heads]

    def run(self, compactions: tuple[Compaction, ...]) -> frozenset[int]:
        """Compact every item. Items are independent: no item's target is another's source.

        Where memory is refused, fewer rows or layers are worked on at a time. Returns the rows
        that found none even alone, layer by layer: what their tails hold is not known then.
        """
        self._check(compactions)
        failed: set[int] = set()
        self._retries.run(compactions, self._copy_blocks, halved, partial(_fail_rows, failed))
        by_policy = defaultdict(list)
        for item in compactions:
            if item.row not in failed:
                by_policy[item.policy].append(item)
        for name, items in by_policy.items():
            for batch in _split(items, self._max_pass_slots):
                self._compact(self._policies[name], batch, failed)
        return frozenset(failed)

    def _check(self, compactions: tuple[Compaction, ...]) -> None:
        targets = {copy.dst for item in compactions for copy in item.block_copies}
        for item in compactions:
            _check_item(item, self._cache.block_size)
            assert item.policy in self._policies, f"policy {item.policy!r} is not loaded"
            overlap = targets and targets.intersection(item.block_ids_before)
            assert not overlap, f"copies overwrite blocks {overlap} that row {item.row} still reads"

    def _copy_blocks(self, compactions: Sequence[Compaction]) -> None:
        copies = [copy for item in compactions for copy in item.block_copies]
        if copies:
            ends = [[copy.src for copy in copies], [copy.dst for copy in copies]]
            src, dst = self._send(ends).unbind()  # each [num_copies]
            self._backend.copy_blocks(self._cache.block_pools, src, dst)

    def _compact(self, policy: Policy, batch: list[Compaction], failed: set[int]) -> None:
        """All layers of a batch, in passes; rows that fail are added to `failed`."""
        max_tail = max(item.tail_len for item in batch)
        num_layers = self._cache.shape.num_layers
        layers_per_pass = max(1, self._max_pass_slots // (len(batch) * max_tail))
        requests: TailRequests | None = None

        def run_pass(part: _Pass) -> TailRequests | None:
            return self._run_pass(policy, part, failed)

        def give_up(part: _Pass) -> None:
            _fail_rows(failed, part.batch)

        for start in range(0, num_layers, layers_per_pass):
            num_left = min(layers_per_pass, num_layers - start)
            whole = _Pass(tuple(batch), start, num_left, requests)
            used = self._retries.run(whole, run_pass, _halved_pass, give_up)
            requests = used[0] if len(used) == 1 and not failed else None

    def _run_pass(
        self, policy: Policy, part: "_Pass", failed: Collection[int]
    ) -> TailRequests | None:
        """Compact some layers of some rows; what it changes, it changes at its end.

        Returns the requests as they were sent to the device, for the next pass of the same rows.
        """
        batch = [item for item in part.batch if item.row not in failed]
        if not batch:
            return None
        requests = part.requests or self._requests(policy, batch)
        rows = self._backend.expand_tails(
            requests,
            self._cache.position,
            part.start,
            part.num_layers,
            self._cache.queries.shape[1],
        )
        self._compact_rows(policy, rows, max(i.tail_len - i.stateful_len for i in batch))
        return requests

    def _requests(self, policy: Policy, batch: list[Compaction]) -> TailRequests:
        return TailRequests(
            lines=self._send(_lines(batch, policy, self._cache.block_size)),
            max_tail=max(item.tail_len for item in batch),
            num_queries=policy.num_queries,
            window=self._cache.window,
        )

    def _compact_rows(self, policy: Policy, rows: TailRows, max_new: int) -> None:
        found = policy.score(self._view(policy, rows, max_new))
        pools = (self._kv, self._score, self._position)
        protected = (policy.num_recent, policy.num_sinks)
        if isinstance(found, ScoreBlend):
            self._backend.compact_blend(*pools, rows, found, *protected)
        elif isinstance(found, ScoreTiers):
            self._backend.compact_tiers(*pools, rows, found, *protected)
        else:
            self._keep_highest(policy, rows, found)

    def _keep_highest(self, policy: Policy, rows: TailRows, scores: Scores) -> None:
        tails = (rows.positions, rows.lens)
        keep = scores.keep.contiguous()
        protected = self._backend.protect_slots(
            keep, *tails, rows.logical_lens, policy.num_recent, policy.num_sinks
        )
        self._backend.fill_holes(
            self._kv,
            self._score,
            self._position,
            rows.slots,
            self._backend.select_top_k(protected, *tails, rows.num_keep),
            rows.num_keep,
            rows.positions,
            scores.history,
        )

    def _view(self, policy: Policy, rows: TailRows, max_new: int) -> TailView:
        rings = (self._ring, self._ring_lse, rows.ring_slots, rows.query_positions)
        return TailView(
            backend=self._backend,
            kv_blocks=self._kv,
            score_blocks=self._score,
            slots=rows.slots,
            positions=rows.positions,
            lens=rows.lens,
            num_keep=rows.num_keep,
            max_new=max_new,
            stateful_lens=rows.stateful_lens,
            logical_lens=rows.logical_lens,
            layers=rows.layers,
            num_layers=self._cache.shape.num_layers,
            seeds=rows.seeds,
            queries=TailQueries(*rings) if policy.num_queries > 0 else None,
            calibration=self._calibration_of(policy),
        )

    def _send(self, lines: list[list[int]]) -> Tensor:
        """int64 [num_lines, line_len], without waiting for the device."""
        return send_array(np.array(lines, dtype=np.int64), self._backend.device)


def _halved_pass(part: _Pass) -> Sequence[_Pass]:
    """First fewer rows at a time, then fewer layers."""
    if len(part.batch) > 1:
        return [_Pass(tuple(half), *part[1:3], None) for half in halved(part.batch)]
    first = part.num_layers // 2
    if first == 0:
        return ()
    return (
        part._replace(num_layers=first),
        part._replace(start=part.start + first, num_layers=part.num_layers - first),
    )


def _fail_rows(failed: set[int], items: Sequence[Compaction]) -> None:
    failed.update(item.row for item in items)


def _lines(batch: list[Compaction], policy: Policy, block_size: int) -> list[list[int]]:
    """Per request what `TailRequests` asks for, padded to one length."""
    lines = []
    for item in batch:
        first_block = item.protected_len // block_size
        # Past the new table the old one still holds.
        table = item.block_ids[first_block:] + item.block_ids_before[len(item.block_ids) :]
        query_slot = 0 if item.query_slot is None else item.query_slot
        facts = (
            item.protected_len - first_block * block_size,
            item.tail_len,
            item.num_keep,
            item.stateful_len,
            item.logical_len,
            item.seed % 2**63,
            query_slot,
            _num_stored(item, policy.num_queries),
        )
        lines.append([*facts, *table])
    longest = max(map(len, lines))
    return [line + [-1] * (longest - len(line)) for line in lines]


def _check_item(item: Compaction, block_size: int) -> None:
    assert 1 <= item.num_keep <= item.tail_len, f"keep {item.num_keep} of {item.tail_len} slots"
    assert item.stateful_len <= item.tail_len, f"{item.stateful_len} stateful of {item.tail_len}"
    kept_len = item.protected_len + item.num_keep
    assert len(item.block_ids) * block_size >= kept_len, f"{item.block_ids} for {kept_len} slots"
    if item.block_ids_before[: len(item.block_ids)] == item.block_ids:
        return
    copies = {(copy.src, copy.dst) for copy in item.block_copies}
    moved = set(zip(item.block_ids_before, item.block_ids, strict=False)) - copies
    strays = [pair for pair in moved if pair[0] != pair[1]]
    assert not strays, f"row {item.row}: blocks (before, after) {strays} differ without a copy"


def _num_stored(item: Compaction, num_queries: int) -> int:
    """How many of the newest queries the ring holds and the policy wants."""
    num_stored = min(num_queries, item.num_queries, item.logical_len)
    if num_queries > 0:
        assert item.query_slot is not None, f"row {item.row}: {item.policy} needs a query slot"
        assert num_stored > 0, f"row {item.row}: query slot {item.query_slot} is empty"
    return num_stored


def _split(items: list[Compaction], max_slots: int) -> Iterator[list[Compaction]]:
    """Batches of at most `max_slots` padded slots, or one item; sorted by length to pad less."""
    batch: list[Compaction] = []
    for item in sorted(items, key=lambda item: item.tail_len):
        if batch and (len(batch) + 1) * item.tail_len > max_slots:
            yield batch
            batch = []
        batch.append(item)
    yield batch
