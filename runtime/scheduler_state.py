"""Who is where: running, waiting, held; rows, slots and blocks; and the counts people read.

Holds and moves, decides nothing. Knows nothing of steps.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Iterator

from sortedcontainers import SortedKeyList

from zipage_lang.radix_cache.block_table import BlockTable, SwappedTable
from zipage_lang.radix_cache.prefix_cache import PrefixCache
from zipage_lang.runtime.config import CacheConfig, SchedulerConfig
from zipage_lang.runtime.fair_share import FairShare
from zipage_lang.runtime.host_blocks import HostBlocks
from zipage_lang.runtime.limits import Limits
from zipage_lang.runtime.plan_builder import PlannedCompaction
from zipage_lang.runtime.query_slots import QuerySlots
from zipage_lang.runtime.queue_times import QueueTimes
from zipage_lang.runtime.request import Request, Status
from zipage_lang.runtime.snapshot import MAX_COMPACTIONS, CompactionView
from zipage_lang.runtime.waiting_queue import WaitingQueue


@dataclasses.dataclass(slots=True)
class Counts:
    """Totals since the start."""

    num_steps: int = 0
    num_decoded_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_refused: int = 0
    num_failed: int = 0  # samples that ended with an error
    num_out_of_memory: int = 0  # times that memory was refused in a step
    num_preemptions: int = 0
    num_swap_outs: int = 0
    num_swap_ins: int = 0
    num_turns_taken: int = 0  # swap-outs that let a displaced request have its turn
    num_compactions: int = 0
    num_early_compactions: int = 0
    num_dropped_slots: int = 0


class SchedulerState:
    """Every request with blocks is in exactly one of running, waiting, held, parting, or its
    leader's followers."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        limits: Limits,
    ) -> None:
        self.config, self.limits = config, limits
        self.cache = PrefixCache(limits.num_blocks, cache.block_size, enabled=cache.prefix_caching)
        self.block_size = cache.block_size
        self.shares = FairShare(round_len=config.turn_len * config.max_running)
        self.waiting = WaitingQueue(config.order, config.max_skips, self.shares)
        self.running: SortedKeyList = SortedKeyList(key=lambda request: request.precedence)
        self.held: dict[str, Request] = {}  # oldest first
        self.compacting: dict[int, PlannedCompaction] = {}  # by ident, until it is done
        self.parting: list[Request] = []  # ended while compacting: their blocks are still in use
        self.slots = QuerySlots(limits.num_query_slots, limits.window)
        self.host = HostBlocks(limits.num_host_blocks)
        self.counts = Counts()
        self.queue_times = QueueTimes()
        self.recent_compactions: deque[CompactionView] = deque(maxlen=MAX_COMPACTIONS)
        self._free_rows = list(range(config.max_running - 1, -1, -1))

    @property
    def num_blocks_coming(self) -> int:
        """Blocks that compactions under way will give back."""
        return sum(planned.num_blocks_coming for planned in self.compacting.values())

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_queued(self) -> int:
        """Requests that have no row, the samples that follow one of them included."""
        return self.shares.num_live - len(self.running)

    def start_running(self, request: Request) -> None:
        """Give the request a row. It must have a block table."""
        assert request.table is not None, f"{request.request_id} has no block table"
        assert request.row is None, f"{request.request_id} has row {request.row} already"
        request.row = self._free_rows.pop()
        request.status = Status.RUNNING
        request.skips = 0
        self._charge(request)
        if request.queued_since is not None:
            self.queue_times.note(time.monotonic() - request.queued_since)
            request.queued_since = None
        self.running.add(request)

    def _charge(self, request: Request) -> None:
        """The tenant pays for a prompt when it is let in, however often it is computed."""
        account = request.account
        if account.num_running == 0:
            account.round = self.shares.round_of(account)
        account.num_running += 1
        self.shares.note_admitted(account, request.num_uncharged)
        request.is_charged = True
        if request.sample_index > 0 and request.num_output_tokens == 0:
            request.token_ids = list(request.token_ids)  # until now its siblings' too

    def begin_rounds(self) -> None:
        """Requests of a tenant that was given a whole round more fall behind the others', which may
        take their places from now on. Only between steps: it sorts those that run anew."""
        if self.shares.num_tenants < 2:
            return
        accounts = {request.account for request in self.running}
        rounds = {account: self.shares.round_of(account) for account in accounts}
        if any(account.round != now for account, now in rounds.items()):
            running = list(self.running)
            self.running.clear()
            for account, now in rounds.items():
                account.round = now
            self.running.update(running)

    def stop_running(self, request: Request) -> None:
        """Take row and query slot back; the block table stays with the request."""
        assert request.row is not None
        self.running.remove(request)
        self.slots.release(request)
        request.account.num_running -= 1
        self._free_rows.append(request.row)
        request.row = None
        request.is_stalled = False

    def end_turn(self, request: Request) -> None:
        """Those that run and have had fewer turns take precedence from now on."""
        if request.row is not None:
            self.running.remove(request)
            request.turn += 1
            self.running.add(request)
        elif request.status is Status.WAITING:
            self.waiting.end_turn(request)
        else:
            request.turn += 1

    @property
    def current_turn(self) -> int:
        """Where newcomers start: even with those who run and have had the fewest turns."""
        if self.running:
            fewest: int = min(request.turn for request in self.running)
            return fewest
        first = self.waiting.first()
        return 0 if first is None else first.turn

    def keep_in_tree(self, request: Request) -> None:
        """Give up the request's blocks; what they hold stays in the tree, evictable."""
        table = request.table
        assert table is not None
        self._forget_table(request)
        self.cache.close(
            table,
            request.token_ids,
            signature=request.signature,
            stateful_len=request.stateful_len,
        )

    def drop_blocks(self, request: Request) -> None:
        """Give up the request's blocks and what they hold."""
        table = request.table
        assert table is not None
        self._forget_table(request)
        self.cache.drop(table)

    def take_to_host(self, request: Request) -> SwappedTable:
        """Give up the request's blocks, whose contents the step's plan moves to host memory."""
        table = request.table
        assert table is not None
        self._forget_table(request)
        return self.cache.swap_out(table)

    def requests(self) -> Iterator[Request]:
        """Every request that has not ended, followers included."""
        for request in (*self.running, *self.waiting, *self.held.values(), *self.parting):
            yield request
            yield from request.followers

    def tables(self) -> list[BlockTable]:
        return [request.table for request in self.requests() if request.table is not None]

    def check_invariants(self) -> None:
        """Raise AssertionError when a law of the block pool, the tree or the queues is broken."""
        self.cache.check_invariants(self.tables())
        self.slots.check_invariants()
        rows = [request.row for request in self.running]
        assert None not in rows, "a running request has no row"
        assert len(set(rows)) == len(rows), f"rows handed out twice: {rows}"
        total = len(rows) + len(self._free_rows)
        assert total == self.config.max_running, f"{total} of {self.config.max_running} rows"
        swapped = sum(len(r.swapped.host_ids) for r in self.requests() if r.swapped is not None)
        num_host = swapped + self.host.num_free
        assert num_host == self.host.num_blocks, f"{num_host} of {self.host.num_blocks} host blocks"

    def _forget_table(self, request: Request) -> None:
        request.last_kv = request.kv_usage()
        request.max_computed_len = max(request.max_computed_len, request.logical_len)
        request.table = None
