"""The scheduler: who computes how many tokens in the next step, and what a step's result means.

One rule for all work: a step has a token budget; decodes first, then chunks of prefill, then new
requests. Integers only. Knows nothing of tensors, text or sockets.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence

from zipage_lang.radix_cache.block_table import Append
from zipage_lang.runtime.admission import Admission
from zipage_lang.runtime.branching import Branching
from zipage_lang.runtime.compaction_plan import CompactionPlanner
from zipage_lang.runtime.config import CacheConfig, CompressionConfig, SchedulerConfig
from zipage_lang.runtime.intake import Intake
from zipage_lang.runtime.limits import Limits
from zipage_lang.runtime.messages import Abort, AddRequest, Fork, Release, Stop, TokenOutput
from zipage_lang.runtime.plan_builder import PlanBuilder, PlannedChunk
from zipage_lang.runtime.pressure import Pressure
from zipage_lang.runtime.request import Request, RequestRefused, Status
from zipage_lang.runtime.request_outputs import RequestOutputs, logprob_entry
from zipage_lang.runtime.scheduler_state import SchedulerState
from zipage_lang.runtime.snapshot import Snapshot
from zipage_lang.runtime.snapshot_taker import take_grid, take_nodes, take_requests
from zipage_lang.runtime.steady_decodes import SteadyDecodes
from zipage_lang.runtime.step_budget import StepBudget
from zipage_lang.runtime.step_plan import (
    Chunk,
    PromptScore,
    Sample,
    StepPlan,
    StepResult,
    StepTrouble,
)


class Scheduler:
    """Messages in, plans out; results in, outputs out."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        compression: CompressionConfig,
        limits: Limits,
        policy_queries: Mapping[str, int],
    ) -> None:
        self._config, self._limits = config, limits
        self._state = SchedulerState(config, cache, limits)
        self._planner = CompactionPlanner(self._state)
        self._steady = SteadyDecodes(self._state)
        self._pressure = Pressure(self._state, self._planner)
        self._admission = Admission(self._state, self._planner)
        self._branching = Branching(self._state, self._planner)
        self._intake = Intake(compression, limits, cache.block_size, policy_queries)
        self._outputs = RequestOutputs()
        self._budget = StepBudget(config.max_step_tokens)
        self._by_id: dict[str, list[Request]] = {}
        self._in_flight: dict[int, PlanBuilder] = {}
        self._is_memory_wanted = False  # the last step could not admit someone for want of blocks

    # What clients ask for

    def add(self, message: AddRequest) -> None:
        """Queue a request. Raises RequestRefused with the limit named when it can never run."""
        requests = self._take_in(message)
        self._state.waiting.add(requests[0])

    def fork(self, message: Fork) -> None:
        """Queue branches that start from the parent's state; a refused one outputs its error."""
        live = self._by_id.get(message.parent_id, [])
        parent = live[0] if live else self._state.held.get(message.parent_id)
        for child_message in message.children:
            try:
                leader = self._take_in(child_message)[0]
            except RequestRefused as refusal:
                self.refuse(child_message, str(refusal))
                continue
            if parent is not None:
                self._branching.start_from(parent, leader)
                if leader.table is None:
                    self._branching.show_in_tree(parent)
            self._state.waiting.add(leader)

    def knows(self, request_id: str) -> bool:
        """Whether a sample of it has not ended."""
        return request_id in self._by_id

    def is_ending(self, request_id: str) -> bool:
        """Whether its end waits in the outputs, to be taken with them."""
        return self._outputs.has_end(request_id)

    @property
    def held_ids(self) -> list[str]:
        """Of the states kept for a later fork."""
        return list(self._state.held)

    def refuse(self, message: AddRequest, error: str) -> None:
        """Tell the client that its request was refused."""
        self._state.counts.num_refused += 1
        self._outputs.tell_error(message, error)

    def abort_unseen(self, message: AddRequest) -> None:
        """Tell the client that a request which was never added is over: its caller has left."""
        self._state.counts.num_aborted += message.sampling.n
        self._outputs.tell_abort(message)

    def stop(self, message: Stop) -> None:
        """End a sample whose stop string the client has seen; tokens behind it do not count.

        A sample that has said nothing yet goes on: nothing can have been seen in it.
        """
        for request in self._by_id.get(message.request_id, []):
            if request.sample_index == message.sample_index and request.num_output_tokens > 0:
                self._leave_queues(request)
                self._cut(request, message.num_output_tokens)
                self._settle(request, "stop")
                self._outputs.tell_end(request, "stop")
                return

    def abort(self, message: Abort) -> None:
        """End requests whose caller left; their blocks are free (or evictable) at once."""
        groups = set(message.group_ids) - {""}  # no group is not a group
        everyone = self._state.requests() if groups else ()
        in_groups = {r.request_id for r in everyone if r.group_id in groups}
        for request_id in (*message.request_ids, *sorted(in_groups)):
            for request in list(self._by_id.get(request_id, [])):
                self._state.counts.num_aborted += 1
                self._end(request, "abort")
                self._outputs.tell_end(request, "abort")
        self.release(Release(request_ids=[*message.request_ids, *sorted(in_groups)]))

    def release(self, message: Release) -> None:
        """Drop held states: the tree may keep them, evictable."""
        for request_id in message.request_ids:
            request = self._state.held.pop(request_id, None)
            if request is not None:
                self._state.keep_in_tree(request)
                request.status = Status.ENDED

    # Steps

    @property
    def has_work(self) -> bool:
        state = self._state
        return bool(state.running) or len(state.waiting) > 0 or bool(state.compacting)

    def schedule(self) -> StepPlan:
        """Decide the next step, also while earlier steps are still running.

        Empty only when all that can move waits for a result that is still to come.
        """
        plan = PlanBuilder()
        self._state.begin_rounds()
        self._state.slots.provide(self._state.running)
        if self._is_memory_wanted:
            self._pressure.compact_adaptive(plan)
            self._take_turns(plan)
        self._is_memory_wanted = False
        budget = self._run_on(plan, self._budget.num_tokens)
        if not plan.has_displaced:
            budget = self._admit(plan, budget)
        if plan.is_empty and not self._is_result_coming:
            self._break_standstill(plan, budget)
            assert not (plan.is_empty and self.has_work), f"nothing could move: {self.stats()}"
        step = self._state.counts.num_steps + 1
        sealed = plan.seal(step)
        self._state.host.free(plan.host_ids_read)
        for _, branch in plan.branches:  # till now others can't have asked for what it shares
            self._state.waiting.note_branch(branch)
        if not sealed.is_empty:
            self._state.counts.num_steps = step
            self._in_flight[step] = plan
            self._budget.grow()
        return sealed

    def note_trouble(self, plan: StepPlan, trouble: StepTrouble) -> None:
        """Memory was refused while the step was launched: end whom that leaves without a sound
        state, and plan smaller steps for a while. To be told before anything else happens."""
        self._state.counts.num_out_of_memory += trouble.num_refusals
        if plan.num_tokens > 0:  # else a swap or a compaction was too large: tokens can't cure it
            self._budget.halve(plan.num_tokens)
        for request in self._failed(self._in_flight[plan.step], trouble):
            self._fail(request, trouble.error)

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        """Take in what the step yielded. Steps are applied in the order they were planned."""
        builder = self._in_flight.pop(plan.step)
        self._take_prompt_logprobs(builder, result)
        by_row = {sample.row: sample for sample in result.samples}
        for planned in builder.chunks:
            for request in planned.sampling_requests or (planned.request,):
                if not request.is_prefilled:
                    self._share_prompt(request)
            for request, row in zip(
                planned.sampling_requests, planned.chunk.sample_rows, strict=True
            ):
                self._take_sample(request, by_row.get(row))
        self.note_compacted(result.done_compactions)

    def note_compacted(self, idents: Sequence[int]) -> None:
        """These compactions are done, of whatever step they were."""
        for ident in idents:
            self._planner.finish(ident)

    def take_outputs(self) -> list[TokenOutput]:
        """What is to be told to clients since the last call."""
        return self._outputs.take()

    # What people look at

    def flush_cache(self) -> None:
        """Evict all that no request holds."""
        self._state.cache.flush()

    def check_invariants(self) -> None:
        self._state.check_invariants()

    def stats(self) -> dict[str, int | float | str]:
        """Counts and gauges by name."""
        state = self._state
        return {
            "num_running": len(state.running),
            "num_waiting": len(state.waiting),
            "num_held_requests": len(state.held),
            "num_free_query_slots": state.slots.num_free,
            "num_free_host_blocks": state.host.num_free,
            **dataclasses.asdict(state.counts),
            **state.cache.stats(),
        }

    def table_sizes(self) -> dict[str, int]:
        """Entries of tables that must be empty when nobody has work here, by name."""
        state = self._state
        return {
            "requests": len(self._by_id),
            "planned_steps": len(self._in_flight),
            "compacting": len(state.compacting),
            "parting": len(state.parting),
            "tenants": state.shares.num_tenants,
        }

    def queue_times(self) -> dict[str, int | float]:
        """How long requests waited for their first place; of this run only, unlike `stats`."""
        return self._state.queue_times.stats()

    def snapshot(
        self,
        stats: dict[str, int | float | str],
        *,
        max_cells: int,
        max_nodes: int,
        max_requests: int,
    ) -> Snapshot:
        """A picture of everything as it is between two steps, with `stats` for the rest."""
        started = time.perf_counter()
        cache = self._state.cache.stats()
        requests = take_requests(self._state, max_requests)
        return Snapshot(
            step=self._state.counts.num_steps,
            stats=stats,
            grid=take_grid(self._state, max_cells),
            nodes=take_nodes(self._state, max_nodes),
            num_nodes=cache["num_plain_nodes"] + cache["num_atomic_nodes"],
            requests=requests.views,
            num_requests=requests.num_requests,
            logical_len=requests.logical_len,
            resident_len=requests.resident_len,
            compactions=list(self._state.recent_compactions) if max_requests else [],
            taken_s=time.perf_counter() - started,
        )

    # Deciding

    def _take_turns(self, plan: PlanBuilder) -> None:
        """Who has had more turns than the first of the displaced (or whose tenant more rounds)
        gives its place up: one a step, and only to host memory, from where it comes back for the
        price of a copy. Nobody who came back and has not computed since: two whose orders disagree
        would come and go for ever."""
        displaced = self._state.waiting.first_displaced()
        if displaced is None:
            return
        round_of = self._state.shares.round_of
        first = (round_of(displaced.account), displaced.priority, displaced.turn)
        for request in reversed(self._state.running):
            if (round_of(request.account), request.priority, request.turn) <= first:
                return
            is_idle = request.status is Status.RUNNING and not plan.is_planned(request)
            has_just_come = request.came_back_len == request.logical_len
            if is_idle and not has_just_come and self._pressure.can_swap_out(request):
                self._pressure.displace(request, plan)
                self._state.counts.num_turns_taken += 1
                return

    def _run_on(self, plan: PlanBuilder, budget: int) -> int:
        """Those who run: decodes (and whoever stalled last time) first, then prefill chunks."""
        first: list[Request] = []
        later: list[Request] = []
        for request in self._state.running:
            is_first = request.num_uncomputed == 1 or request.is_stalled
            (first if is_first else later).append(request)
        for request in first + later:
            if request.status is Status.RUNNING and budget > 0 and not plan.is_planned(request):
                if self._steady.plan(request, plan):
                    budget -= 1
                else:
                    budget -= self._advance(request, plan, budget)
        return budget

    def _admit(self, plan: PlanBuilder, budget: int) -> int:
        """New requests while budget, rows and memory last."""
        if budget <= 0 or self._state.num_free_rows == 0:
            return budget
        for request in self._admission.candidates():
            if budget <= 0 or self._state.num_free_rows == 0:
                break
            if request.num_pending or self._admission.should_wait_for_sibling(request):
                continue
            if not self._find_place(request, plan):
                self._is_memory_wanted = True
                break
            if plan.is_coming_back(request):
                request.came_back_len = request.logical_len
            else:
                budget -= self._advance(request, plan, budget)
        return budget

    def _find_place(self, request: Request, plan: PlanBuilder) -> bool:
        """Admit the request; where only idle states are in its way, they give theirs up."""
        is_alone = plan.is_empty and not self._state.running
        while not self._admission.admit(request, plan, is_alone):
            if self._pressure.release_held():
                continue
            if not is_alone or not self._pressure.release_waiting_branch(besides=request):
                return False
        return True

    def _advance(self, request: Request, plan: PlanBuilder, budget: int) -> int:
        """One request's part of the step; returns the tokens it takes of the budget."""
        if self._surely_ends(request):
            return 0
        self._state.slots.provide_free(request)
        if self._planner.is_due(request):
            done = self._pressure.with_room(
                request, plan, lambda: self._planner.plan(request, plan) or None
            )
            request.is_stalled = done is None
            return 0
        num_tokens = self._num_tokens(request, budget)
        if num_tokens < 1:
            return 0
        num_tokens = self._shrink_to_fit(request, num_tokens)
        table = request.table
        assert table is not None
        append = self._pressure.with_room(
            request, plan, lambda: self._state.cache.append(table, num_tokens)
        )
        request.is_stalled = append is None
        if append is None:
            return 0
        self._plan_chunk(request, plan, num_tokens, append)
        return num_tokens

    def _surely_ends(self, request: Request) -> bool:
        """Whether the token that is being drawn is the last one by count."""
        num_tokens = len(request.token_ids) + request.num_pending
        return request.num_pending > 0 and num_tokens >= request.end_len

    def _num_tokens(self, request: Request, budget: int) -> int:
        chunk = self._config.max_chunk_len or budget
        return min(request.num_uncomputed, budget, chunk, self._planner.room(request))

    def _shrink_to_fit(self, request: Request, num_tokens: int) -> int:
        """A prefill chunk takes what is there rather than push others out; at least one token."""
        table = request.table
        assert table is not None
        available = self._state.cache.num_available
        while num_tokens > 1 and self._state.cache.num_new_blocks(table, num_tokens) > available:
            excess = self._state.cache.num_new_blocks(table, num_tokens) - available
            num_tokens = max(1, num_tokens - excess * self._state.block_size)
        return num_tokens

    def _plan_chunk(
        self, request: Request, plan: PlanBuilder, num_tokens: int, append: Append
    ) -> None:
        assert request.row is not None
        plan.append_blocks(request, append)
        if request.num_uncomputed + num_tokens > 1:
            self._state.counts.num_prefilled_tokens += num_tokens
        position = request.logical_len - num_tokens
        reaches_end = request.num_uncomputed == 0
        sampling_requests = self._samplers(request, plan) if reaches_end else ()
        is_last_token = reaches_end and num_tokens == 1
        tokens = (
            None if is_last_token else tuple(request.token_ids[position : position + num_tokens])
        )
        chunk = Chunk(
            row=request.row,
            num_tokens=num_tokens,
            token_ids=tokens,
            position=position,
            resident_start=request.resident_len - num_tokens,
            sample_rows=tuple(r.row for r in sampling_requests if r.row is not None),
            query_slot=request.query_slot,
            prompt_score=self._prompt_score(request, position, num_tokens),
        )
        request.max_resident_len = max(request.max_resident_len, request.resident_len)
        plan.add_chunk(PlannedChunk(request, chunk, sampling_requests))
        for drawing in sampling_requests:
            drawing.num_pending += 1

    def _samplers(self, leader: Request, plan: PlanBuilder) -> tuple[Request, ...]:
        """Who draws from the leader's logits: itself and who waited for its prefill."""
        return (leader, *self._branching.branch_followers(leader, plan))

    def _prompt_score(self, request: Request, position: int, num_tokens: int) -> PromptScore | None:
        if request.first_wanted_logprob is None or request.sampling.prompt_logprobs is None:
            return None
        start = max(position, request.first_wanted_logprob - 1)
        end = min(position + num_tokens, request.num_prompt_tokens - 1)
        if start >= end:
            return None
        next_token_ids = tuple(request.token_ids[start + 1 : end + 1])
        return PromptScore(start - position, next_token_ids, request.sampling.prompt_logprobs)

    def _break_standstill(self, plan: PlanBuilder, budget: int) -> None:
        """Nobody could move: the newest gives its place up, until the oldest finds room."""
        while plan.is_empty and self._state.running:
            plan.has_displaced = True
            self._pressure.preempt(self._state.running[-1], plan)
            if self._state.running:
                budget = self._run_on(plan, budget)
            else:
                budget = self._admit(plan, budget)
                return

    @property
    def _is_result_coming(self) -> bool:
        return bool(self._in_flight) or bool(self._state.compacting)

    # Taking results in

    def _share_prompt(self, request: Request) -> None:
        """Prompt blocks that are computed now may be shared from the next step on."""
        table = request.table
        if table is None:
            return
        if not table.is_compacted and not table.is_compacting:
            num_tokens = min(table.logical_len, request.num_prompt_tokens)
            self._state.cache.commit(table, request.token_ids, num_tokens)
        request.is_prefilled = table.logical_len >= request.num_prompt_tokens

    def _take_prompt_logprobs(self, builder: PlanBuilder, result: StepResult) -> None:
        requests = {planned.chunk.row: planned.request for planned in builder.chunks}
        for item in result.prompt_logprobs:
            request = requests[item.row]
            first_wanted = max(request.sampling.prompt_logprobs_start, 1)
            missing = first_wanted - len(request.prompt_logprobs)
            request.prompt_logprobs.extend([None] * missing)
            request.prompt_logprobs.extend(logprob_entry(entry) for entry in item.entries)

    def _take_sample(self, request: Request, sample: Sample | None) -> None:
        request.num_pending -= 1
        if request.status is Status.ENDED or request.status is Status.HELD:
            return
        assert sample is not None, f"{request.request_id} drew nothing, and nobody said why"
        if sample.error is None:
            self._take_token(request, sample)
        else:
            self._fail(request, sample.error)

    def _failed(self, builder: PlanBuilder, trouble: StepTrouble) -> list[Request]:
        """Whose rows failed, who waits for such a row's prefill or branched off in this very step,
        and whose host blocks were not written."""
        state, rows, lost = self._state, set(trouble.failed_rows), set(trouble.lost_host_ids)
        failed = [request for request in state.running if request.row in rows]
        for planned in builder.chunks:
            if planned.chunk.row in rows:
                num_copied = self._num_copied(builder, planned)
                failed += [
                    sample
                    for leader, sample in builder.branches
                    if leader.row == planned.chunk.row
                    and sample.logical_len > planned.chunk.position - num_copied
                ]
        for request in state.waiting:
            if request.swapped is not None and not lost.isdisjoint(request.swapped.host_ids):
                failed.append(request)
        return failed + [follower for request in failed for follower in request.followers]

    def _num_copied(self, builder: PlanBuilder, planned: PlannedChunk) -> int:
        """Tokens just ahead of the chunk that its step was to copy into the chunk's first block."""
        block, num_ahead = divmod(planned.chunk.resident_start, self._state.block_size)
        table = planned.request.table
        assert table is not None, f"{planned.request.request_id} computes without blocks"
        return num_ahead if builder.is_copy(table.block_ids[block]) else 0

    def _fail(self, request: Request, error: str) -> None:
        """End one sample with an error; what its blocks hold is not to be trusted."""
        self._leave_queues(request)
        if request.table is not None and request not in self._state.parting:
            self._state.drop_blocks(request)
        self._settle(request, "error")
        self._state.counts.num_failed += 1
        self._outputs.tell_failure(request, error)

    def _take_token(self, request: Request, sample: Sample) -> None:
        token_id = sample.token_id
        request.token_ids.append(token_id)
        if sample.num_thinking is not None:
            request.num_thinking_tokens = sample.num_thinking
        self._state.counts.num_decoded_tokens += 1
        request.account.served += 1
        if request.num_output_tokens % self._config.turn_len == 0:
            self._state.end_turn(request)
        reason = "stop" if sample.is_complete else self._finish_reason(request, token_id)
        stop_token_id = token_id if reason == "stop" else None
        if reason is not None:
            self._end(request, reason)
        self._outputs.tell_token(request, sample.logprobs, reason, stop_token_id)

    def _finish_reason(self, request: Request, token_id: int) -> str | None:
        sampling = request.sampling
        is_end = token_id in sampling.stop_token_ids or (
            token_id in self._limits.eos_token_ids and not sampling.ignore_eos
        )
        if is_end and request.num_output_tokens >= sampling.min_tokens:
            return "stop"
        return "length" if len(request.token_ids) >= request.end_len else None

    def _cut(self, request: Request, num_output_tokens: int) -> None:
        """Forget tokens behind a stop string; a state that can't be cut there is not kept."""
        num_known = request.num_prompt_tokens + max(0, num_output_tokens)
        del request.token_ids[num_known:]
        excess = request.logical_len - num_known
        if request.table is None or request in self._state.parting or excess <= 0:
            return
        if request.logical_len - excess >= request.last_compaction_at:
            self._state.cache.truncate(request.table, excess)
        else:
            self._state.drop_blocks(request)

    # Ends

    def _take_in(self, message: AddRequest) -> list[Request]:
        if message.request_id in self._by_id or message.request_id in self._state.held:
            raise RequestRefused(f"request id {message.request_id!r} is in use; choose another")
        self._check_line(message.tenant)
        requests = self._intake.make_requests(message)
        account = self._state.shares.join(message.tenant, len(requests))
        turn = self._state.current_turn
        for request in requests:
            request.account, request.turn = account, turn
        requests[0].followers = requests[1:]
        for follower in requests[1:]:
            follower.status = Status.FOLLOWING
        self._by_id[message.request_id] = list(requests)
        return requests

    def _check_line(self, tenant: str) -> None:
        """Samples of one request count each. Refuses who would make the line too long."""
        num_queued = self._state.num_queued
        if num_queued >= self._config.max_waiting:
            raise RequestRefused(
                f"{num_queued} requests wait already (max_waiting={self._config.max_waiting}); try "
                "again later"
            )
        num_own = self._state.shares.num_queued_of(tenant)
        most = self._config.max_waiting_per_tenant
        if most is not None and num_own >= most:
            raise RequestRefused(
                f"{num_own} requests of this tenant wait already (max_waiting_per_tenant={most}); "
                "try again later"
            )

    def _end(self, request: Request, reason: str) -> None:
        """Take the request out of every queue and settle where its state goes."""
        self._leave_queues(request)
        self._settle(request, reason)

    def _settle(self, request: Request, reason: str) -> None:
        """An ended request's blocks go to the tree, or are held for Fork."""
        self._state.shares.leave(request.account)
        siblings = self._by_id[request.request_id]
        siblings.remove(request)
        if not siblings:
            del self._by_id[request.request_id]
        self._state.counts.num_finished += reason in ("stop", "length")
        if request.table is None or request in self._state.parting:
            return
        if request.hold and reason != "abort":
            request.status = Status.HELD
            self._state.held[request.request_id] = request
        else:
            self._state.keep_in_tree(request)

    def _leave_queues(self, request: Request) -> None:
        """Out of its queue; row, slot and host blocks go back, the block table stays."""
        if request.status is Status.COMPACTING:
            self._state.parting.append(request)
        if request.row is not None:
            self._state.stop_running(request)
        elif request.status is Status.WAITING:
            self._state.waiting.remove(request)
        if request.swapped is not None:
            self._state.host.free(request.swapped.host_ids)
            request.swapped = None
        request.followers.clear()
        request.status = Status.ENDED
