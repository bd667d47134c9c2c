"""Which situations a run of the scheduler came through, counted by name.

A test that asserts what was reached can't go blind when the scheduler or the load changes. Reads
the scheduler's state, changes nothing. Knows nothing of what is right.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from zipage_lang.runtime.request import Request, Status
from zipage_lang.runtime.scheduler import Scheduler
from zipage_lang.runtime.step_plan import StepPlan

# What a message may find its request at.
PLACES = (
    "queued",
    "preempted",
    "waiting with blocks",
    "in host memory",
    "on its way to host memory",
    "on its way back from host memory",
    "mid-prefill",
    "decoding",
    "being drawn for",
    "stalled",
    "at its line without a query slot",
    "compacting",
    "compacting into copies",
    "followed",
    "following",
    "held",
    "ended",
    "ended compacted",
    "compacted in the tree",
    "unknown",
)
# What the scheduler must have done or met, whoever asked for it.
ACTS = (
    "a chunk that ends inside the prompt",
    "a held state let go under pressure",
    "a waiting branch let go under pressure",
    "copies before a compaction",
    "copies before an append",
    "drew from a plain state",
    "drew from a compacted state",
    "several samples of one prefill",
    "swap-out and swap-in in one step",
    "went on from a compacted node",
    "went on from a plain prefix",
    "refused",
    "flush",
    "snapshot",
)
# Counts of the scheduler and the cache that show an act of theirs.
STATS = (
    "num_preemptions",
    "num_swap_outs",
    "num_swap_ins",
    "num_turns_taken",
    "num_compactions",
    "num_early_compactions",
    "num_evicted_nodes",
    "num_taken_over_blocks",
    "num_copied_blocks",
    "num_tokens_hit",
    "num_recomputed_tokens",
)


class Situations:
    """Counts of one run; `watch` hooks into the scheduler that it is given."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.counts: Counter[str] = Counter()
        self._scheduler = scheduler
        self._watch(scheduler._pressure, "release_held", "a held state let go under pressure")
        self._watch(
            scheduler._pressure, "release_waiting_branch", "a waiting branch let go under pressure"
        )
        self._watch_calls(scheduler._pressure, "preempt", scheduler, "_break_standstill")
        self._watch_matches()

    def count(self, name: str, times: int = 1) -> None:
        self.counts[name] += times

    def note(self, verb: str, places: Iterable[str]) -> None:
        """A message is about to meet a request there."""
        self.counts.update(f"{verb}: {place}" for place in places)

    def note_plan(self, plan: StepPlan) -> None:
        self.counts["copies before a compaction"] += sum(
            bool(act.block_copies) for act in plan.compactions
        )
        self.counts["copies before an append"] += len(plan.block_copies)
        self.counts["several samples of one prefill"] += sum(
            len(chunk.sample_rows) > 1 for chunk in plan.chunks
        )
        self.counts["a chunk that ends inside the prompt"] += sum(
            not chunk.sample_rows for chunk in plan.chunks
        )
        self.counts["swap-out and swap-in in one step"] += bool(plan.swap_outs and plan.swap_ins)

    def note_stats(self, stats: dict[str, Any]) -> None:
        self.counts.update({name: int(stats[name]) for name in STATS})

    def places(self, request_id: str, in_flight: Sequence[StepPlan]) -> list[str]:
        """Where the samples of a request are, as the scheduler has it; empty when it has none."""
        scheduler = self._scheduler
        requests = list(scheduler._by_id.get(request_id, ()))
        if request_id in scheduler._state.held:
            requests.append(scheduler._state.held[request_id])
        return [place for each in requests for place in self._places_of(each, in_flight)]

    def _places_of(self, request: Request, in_flight: Sequence[StepPlan]) -> Iterator[str]:
        if request.num_pending:
            yield "being drawn for"
        if request.followers:
            yield "followed"
        match request.status:
            case Status.WAITING:
                yield from _waiting_places(request, in_flight)
            case Status.RUNNING:
                yield from self._running_places(request, in_flight)
            case Status.COMPACTING:
                yield from self._compacting_places(request)
            case _:
                yield request.status.value

    def _running_places(self, request: Request, in_flight: Sequence[StepPlan]) -> Iterator[str]:
        table = request.table
        assert table is not None
        came_back = {swap.block_id for plan in in_flight for swap in plan.swap_ins}
        if came_back.intersection(table.block_ids):
            yield "on its way back from host memory"
        if request.is_stalled:
            yield "stalled"
        lacks_slot = request.needs_queries and request.query_slot is None
        if lacks_slot and request.kv.mode == "fixed" and request.resident_len >= request.query_line:
            yield "at its line without a query slot"
        yield "mid-prefill" if request.num_uncomputed > 1 else "decoding"

    def _compacting_places(self, request: Request) -> Iterator[str]:
        yield "compacting"
        blocks = None if request.table is None else request.table.compaction
        if blocks is not None and blocks.copies:
            yield "compacting into copies"

    def _watch(self, owner: Any, verb: str, name: str) -> None:
        """Count the calls of a method that say True."""
        act = getattr(owner, verb)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = act(*args, **kwargs)
            self.counts[name] += bool(result)
            return result

        setattr(owner, verb, watched)

    def _watch_calls(self, inner: Any, verb: str, outer: Any, outer_verb: str) -> None:
        """Count the calls of `inner` that `outer` makes: preemptions that break a standstill."""
        act, outer_act = getattr(inner, verb), getattr(outer, outer_verb)
        depth = Counter[str]()

        def watched(*args: Any) -> Any:
            self.counts["a standstill broken"] += depth["outer"]
            return act(*args)

        def watched_outer(*args: Any) -> Any:
            depth["outer"] += 1
            try:
                return outer_act(*args)
            finally:
                depth["outer"] -= 1

        setattr(inner, verb, watched)
        setattr(outer, outer_verb, watched_outer)

    def _watch_matches(self) -> None:
        cache = self._scheduler._state.cache
        open_match = cache.open

        def watched(match: Any) -> Any:
            self.counts["went on from a compacted node"] += match.is_compacted
            self.counts["went on from a plain prefix"] += bool(
                match.num_tokens and not match.is_compacted
            )
            return open_match(match)

        cache.open = watched  # type: ignore[method-assign]


def _waiting_places(request: Request, in_flight: Sequence[StepPlan]) -> Iterator[str]:
    if request.swapped is not None:
        leaving = {swap.host_id for plan in in_flight for swap in plan.swap_outs}
        is_leaving = leaving.intersection(request.swapped.host_ids)
        yield "on its way to host memory" if is_leaving else "in host memory"
    elif request.table is not None:
        yield "waiting with blocks"
    else:
        yield "preempted" if request.max_computed_len else "queued"


def missing_acts(counts: Mapping[str, int]) -> list[str]:
    """What a long run never came through, of all that it should have."""
    return [name for name in (*ACTS, *STATS) if counts[name] == 0]
