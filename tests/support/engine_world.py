"""The scheduler and the fake runner, joined as the engine joins them; clients may do anything.

Messages come between two steps, while a step may be in flight; compactions end when their stream
gets to them. Each draw is held against a request that is alone in the world (`lone_run`), and at
the end everything must be home. Knows nothing of what is asked for, or when.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from test_support.fake_runner import CompactionMark, FakeRunner
from test_support.lone_run import draw_token
from test_support.simulation import Event, Simulation, World
from test_support.situations import Situations

from zipage_lang.runtime.intake import sample_seed
from zipage_lang.runtime.messages import Abort, AddRequest
from zipage_lang.runtime.request import Request
from zipage_lang.runtime.step_plan import Sample, StepPlan, StepResult

Key = tuple[str, int]  # request, sample
MAX_AWAITED = 2


class CompactionLane:
    """The stream that compactions run on: batches end in order, `delay` results after their start.

    Without a delay they may end before their own step has: with the result of the one before. With
    one of -1 few are told before the next step is planned, which runs behind them.
    """

    def __init__(self, delay: int) -> None:
        self.num_held_up = 0  # results that pass before anything more is done
        self._delay = delay
        self._batches: collections.deque[tuple[int, tuple[int, ...]]] = collections.deque()
        self._num_results = 0

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, idents: tuple[int, ...]) -> None:
        self._batches.append((self._num_results + self._delay, idents))

    def go_on_behind(self) -> tuple[int, ...]:
        """What is told before the next step is planned."""
        if self._delay >= 0 or self.num_held_up or len(self._batches) != 1:
            return ()
        return self._batches.pop()[1] if len(self._batches[0][1]) <= MAX_AWAITED else ()

    def take_done(self) -> tuple[int, ...]:
        """What is told with the next result."""
        self._num_results += 1
        if self.num_held_up > 0:
            self.num_held_up -= 1
            return ()
        done: list[int] = []
        while self._batches and self._batches[0][0] < self._num_results:
            done += self._batches.popleft()[1]
        return tuple(done)

    def wait(self) -> tuple[int, ...]:
        done = tuple(ident for _, batch in self._batches for ident in batch)
        self._batches.clear()
        return done


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings(World):
    """A world, and when its compactions move their slots: in their step or when told as done."""

    compacts_late: bool = False

    def make_runner(self) -> FakeRunner:
        runner = super().make_runner()
        runner.compacts_late = self.compacts_late
        return runner


class EngineWorld(Simulation):
    """Steps as `runtime/engine.py` does; each message and each step is followed by all laws."""

    def __init__(self, world: EngineSettings) -> None:
        super().__init__(world)
        self.lane = CompactionLane(world.compaction_delay)
        self.situations = Situations(self.scheduler)
        self.is_broken = False  # something raised: the end need not be looked at
        self._groups: dict[str, str] = {}  # request -> its group
        self._tokens: dict[Key, list[int]] = {}  # all that is drawn, told or not, by sample

    # what clients send

    def send(self, request: AddRequest) -> None:
        with self._watched():
            self._note_groups([request])
            num_refused = len(self.refused)
            self.add(request)
            self.situations.count("refused", len(self.refused) - num_refused)

    def send_fork(self, parent_id: str, children: Sequence[AddRequest]) -> None:
        with self._met("fork", parent_id):
            self._note_groups(children)
            self.fork(parent_id, children)

    def send_stop(self, key: Key, num_output_tokens: int) -> None:
        """A stop of a sample that has said nothing yet is not heard: nobody can have seen why."""
        is_heard = bool(self.transcripts[key].token_ids)
        with self._met("stop" if is_heard else "stop unheard", key[0]):
            before = self.transcripts[key].stopped_at
            self.stop(*key, num_output_tokens)
            if not is_heard:
                self.transcripts[key].stopped_at = before

    def send_abort(self, request_id: str) -> None:
        with self._met("abort", request_id):
            self.abort(request_id)
        self._assert_gone([request_id])

    def send_group_abort(self, group_id: str) -> None:
        members = [name for name, group in self._groups.items() if group and group == group_id]
        for name in members:
            self.situations.note("abort group", self.places(name))
        with self._watched():
            self.scheduler.abort(Abort(group_ids=[group_id]))
        self._assert_gone(members)

    def send_release(self, request_id: str) -> None:
        with self._met("release", request_id):
            self.release(request_id)
        assert request_id not in self.scheduler._state.held, f"{request_id} is still held"

    def send_flush(self) -> None:
        with self._watched():
            self.situations.count("flush")
            self.scheduler.flush_cache()
        assert self.scheduler.stats()["num_tree_only"] == 0, "a flush left what nobody holds"

    def look(self, max_cells: int, max_nodes: int, max_requests: int) -> None:
        """A picture is taken: it is bounded, adds up, and changes nothing."""
        with self._watched():
            self.situations.count("snapshot")
            before = self.scheduler.stats()
            picture = self.scheduler.snapshot(
                before, max_cells=max_cells, max_nodes=max_nodes, max_requests=max_requests
            )
            assert self.scheduler.stats() == before, "looking changed something"
            assert sum(picture.grid.num_by_owner) == self.world.num_blocks
            assert len(picture.grid.cells) <= max_cells
            assert len(picture.nodes) == min(max_nodes, picture.num_nodes)
            assert len(picture.requests) == min(max_requests, picture.num_requests)
            assert 0 <= picture.resident_len <= picture.logical_len

    def act(self, event: Event) -> None:
        """Something of a load that was made for any simulation."""
        with self._watched():
            event.act(self)
        self._note_groups([transcript.request for transcript in self.transcripts.values()])

    # stepping

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def step(self) -> StepPlan:
        with self._watched():
            plan = self._launch_next()
            is_idle = plan.is_empty
            if is_idle and not self._in_flight:
                self._tell_compacted(self.lane.wait())
            while len(self._in_flight) > self.world.num_ahead or (is_idle and self._in_flight):
                self._apply_oldest()
            self.num_steps += 1
        return plan

    def _launch_next(self) -> StepPlan:
        self._tell_compacted(self.lane.go_on_behind())
        had_work = self.scheduler.has_work
        plan = self.scheduler.schedule()
        is_result_coming = bool(self._in_flight) or len(self.lane) > 0
        assert not (had_work and plan.is_idle and not is_result_coming), (
            f"step {plan.step} is empty while work waits"
        )
        self._check_budget(plan)
        if plan.is_empty:
            return plan
        self.situations.note_plan(plan)
        result = self.runner.run(plan)
        self._check_draws(plan, result)
        self._in_flight.append((plan, result))
        if plan.compactions:
            self.lane.add(result.done_compactions)
        self.scheduler.check_invariants()
        return plan

    def _apply_oldest(self) -> None:
        plan, result = self._in_flight.popleft()
        done = self.lane.take_done()
        self.runner.finish_compactions(done)
        self.scheduler.apply(plan, dataclasses.replace(result, done_compactions=done))

    def _tell_compacted(self, idents: tuple[int, ...]) -> None:
        self.runner.finish_compactions(idents)
        self.scheduler.note_compacted(idents)

    # laws

    def _check_draws(self, plan: StepPlan, result: StepResult) -> None:
        drawn = {sample.row: sample for sample in result.samples}
        for planned in self.scheduler._in_flight[plan.step].chunks:
            rows = planned.chunk.sample_rows
            for request, row in zip(planned.sampling_requests, rows, strict=True):
                self._check_draw(request, drawn[row], self.runner.compacted_rows.get(row))

    def _check_draw(self, request: Request, sample: Sample, mark: CompactionMark | None) -> None:
        """The token is what the request's own tokens and compactions give, whoever else is served.

        That a mark's positions are those of a lone run is the runner's own law.
        """
        key = (request.request_id, request.sample_index)
        tokens = self._tokens.setdefault(key, list(request.token_ids))
        num_known = len(request.token_ids) + request.num_pending - 1
        assert len(tokens) == num_known, f"{key}: {len(tokens)} tokens are drawn, {num_known} known"
        resident = list(range(num_known))
        if mark is not None:
            assert mark.policy == request.kv.policy, f"{key}: {mark.policy}"
            assert mark.protected_len == request.kv.protected_len, f"{key}: {mark.protected_len}"
            newest = range(mark.logical_len, num_known)
            resident = [*range(mark.protected_len), *sorted(mark.positions), *newest]
        self.situations.count(f"drew from a {'plain' if mark is None else 'compacted'} state")
        wanted = draw_token(
            sample_seed(request.sampling.seed or 0, request.sample_index),
            [(position, tokens[position]) for position in resident],
            num_known - request.num_prompt_tokens,
            request.sampling,
            self.world.vocab_size,
            self.world.eos_token_ids,
        )
        assert sample.token_id == wanted, f"{key}: drew {sample.token_id}, alone it is {wanted}"
        tokens.append(wanted)

    def check_outputs(self) -> None:
        """What was told is what was drawn; and who can't be compacted says what it says alone."""
        for key, transcript in self.transcripts.items():
            request, told = transcript.request, transcript.token_ids
            drawn = self._tokens.get(key, request.token_ids)[len(request.token_ids) :]
            assert told == drawn[: len(told)], f"{key}: told {told}, drawn {drawn}"
            if self.is_exact(request):
                seed = sample_seed(request.sampling.seed or 0, key[1])
                alone = self.replay(request, seed, len(told))
                assert told == alone, f"{key}: told {told}, alone it says {alone}"

    def _assert_gone(self, request_ids: Sequence[str]) -> None:
        """Aborted: they hold nothing but what a compaction that is under way still works on."""
        state = self.scheduler._state
        for request_id in request_ids:
            assert request_id not in self.scheduler._by_id
            assert request_id not in state.held
        left = [
            each
            for each in state.requests()
            if each.request_id in request_ids and each not in state.parting
        ]
        assert not left, f"aborted, yet here: {left}"

    # the end

    def drain(self) -> None:
        """Everyone ends and was told once, everything comes home."""
        with self._watched():
            for _ in range(self._most_steps()):
                if not self.has_work:
                    break
                self.step()
            assert not self.has_work, f"still at work: {self.scheduler.stats()}"
            self.check_all_ended()
            self.check_outputs()
            self.situations.note_stats(self.scheduler.stats())
            self.check_all_home()
            self._check_nothing_left()

    def _most_steps(self) -> int:
        """A turn may cost all that a displaced request has computed, a token and a compaction at a
        time; whoever needs more than that for all its turns goes round in circles."""
        num_tokens = sum(
            len(each.request.token_ids) + each.request.sampling.max_tokens
            for each in self.transcripts.values()
        )
        num_turns = 1 + num_tokens // self.world.scheduler.turn_len
        per_turn = self.world.max_model_len * (2 + max(0, self.world.compaction_delay))
        return 200 + 4 * num_tokens + num_turns * per_turn

    def _check_nothing_left(self) -> None:
        state, stats = self.scheduler._state, self.scheduler.stats()
        assert stats["num_free_query_slots"] == self.world.num_query_slots, stats
        assert stats["num_free_host_blocks"] == self.world.num_host_blocks, stats
        assert state.num_free_rows == self.world.scheduler.max_running, stats
        queues = (state.running, state.waiting, state.held, state.parting, state.compacting)
        assert not any(len(queue) for queue in queues), f"left behind: {queues}"
        assert not self.scheduler._by_id, f"left behind: {self.scheduler._by_id}"
        sizes = self.scheduler.table_sizes()
        assert not any(sizes.values()), f"left behind: {sizes}"
        assert not self.scheduler._in_flight, f"never applied: {self.scheduler._in_flight}"

    # watching

    def names(self) -> list[str]:
        """Everyone that was ever taken in."""
        return list(dict.fromkeys(name for name, _ in self.transcripts))

    def places(self, request_id: str) -> list[str]:
        """Where a request is: see `situations.PLACES`."""
        in_flight = [plan for plan, _ in self._in_flight]
        places = self.situations.places(request_id, in_flight)
        if places:
            return places
        first = self.transcripts.get((request_id, 0))
        if first is None:
            return ["unknown"]
        if first.final is None or first.final.kv.compactions == 0:
            return ["ended"]
        return ["ended", "ended compacted", *self._tree_places(first.request, first.counted)]

    def _tree_places(self, request: AddRequest, said: list[int]) -> list[str]:
        settings = self.world.compression.resolve(request.kv, len(request.token_ids))
        match = self.scheduler._state.cache.match(
            [*request.token_ids, *said],
            namespace=request.namespace,
            signature=settings.signature(),
        )
        return ["compacted in the tree"] if match.is_compacted else []

    def _note_groups(self, requests: Sequence[AddRequest]) -> None:
        self._groups.update({each.request_id: each.group_id for each in requests})

    @contextlib.contextmanager
    def _met(self, verb: str, request_id: str) -> Iterator[None]:
        self.situations.note(verb, self.places(request_id))
        with self._watched():
            yield

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """All laws hold afterwards, and what is told is taken in."""
        try:
            yield
            self.scheduler.check_invariants()
            self.receive()
        except BaseException:
            self.is_broken = True
            raise
