"""Plays loads through the real scheduler and the FakeRunner, and checks the scheduler's laws.

Knows nothing of how the scheduler decides.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

from test_support.fake_runner import FakeRunner
from test_support.lone_run import draw_token

from zipage_lang.runtime.config import CacheConfig, CompressionConfig, SchedulerConfig
from zipage_lang.runtime.limits import Limits
from zipage_lang.runtime.messages import (
    Abort,
    AddRequest,
    Fork,
    LogprobEntry,
    Release,
    Stop,
    TokenOutput,
)
from zipage_lang.runtime.request import RequestRefused
from zipage_lang.runtime.scheduler import Scheduler
from zipage_lang.runtime.step_plan import StepPlan, StepResult

POLICY_QUERIES = {
    "zipage": 4,
    "gkv": 2,
    "random": 0,
    "streaming": 0,
    "page": 0,
    "keydiff": 0,
    "zipage2": 0,
}
WINDOW = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """The engine's side of a simulation: pool, limits and settings."""

    num_blocks: int = 32
    block_size: int = 2
    num_host_blocks: int = 8
    num_query_slots: int = 4
    max_model_len: int = 64
    vocab_size: int = 50
    eos_token_ids: tuple[int, ...] = ()
    prefix_caching: bool = True
    deterministic: bool = False
    num_ahead: int = 0  # steps that are planned and run before a result is applied
    compaction_delay: int = 0  # results that pass before a compaction is told as done; -1: at once
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    compression: CompressionConfig = dataclasses.field(default_factory=CompressionConfig)

    def make_scheduler(self) -> Scheduler:
        cache = CacheConfig(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            prefix_caching=self.prefix_caching,
        )
        limits = Limits(
            num_blocks=self.num_blocks,
            num_host_blocks=self.num_host_blocks,
            num_query_slots=self.num_query_slots,
            window=WINDOW,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            deterministic=self.deterministic,
        )
        return Scheduler(self.scheduler, cache, self.compression, limits, POLICY_QUERIES)

    def make_runner(self) -> FakeRunner:
        return FakeRunner(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_host_blocks=self.num_host_blocks,
            num_query_slots=self.num_query_slots,
            window=WINDOW,
            max_rows=self.scheduler.max_running,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            policy_queries=POLICY_QUERIES,
        )


@dataclasses.dataclass(slots=True)
class Transcript:
    """What the client has received of one sample."""

    request: AddRequest
    token_ids: list[int] = dataclasses.field(default_factory=list)
    final: TokenOutput | None = None
    prompt_logprobs: list[LogprobEntry | None] | None = None
    stopped_at: int | None = None  # num_output_tokens of the first Stop that was in time

    @property
    def counted(self) -> list[int]:
        """The tokens that count: a stop string may have cut the last ones off."""
        return self.token_ids[: self.stopped_at]


@dataclasses.dataclass(frozen=True)
class Event:
    """Something a client does before the given step; `act` sees the simulation as it is then."""

    step: int
    name: str
    act: Callable[["Simulation"], None]


class Simulation:
    """One engine, its clients, and the laws that hold after each step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.scheduler = world.make_scheduler()
        self.runner = world.make_runner()
        self.transcripts: dict[tuple[str, int], Transcript] = {}
        self.refused: dict[str, str] = {}
        self.row_seeds: dict[int | None, set[int]] = collections.defaultdict(set)
        self.plans: list[StepPlan] = []
        self._in_flight: collections.deque[tuple[StepPlan, StepResult]] = collections.deque()
        self._compacting: collections.deque[tuple[int, int]] = collections.deque()  # (due, ident)
        self._num_applied = 0
        self.num_steps = 0

    # the client's side

    def add(self, request: AddRequest) -> None:
        try:
            self.scheduler.add(request)
        except RequestRefused as refusal:
            self.refused[request.request_id] = str(refusal)
            return
        self._expect(request)

    def fork(self, parent_id: str, children: Sequence[AddRequest]) -> None:
        """Refused children end with an error output, the others go on."""
        for child in children:
            self._expect(child)
        self.scheduler.fork(Fork(parent_id=parent_id, children=list(children)))
        for output in self.receive():
            if output.error is not None:
                self.refused[output.request_id] = output.error

    def stop(self, request_id: str, sample_index: int, num_output_tokens: int) -> None:
        transcript = self.transcripts[request_id, sample_index]
        if transcript.final is None and transcript.stopped_at is None:
            transcript.stopped_at = num_output_tokens
        self.scheduler.stop(
            Stop(
                request_id=request_id,
                sample_index=sample_index,
                num_output_tokens=num_output_tokens,
            )
        )

    def abort(self, *request_ids: str) -> None:
        self.scheduler.abort(Abort(request_ids=list(request_ids)))

    def release(self, *request_ids: str) -> None:
        self.scheduler.release(Release(request_ids=list(request_ids)))

    def output(self, request_id: str, sample_index: int = 0) -> list[int]:
        """The counted tokens received so far."""
        return self.transcripts[request_id, sample_index].counted

    def final(self, request_id: str, sample_index: int = 0) -> TokenOutput:
        final = self.transcripts[request_id, sample_index].final
        assert final is not None, f"{request_id}/{sample_index} has not ended"
        return final

    def _expect(self, request: AddRequest) -> None:
        for index in range(request.sampling.n):
            self.transcripts[request.request_id, index] = Transcript(request)

    # stepping

    def step(self) -> StepPlan:
        """One schedule, run, apply, send; with all laws checked on the way."""
        had_work = self.scheduler.has_work
        is_result_coming = bool(self._in_flight) or bool(self._compacting)
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        assert not (had_work and plan.is_idle and not is_result_coming), (
            f"step {plan.step} is empty while work waits"
        )
        self._check_budget(plan)
        for setup in plan.row_setups:
            self.row_seeds[setup.sampling.seed].add(setup.seed)
        if not plan.is_empty:
            self._in_flight.append((plan, self._run(plan)))
        self.scheduler.check_invariants()
        while len(self._in_flight) > self.world.num_ahead or (plan.is_empty and self._in_flight):
            self._apply_oldest()
        if plan.is_empty and self._compacting:
            self.scheduler.note_compacted([self._compacting.popleft()[1]])
        self.scheduler.check_invariants()
        self.receive()
        self.num_steps += 1
        return plan

    def _run(self, plan: StepPlan) -> StepResult:
        """The result; where compactions are told at once, it tells of none."""
        result = self.runner.run(plan)
        if self.world.compaction_delay >= 0:
            return result
        self.scheduler.note_compacted(result.done_compactions)
        return dataclasses.replace(result, done_compactions=())

    def _apply_oldest(self) -> None:
        """Take a result in; compactions are told late, as from a stream of their own."""
        plan, result = self._in_flight.popleft()
        due = self._num_applied + self.world.compaction_delay
        self._compacting.extend((due, ident) for ident in result.done_compactions)
        done = []
        while self._compacting and self._compacting[0][0] <= self._num_applied:
            done.append(self._compacting.popleft()[1])
        self.scheduler.apply(plan, dataclasses.replace(result, done_compactions=tuple(done)))
        self._num_applied += 1

    def receive(self) -> list[TokenOutput]:
        """Take what the scheduler has to tell, and add it to the transcripts."""
        outputs = self.scheduler.take_outputs()
        for output in outputs:
            transcript = self.transcripts[output.request_id, output.sample_index]
            name = f"{output.request_id}/{output.sample_index}"
            assert transcript.final is None, f"{name}: an output after the final one: {output}"
            transcript.token_ids += output.token_ids
            if output.prompt_logprobs is not None:
                assert transcript.prompt_logprobs is None, f"{name}: prompt logprobs came twice"
                transcript.prompt_logprobs = output.prompt_logprobs
            if output.is_final:
                transcript.final = output
        return outputs

    def run_until_idle(self, max_steps: int) -> None:
        """Step until no work is left; a load that needs more than `max_steps` starves."""
        self.receive()
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        waiting = [key for key, transcript in self.transcripts.items() if not transcript.final]
        raise AssertionError(f"after {max_steps} steps these have not ended: {waiting}")

    def play(self, events: Sequence[Event], max_steps: int) -> None:
        """Let each event happen before its step, then run until everyone has ended."""
        for event in sorted(events, key=lambda event: event.step):
            while self.num_steps < event.step and self.scheduler.has_work:
                self.step()
            event.act(self)
            self.scheduler.check_invariants()
            self.receive()
        self.run_until_idle(max_steps)

    def _check_budget(self, plan: StepPlan) -> None:
        config = self.world.scheduler
        assert plan.num_tokens <= config.max_step_tokens, (
            f"step {plan.step}: {plan.num_tokens} tokens, budget {config.max_step_tokens}"
        )
        longest = max((chunk.num_tokens for chunk in plan.chunks), default=0)
        limit = config.max_chunk_len or config.max_step_tokens
        assert longest <= limit, f"step {plan.step}: a chunk of {longest} tokens, limit {limit}"

    # laws at the end

    def check_all_ended(self) -> None:
        """Everyone got exactly one final output, and it says what it should."""
        for key, transcript in self.transcripts.items():
            final = transcript.final
            assert final is not None, f"{key} has no final output"
            if key[0] in self.refused:
                continue
            assert final.error is None, f"{key} ended on an error: {final.error}"
            assert final.usage.prompt_tokens == len(transcript.request.token_ids), f"{key}: usage"
            assert final.usage.completion_tokens == len(transcript.counted), (
                f"{key}: usage says {final.usage.completion_tokens}, got {transcript.counted}"
            )
            self._check_reason(key, transcript)
            self._check_resident(key, transcript)
            self._check_prompt_logprobs(key, transcript)

    def _check_reason(self, key: tuple[str, int], transcript: Transcript) -> None:
        final, sampling = transcript.final, transcript.request.sampling
        assert final is not None
        num_tokens = len(transcript.token_ids)
        total = num_tokens + len(transcript.request.token_ids)
        assert num_tokens <= sampling.max_tokens, f"{key}: {num_tokens} tokens"
        assert total <= self.world.max_model_len, f"{key}: {total} tokens in all"
        reason = final.finish_reason
        assert reason in ("stop", "length", "abort"), f"{key}: finish_reason {reason}"
        if reason == "length":
            full = num_tokens == sampling.max_tokens or total == self.world.max_model_len
            assert full, f"{key}: length after {num_tokens} of {sampling.max_tokens}"
        if reason == "stop" and transcript.stopped_at is None:
            enders = {*self.world.eos_token_ids, *sampling.stop_token_ids}
            assert final.stop_token_id in enders, f"{key}: stopped by {final.stop_token_id}"

    def _check_resident(self, key: tuple[str, int], transcript: Transcript) -> None:
        final, request = transcript.final, transcript.request
        assert final is not None
        settings = self.world.compression.resolve(request.kv, len(request.token_ids))
        if settings.mode != "fixed":
            return
        bound = settings.protected_len + settings.max_tail_len + self.world.block_size
        assert final.kv.max_resident_len <= bound, (
            f"{key}: {final.kv.max_resident_len} resident slots, bound {bound}"
        )

    def _check_prompt_logprobs(self, key: tuple[str, int], transcript: Transcript) -> None:
        """One entry per prompt token behind the first and behind the asked start, with sample 0."""
        request, entries = transcript.request, transcript.prompt_logprobs
        wanted = request.sampling.prompt_logprobs is not None and key[1] == 0
        if not wanted or not transcript.token_ids:
            assert entries is None, f"{key}: prompt logprobs that nobody asked for"
            return
        start, num_tokens = max(1, request.sampling.prompt_logprobs_start), len(request.token_ids)
        got = [None if entry is None else entry.token_id for entry in entries or []]
        start = min(start, num_tokens)
        expected = [None] * start + request.token_ids[start:]
        assert got == expected, f"{key}: prompt logprobs of {got}, not of {expected}"

    def check_no_starvation(self) -> None:
        """Steps are in proportion to the tokens there were, and to those computed again.

        Whoever loses its place has moved on: so places are lost in proportion to the tokens alone.
        """
        work = sum(len(transcript.token_ids) for transcript in self.transcripts.values())
        work += sum(len(transcript.request.token_ids) for transcript in self.transcripts.values())
        stats = self.scheduler.stats()
        again, num_lost = stats["num_recomputed_tokens"], stats["num_preemptions"]
        told = f"{self.num_steps} steps, {num_lost} places lost, {work} tokens, {again} again"
        assert self.num_steps <= 100 + 4 * (work + again), told
        assert num_lost <= 100 + 4 * work, told

    def check_all_home(self) -> None:
        """With every hold released and the cache flushed, every block is free again."""
        self.release(*{request_id for request_id, _ in self.transcripts})
        self.scheduler.flush_cache()
        self.scheduler.check_invariants()
        stats = self.scheduler.stats()
        assert stats["num_free"] == self.world.num_blocks, f"blocks leaked: {stats}"

    def check_outputs(self) -> None:
        """Who was never compacted got what its own logical tokens alone determine."""
        for key, transcript in self.transcripts.items():
            request = transcript.request
            seeds = self.row_seeds[request.sampling.seed]
            assert len(seeds) <= request.sampling.n, f"{key}: {len(seeds)} random streams"
            if transcript.token_ids and self.is_exact(request):
                got = transcript.token_ids
                replays = [self.replay(request, seed, len(got)) for seed in seeds]
                assert got in replays, f"{key}: {got} is none of {replays}"

    def is_exact(self, request: AddRequest) -> bool:
        """True when no compaction, due or early, can ever touch the request."""
        settings = self.world.compression.resolve(request.kv, len(request.token_ids))
        longest = len(request.token_ids) + request.sampling.max_tokens
        return not settings.compacts or longest - settings.protected_len <= settings.budget

    def replay(self, request: AddRequest, seed: int, max_tokens: int) -> list[int]:
        """At most `max_tokens` output tokens, from the logical tokens only."""
        sampling, world = request.sampling, self.world
        enders = set(sampling.stop_token_ids)
        enders |= set() if sampling.ignore_eos else set(world.eos_token_ids)
        logical = list(enumerate(request.token_ids))
        output: list[int] = []
        while len(output) < max_tokens:
            token_id = draw_token(
                seed, logical, len(output), sampling, world.vocab_size, world.eos_token_ids
            )
            logical.append((len(logical), token_id))
            output.append(token_id)
            if token_id in enders and len(output) >= sampling.min_tokens:
                break
        return output
