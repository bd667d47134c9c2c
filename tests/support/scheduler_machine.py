"""A hypothesis state machine whose rules are what clients may send, and time.

Worlds are tiny, so that every act of the scheduler happens often: a few blocks, rows and rings.
Knows nothing of what the scheduler should answer; `EngineWorld` holds it to that.
"""

from collections import Counter
from typing import Any, ClassVar

import hypothesis
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from test_support.engine_world import EngineSettings, EngineWorld
from test_support.random_loads import inherited_kv
from test_support.simulation import POLICY_QUERIES
from test_support.situations import PLACES

from zipage_lang.runtime.config import CompressionConfig, SchedulerConfig
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams

MAX_LIVE = 14  # samples that have not ended, before new ones are asked for
POLICIES = tuple(POLICY_QUERIES)
NAMES = st.sampled_from([0, 0, 0, 1, 2, 5, 11, 17])  # picks one of however many; 0: the newest
RARE_PLACES = (
    "in host memory",
    "on its way to host memory",
    "on its way back from host memory",
    "compacting into copies",
    "at its line without a query slot",
    "stalled",
)
SOMEWHERE = st.sampled_from([*PLACES, *RARE_PLACES * 2, *["compacting into copies"] * 4])
PATIENCE = st.sampled_from([0, 0, 20, 60])  # steps that are made to find someone at a place
HOLD = st.sampled_from([False, False, True])
TOKENS = st.lists(st.integers(0, 2), max_size=5)


@st.composite
def tight_worlds(draw: st.DrawFn, num_ahead: int) -> EngineSettings:
    """Where memory is short all the time."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    num_query_slots = draw(st.sampled_from([1, 1, 2, 8]))
    return EngineSettings(
        num_blocks=draw(st.sampled_from([12, 20, 28, 40, 80])) // block_size,
        block_size=block_size,
        num_host_blocks=draw(st.sampled_from([0, 4, 16, 64])),
        num_query_slots=num_query_slots,
        max_model_len=draw(st.sampled_from([24, 64, 64])),
        vocab_size=draw(st.sampled_from([3, 50])),
        eos_token_ids=draw(st.sampled_from([(), (0,)])),
        prefix_caching=draw(st.sampled_from([True, True, True, False])),
        num_ahead=num_ahead,
        compacts_late=draw(st.booleans()),
        compaction_delay=draw(st.sampled_from([-1, 0, 2, 5])),
        scheduler=draw(scheduler_configs()),
        compression=draw(compression_configs(num_query_slots)),
    )


@st.composite
def lasting_worlds(draw: st.DrawFn, num_ahead: int) -> EngineSettings:
    """Where states of ended requests stay for a while, most of them compacted."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    return EngineSettings(
        num_blocks=draw(st.sampled_from([60, 120])) // block_size,
        block_size=block_size,
        num_host_blocks=draw(st.sampled_from([0, 32])),
        vocab_size=draw(st.sampled_from([3, 50])),
        num_ahead=num_ahead,
        compacts_late=draw(st.booleans()),
        compaction_delay=draw(st.sampled_from([-1, 0, 3, 6])),
        scheduler=SchedulerConfig(max_running=4, max_step_tokens=16, growth_reserve=0),
        compression=CompressionConfig(
            kv_mode=draw(st.sampled_from(["fixed", "fixed", "adaptive"])),
            kv_budget=5,
            evict_interval=3,
            protect=draw(st.sampled_from(["prompt", "none"])),
            policy=draw(st.sampled_from(POLICIES)),
        ),
    )


@st.composite
def sharing_worlds(draw: st.DrawFn, num_ahead: int) -> EngineSettings:
    """Where samples and forks compact what they share, for a long time, into copies."""
    block_size = draw(st.sampled_from([2, 4]))
    return EngineSettings(
        num_blocks=draw(st.sampled_from([60, 100])) // block_size,
        block_size=block_size,
        num_host_blocks=draw(st.sampled_from([0, 32])),
        num_query_slots=draw(st.sampled_from([1, 4])),
        num_ahead=num_ahead,
        compacts_late=draw(st.booleans()),
        compaction_delay=draw(st.sampled_from([3, 8])),
        scheduler=SchedulerConfig(max_running=6, max_step_tokens=16, growth_reserve=0),
        compression=CompressionConfig(
            kv_mode="fixed",
            kv_budget=draw(st.sampled_from([4, 7])),
            evict_interval=draw(st.sampled_from([2, 4])),
            policy=draw(st.sampled_from(POLICIES)),
            protect="none",
        ),
    )


@st.composite
def displacing_worlds(draw: st.DrawFn, num_ahead: int) -> EngineSettings:
    """Where there is room for one or two, host memory for the others, and one query ring."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    return EngineSettings(
        num_blocks=draw(st.sampled_from([28, 36, 48])) // block_size,
        block_size=block_size,
        num_host_blocks=64,
        num_query_slots=draw(st.sampled_from([1, 2])),
        num_ahead=num_ahead,
        compacts_late=draw(st.booleans()),
        compaction_delay=draw(st.sampled_from([-1, 0, 2, 5])),
        scheduler=SchedulerConfig(
            max_running=draw(st.sampled_from([3, 5])),
            max_step_tokens=16,
            turn_len=draw(st.sampled_from([2, 8, 2048])),
            growth_reserve=0,
        ),
        compression=CompressionConfig(
            kv_mode=draw(st.sampled_from(["off", "fixed", "adaptive"])),
            kv_budget=6,
            evict_interval=4,
            policy=draw(st.sampled_from(["zipage", "gkv", "random"])),
        ),
    )


def scheduler_configs() -> st.SearchStrategy[SchedulerConfig]:
    return st.builds(
        SchedulerConfig,
        max_running=st.sampled_from([1, 2, 3, 4, 8]),
        max_step_tokens=st.sampled_from([1, 3, 5, 16, 64]),
        max_chunk_len=st.sampled_from([None, None, 1, 3]),
        order=st.sampled_from(["fcfs", "lpm"]),
        max_skips=st.sampled_from([1, 3, 64]),
        turn_len=st.sampled_from([1, 3, 8, 2048]),
        growth_reserve=st.sampled_from([0, 4, 256]),
        max_waiting=st.sampled_from([3, 100, 100, 100]),
    )


def compression_configs(num_query_slots: int) -> st.SearchStrategy[CompressionConfig]:
    return st.builds(
        CompressionConfig,
        kv_mode=st.sampled_from(["off", "fixed", "adaptive"]),
        kv_budget=st.sampled_from([4, 6, 8]),
        evict_interval=st.sampled_from([1, 2, 4, 6]),
        policy=st.sampled_from(POLICIES),
        protect=st.sampled_from(["prompt", "prompt", "none"]),
        num_query_slots=st.just(num_query_slots),
    )


KV = st.sampled_from([None, None]) | st.builds(
    KVParams,
    mode=st.sampled_from(["off", "fixed", "fixed", "adaptive", None]),
    budget=st.sampled_from([None, 4, 5, 7]),
    interval=st.sampled_from([None, 1, 3, 4]),
    policy=st.sampled_from([None, *POLICIES]),
    protect=st.sampled_from([None, "prompt", "none"]),
    protected_len=st.sampled_from([None, None, 0, 3]),
    reuse=st.sampled_from([None, "exact", "compacted"]),
)


# Fields of SamplingParams; the machine gives each request a seed of its own.
SAMPLING = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from([1, 2, 5, 12, 20, 30]),
        "temperature": st.sampled_from([0.0, 1.0]),
    },
    optional={
        "n": st.sampled_from([1, 2, 3, 6]),
        "ignore_eos": st.just(True),
        "min_tokens": st.just(1),
        "stop_token_ids": st.just([1]),
        "logprobs": st.just(0),
        "prompt_logprobs": st.just(0),
        "prompt_logprobs_start": st.just(3),
    },
)


class SchedulerMachine(RuleBasedStateMachine):
    """Counts what all its runs came through in `totals`; a subclass has counts of its own."""

    worlds: ClassVar[st.SearchStrategy[EngineSettings]]
    world_type: ClassVar[type[EngineWorld]]
    totals: ClassVar[Counter[str]]
    num_steps: ClassVar[int]

    @initialize(
        data=st.data(),
        texts=st.lists(
            st.lists(st.integers(0, 2), min_size=3, max_size=14), min_size=2, max_size=2
        ),
    )
    def begin(self, data: st.DataObject, texts: list[list[int]]) -> None:
        self.world = self.world_type(data.draw(self.worlds))
        self.texts = texts
        self.asked: dict[str, AddRequest] = {}

    # rules: what clients send

    @precondition(lambda self: self.num_live < MAX_LIVE)
    @rule(
        text=st.integers(0, 1),
        cut=st.integers(1, 14),
        more=TOKENS,
        sampling=SAMPLING,
        kv=KV,
        namespace=st.sampled_from(["", "", "", "other"]),
        tenant=st.sampled_from(["", "a", "b"]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        group_id=st.sampled_from(["", "", "g", "h"]),
        hold=HOLD,
    )
    def add(self, text, cut, more, sampling, kv, namespace, tenant, priority, group_id, hold):
        self.send(
            AddRequest(
                request_id=self.new_name(),
                token_ids=[*self.texts[text][:cut], *more],
                sampling=self.seeded(sampling),
                kv=kv,
                namespace=namespace,
                tenant=tenant,
                priority=priority,
                group_id=group_id,
                hold=hold and sampling.get("n", 1) == 1,
            )
        )

    @precondition(lambda self: self.asked and self.num_live < MAX_LIVE)
    @rule(
        name=NAMES,
        place=st.sampled_from(
            ["compacted in the tree", "compacted in the tree", "ended", "decoding"]
        ),
        more=TOKENS,
        sampling=SAMPLING,
        hold=HOLD,
        num_steps=st.sampled_from([0, 20, 100]),
    )
    def go_on_with_a_conversation(self, name, place, more, sampling, hold, num_steps):
        """The next turn, perhaps when all has come to rest: what was said before, and more."""
        self.run_on(num_steps)
        parent = self.find(name, place)
        self.send(
            AddRequest(
                request_id=self.new_name(),
                token_ids=[*self.said(parent), *more],
                sampling=self.seeded(sampling),
                kv=inherited_kv(self.asked[parent]),
                namespace=self.asked[parent].namespace,
                hold=hold and sampling.get("n", 1) == 1,
            )
        )

    @precondition(lambda self: self.asked and self.num_live < MAX_LIVE)
    @rule(
        name=NAMES,
        place=SOMEWHERE,
        patience=PATIENCE,
        cut=st.integers(0, 3),
        more=st.lists(TOKENS, min_size=1, max_size=3),
        sampling=SAMPLING,
        kv=st.none() | KV,
        hold=HOLD,
        group_id=st.sampled_from(["", "g"]),
    )
    def fork(self, name, place, patience, cut, more, sampling, kv, hold, group_id):
        """Branches of a state, or of what was said before its last `cut` tokens."""
        parent = self.find(name, place, patience)
        known = self.said(parent) if parent in self.asked else [1, 2]
        family = self.asked.get(parent)
        known = known[: max(1, len(known) - cut)]
        children = [
            AddRequest(
                request_id=self.new_name(),
                token_ids=[*known, *suffix],
                sampling=self.seeded(sampling),
                kv=kv if kv is not None or family is None else inherited_kv(family),
                namespace="" if family is None else family.namespace,
                group_id=group_id,
                hold=hold and sampling.get("n", 1) == 1,
            )
            for suffix in more
        ]
        for child in children:
            self.asked[child.request_id] = child
        self.world.send_fork(parent, children)

    @precondition(lambda self: self.asked)
    @rule(name=NAMES, place=SOMEWHERE, patience=PATIENCE, back=st.integers(-1, 4))
    def stop(self, name, place, patience, back):
        """A stop string was seen some tokens ago; or a client talks nonsense."""
        request_id = self.find(name, place, patience)
        keys = [key for key in self.world.transcripts if key[0] == request_id]
        if keys:
            key = keys[name % len(keys)]
            num_said = len(self.world.transcripts[key].token_ids)
            self.world.send_stop(key, max(0, num_said - back))

    @precondition(lambda self: self.asked)
    @rule(name=NAMES, place=SOMEWHERE, patience=PATIENCE, whole_group=st.booleans())
    def abort(self, name, place, patience, whole_group):
        request_id = self.find(name, place, patience)
        if whole_group:
            request = self.asked.get(request_id)
            self.world.send_group_abort("no such group" if request is None else request.group_id)
        else:
            self.world.send_abort(request_id)

    @precondition(lambda self: self.asked)
    @rule(
        name=NAMES,
        what=st.sampled_from(["release", "release", "look", "hold up", "hold up", "flush"]),
        bound=st.sampled_from([0, 2, 4096]),
    )
    def do_something_rare(self, name, what, bound):
        match what:
            case "release":
                self.world.send_release(self.find(name, "held"))
            case "flush":
                self.world.send_flush()
            case "look":
                self.world.look(max_cells=bound, max_nodes=bound, max_requests=bound)
            case _:
                self.world.lane.num_held_up = 1 + name % 8

    # rules: time

    @precondition(lambda self: self.world.has_work)
    @rule(num_steps=st.integers(1, 10))
    def run_on(self, num_steps):
        for _ in range(num_steps):
            if self.world.has_work:
                self.world.step()

    @precondition(lambda self: self.world.has_work)
    @rule(num_steps=st.integers(1, 3))
    def run_a_little(self, num_steps):
        self.run_on(num_steps)

    # the end

    def teardown(self) -> None:
        world = getattr(self, "world", None)
        if world is None or world.is_broken:
            return
        world.drain()
        type(self).num_steps += world.num_steps
        type(self).totals.update(world.situations.counts)
        type(self).totals["samples asked for"] += len(world.transcripts)

    # helpers

    @property
    def num_live(self) -> int:
        return sum(each.final is None for each in self.world.transcripts.values())

    def send(self, request: AddRequest) -> None:
        self.asked[request.request_id] = request
        self.world.send(request)

    def new_name(self) -> str:
        self.num_named = getattr(self, "num_named", 0) + 1
        return f"r{self.num_named}"

    def seeded(self, sampling: dict[str, Any]) -> SamplingParams:
        return SamplingParams(seed=self.num_named, **sampling)

    def find(self, name: int, place: str, patience: int = 0) -> str:
        """A request at that place, perhaps some steps later; else one that is alive, or any."""
        if place == "unknown":
            return "nobody"
        for _ in range(patience):
            if self.at(place) or not self.world.has_work:
                break
            self.world.step()
        live = [each for each in self.asked if "ended" not in self.world.places(each)]
        choice = self.at(place) or live or list(self.asked)
        return choice[-1 - name % len(choice)]

    def at(self, place: str) -> list[str]:
        return [each for each in self.asked if place in self.world.places(each)]

    def said(self, request_id: str) -> list[int]:
        """What the request's first sample has said so far, prompt included."""
        request = self.asked[request_id]
        transcript = self.world.transcripts.get((request_id, 0))
        return [*request.token_ids, *(transcript.counted if transcript else [])]


def play_machine(
    num_ahead: int,
    first_seed: int,
    num_steps: int,
    world_type: type[EngineWorld] = EngineWorld,
    **options: Any,
) -> type[SchedulerMachine]:
    """Runs of the machine until they made `num_steps` steps; the seed determines them all.

    A run that breaks a law is shrunk and printed as the rules that lead to it. options: for
    hypothesis.settings.
    """
    given = {"max_examples": 60, "stateful_step_count": 50, "deadline": None, "database": None}
    settings = hypothesis.settings(
        **given | {"suppress_health_check": list(HealthCheck)} | options  # type: ignore[arg-type]
    )
    worlds = st.one_of(
        tight_worlds(num_ahead),
        tight_worlds(num_ahead),
        lasting_worlds(num_ahead),
        sharing_worlds(num_ahead),
        sharing_worlds(num_ahead),
        displacing_worlds(num_ahead),
        displacing_worlds(num_ahead),
    )
    facts = {"worlds": worlds, "world_type": world_type, "totals": Counter(), "num_steps": 0}
    played = type("Played", (SchedulerMachine,), facts)
    seed = first_seed
    while played.num_steps < num_steps:
        run_state_machine_as_test(hypothesis.seed(seed)(played), settings=settings)
        seed += 1
    return played
