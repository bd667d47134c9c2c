"""A simulation whose runner now and then finds no memory for a row, as the model runner tells it.

What could not be done leaves a hole: slots that were never written, copies and swaps that never
were made. Whoever reads one fails an assert of the fake runner. Knows nothing of real memory.
"""

import dataclasses
import random

import msgspec
from test_support.fake_runner import FakeRunner
from test_support.simulation import Simulation, World

from zipage_lang.runtime.messages import TokenOutput
from zipage_lang.runtime.scheduler import Scheduler
from zipage_lang.runtime.step_plan import Chunk, StepPlan, StepResult, StepTrouble

ERROR = "the simulated card is out of memory"


@dataclasses.dataclass(slots=True)
class Losses:
    """What one step does not do."""

    rows: set[int] = dataclasses.field(default_factory=set)
    host_ids: set[int] = dataclasses.field(default_factory=set)
    block_ids: set[int] = dataclasses.field(default_factory=set)


class ScarceRunner:
    """A fake runner that leaves undone what `rng` picks, and tells the scheduler at once."""

    def __init__(self, runner: FakeRunner, scheduler: Scheduler, seed: int, share: float) -> None:
        """share: of all things that could fail, how many do."""
        self._runner, self._scheduler = runner, scheduler
        self._rng, self._share = random.Random(seed), share
        self.num_failed_rows = 0
        self.num_lost_hosts = 0

    def run(self, plan: StepPlan) -> StepResult:
        losses = self._pick(plan)
        result = self._runner.run(self._without(plan, losses))
        for item in plan.compactions:  # told as done all the same
            if item.row in losses.rows:
                self._runner.rows[item.row].block_ids = list(item.block_ids)
        idents = tuple(item.ident for item in plan.compactions)
        if losses.rows or losses.host_ids or self._happens():
            self._tell(plan, losses)
        return dataclasses.replace(result, done_compactions=idents)

    def finish_compactions(self, idents: tuple[int, ...]) -> None:
        self._runner.finish_compactions(idents)

    def _tell(self, plan: StepPlan, losses: Losses) -> None:
        self.num_failed_rows += len(losses.rows)
        self.num_lost_hosts += len(losses.host_ids)
        trouble = StepTrouble(
            step=plan.step,
            num_refusals=1,
            failed_rows=tuple(losses.rows),
            lost_host_ids=tuple(losses.host_ids),
            error=ERROR,
        )
        self._scheduler.note_trouble(plan, trouble)
        self._scheduler.check_invariants()

    def _happens(self) -> bool:
        return self._rng.random() < self._share

    def _pick(self, plan: StepPlan) -> Losses:
        losses = Losses()
        losses.host_ids = {swap.host_id for swap in plan.swap_outs if self._happens()}
        filled = [copy.dst for copy in plan.block_copies if self._happens()]
        filled += [
            swap.block_id
            for swap in plan.swap_ins
            if swap.host_id in losses.host_ids or self._happens()
        ]
        losses.block_ids = set(filled)
        losses.rows = {setup.row for setup in plan.row_setups if self._happens()}
        losses.rows |= {item.row for item in plan.compactions if self._happens()}
        losses.rows |= {item.row for item in plan.chunks if self._happens()}
        for update in plan.block_updates:
            if not losses.block_ids.isdisjoint(update.block_ids):
                losses.rows.add(update.row)
        for chunk in plan.chunks:
            if chunk.row in losses.rows:
                losses.rows.update(chunk.sample_rows)
        return losses

    def _without(self, plan: StepPlan, losses: Losses) -> StepPlan:
        chunks = tuple(_drawing_without(c, losses) for c in plan.chunks if c.row not in losses.rows)
        host_ids, block_ids = losses.host_ids, losses.block_ids
        return dataclasses.replace(
            plan,
            swap_outs=tuple(s for s in plan.swap_outs if s.host_id not in host_ids),
            swap_ins=tuple(s for s in plan.swap_ins if s.block_id not in block_ids),
            block_copies=tuple(c for c in plan.block_copies if c.dst not in block_ids),
            chunks=chunks,
            compactions=tuple(c for c in plan.compactions if c.row not in losses.rows),
        )


def _drawing_without(chunk: Chunk, losses: Losses) -> Chunk:
    rows = tuple(row for row in chunk.sample_rows if row not in losses.rows)
    return msgspec.structs.replace(chunk, sample_rows=rows)


class ScarceSimulation(Simulation):
    """As `Simulation`, where samples may also end with ERROR."""

    runner: ScarceRunner

    def __init__(self, world: World, seed: int, share: float) -> None:
        super().__init__(world)
        self.runner = ScarceRunner(self.runner, self.scheduler, seed, share)
        self.failed: set[tuple[str, int]] = set()

    def receive(self) -> list[TokenOutput]:
        outputs = super().receive()
        self.failed.update(
            (output.request_id, output.sample_index) for output in outputs if output.error == ERROR
        )
        return outputs

    def check_all_ended(self) -> None:
        """Who failed has its one error, all others end as ever."""
        for key in self.failed:
            final = self.transcripts[key].final
            assert final is not None, key
            assert final.error == ERROR, final
            assert final.finish_reason is None, final
        everyone = self.transcripts
        self.transcripts = {key: sent for key, sent in everyone.items() if key not in self.failed}
        super().check_all_ended()
        self.transcripts = everyone
