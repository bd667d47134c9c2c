"""Runs a sweep: full KV first, then every setting, on the same problems with the same seeds.

Knows nothing of checkers, statistics or how an engine runs.
"""

import dataclasses
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zipage_lang.evaluation.grading import Grader
from zipage_lang.evaluation.grid import FULL, Grid, Setting
from zipage_lang.evaluation.problem import EvalProblem, Task
from zipage_lang.evaluation.run_file import Header, Lap, RunFile, Sample, read_run
from zipage_lang.evaluation.runner import Job, Runner
from zipage_lang.evaluation.sweep_progress import SweepProgress
from zipage_lang.runtime.sampling_params import SamplingParams

RUNS_FOLDER = "runs"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """One task under one setting: one file, one row of the table. Told apart by identity."""

    task: Task
    setting: Setting

    @property
    def name(self) -> str:
        return f"{self.task.name} {self.setting.name}"

    @property
    def file_name(self) -> str:
        return f"{self.task.name}--{self.setting.name}.jsonl".replace("/", "_")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What is run."""

    tasks: Sequence[Task]
    grid: Grid
    sampling: SamplingParams  # n: samples per problem; seed: of the sweep; not its max_tokens
    max_tokens: int | None  # None: what the context leaves
    identity: Mapping[str, Any]  # of the model: results of another one are not gone on with
    mean_lens: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by task name
    part: tuple[int, int] = (0, 1)  # this run takes cells index, index + count, ...
    is_mixed: bool = False  # cells share the engine: faster, but no rate of their own


class Sweep:
    """Plays a plan on a runner; results go into one file per cell, finished ones are skipped."""

    def __init__(
        self,
        plan: SweepPlan,
        runner: Runner,
        grader: Grader,
        folder: Path,
        progress: SweepProgress,
    ) -> None:
        self._plan, self._runner, self._grader = plan, runner, grader
        self._runs, self._progress = folder / RUNS_FOLDER, progress
        self._prompts: dict[tuple[str, str], list[int]] = {}
        self._num_cells = 0

    def run(self) -> None:
        """Raises ValueError where files hold other results, EvaluationError where the engine ends a
        request. What was finished before that is kept."""
        tasks, grid = self._plan.tasks, self._plan.grid
        self._run_cells([Cell(task, FULL) for task in tasks])
        rest = []
        for task in tasks:
            mean_len = self._mean_len(task) if grid.policies and grid.needs_mean_len else None
            rest += [Cell(task, setting) for setting in grid.settings(mean_len)]
        self._run_cells(rest)

    def _run_cells(self, cells: list[Cell]) -> None:
        mine = self._take_part(cells)
        if self._plan.is_mixed:
            self._run_together(mine)
            return
        for cell in mine:
            self._run_alone(cell)

    def _take_part(self, cells: list[Cell]) -> list[Cell]:
        index, count = self._plan.part
        start, self._num_cells = self._num_cells, self._num_cells + len(cells)
        return [cell for number, cell in enumerate(cells, start) if number % count == index]

    def _run_alone(self, cell: Cell) -> None:
        """With the engine to itself, so that its rate and its memory are its own."""
        with self._open(cell) as file:
            missing = self._missing(cell, file)
            self._progress.begin(cell.name, len(missing) * self._plan.sampling.n)
            if not missing:
                return
            self._runner.flush_cache()
            watch = _Watch(self._runner)
            try:
                self._play({cell: file})
            finally:
                file.add(watch.lap())
                self._keep({cell: file}, self._grader.wait())

    def _run_together(self, cells: list[Cell]) -> None:
        files: dict[Cell, RunFile] = {}
        try:
            for cell in cells:
                files[cell] = self._open(cell)
            missing = sum(len(self._missing(cell, files[cell])) for cell in cells)
            self._progress.begin(f"{len(cells)} cells", missing * self._plan.sampling.n)
            self._play(files)
        finally:
            self._keep(files, self._grader.wait())
            for file in files.values():
                file.close()

    def _play(self, files: Mapping[Cell, RunFile]) -> None:
        for output in self._runner.run(self._jobs(files)):
            cell, problem = output.key
            self._grader.add(cell, problem, output)
            self._keep(files, self._grader.take_graded())
            self._progress.note_tokens(self._runner.num_tokens)

    def _keep(self, files: Mapping[Cell, RunFile], graded: Iterator[tuple[object, Sample]]) -> None:
        for owner, sample in graded:
            assert isinstance(owner, Cell)
            files[owner].add(sample)
            self._progress.count(sample.correct)

    def _jobs(self, files: Mapping[Cell, RunFile]) -> Iterator[Job]:
        for cell, file in files.items():
            kv = cell.setting.kv()
            for problem in self._missing(cell, file):
                token_ids = self._prompt(cell.task, problem)
                yield Job((cell, problem), token_ids, self._sampling(problem, token_ids), kv)

    def _missing(self, cell: Cell, file: RunFile) -> list[EvalProblem]:
        problems = {problem.id: problem for problem in cell.task.problems}
        ids = file.missing_problems(list(problems), self._plan.sampling.n)
        return [problems[problem_id] for problem_id in ids]

    def _prompt(self, task: Task, problem: EvalProblem) -> list[int]:
        key = (task.name, problem.id)
        if key not in self._prompts:
            self._prompts[key] = encode_prompt(self._runner, problem)
        return self._prompts[key]

    def _sampling(self, problem: EvalProblem, token_ids: list[int]) -> SamplingParams:
        """Sample i of a problem has the same seed in every cell."""
        sampling = self._plan.sampling
        assert sampling.seed is not None
        room = self._runner.ready.max_model_len - len(token_ids)
        if room < 1:
            raise ValueError(
                f"problem {problem.id!r} has {len(token_ids)} tokens, but the context holds "
                f"{self._runner.ready.max_model_len}"
            )
        wanted = min(room, self._plan.max_tokens or room)
        return sampling.replace(max_tokens=wanted, seed=problem_seed(sampling.seed, problem.id))

    def _open(self, cell: Cell) -> RunFile:
        return RunFile(self._runs / cell.file_name, self._header(cell))

    def _header(self, cell: Cell) -> Header:
        setting = dataclasses.asdict(cell.setting)
        asked_budget = setting.pop("asked_budget")
        sampling = self._plan.sampling
        return Header(
            task=cell.task.name,
            setting=setting,
            asked_budget=asked_budget,
            sampling={
                **self._plan.identity,
                "samples": sampling.n,
                "seed": sampling.seed,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_tokens": self._plan.max_tokens,
            },
        )

    def _mean_len(self, task: Task) -> float:
        """Of full KV's outputs: as given, else as found in the folder."""
        if task.name in self._plan.mean_lens:
            return self._plan.mean_lens[task.name]
        path = self._runs / Cell(task, FULL).file_name
        samples = read_run(path).samples if path.exists() else ()
        lens = [sample.tokens for sample in samples]
        if len(lens) < len(task.problems) * self._plan.sampling.n:
            raise ValueError(
                f"budgets in % need the full-KV results of {task.name!r}, which are not in "
                f"{self._runs}; run its full-KV part first (without --policy), or give "
                f"--mean-length {task.name}=TOKENS"
            )
        return sum(lens) / len(lens)


class _Watch:
    """What the engine does between two looks."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._before = runner.stats()
        self._num_tokens = runner.num_tokens
        self._started = time.perf_counter()

    def lap(self) -> Lap:
        wall_s = time.perf_counter() - self._started
        after = self._runner.stats()
        return Lap(
            wall_s=wall_s,
            tokens=self._runner.num_tokens - self._num_tokens,
            peak_blocks=int(after["peak_held"]),
            compactions=self._gained(after, "num_compactions"),
            preemptions=self._gained(after, "num_preemptions"),
            swap_outs=self._gained(after, "num_swap_outs"),
            max_running=self._runner.max_running,
        )

    def _gained(self, after: Mapping[str, Any], name: str) -> int:
        return int(after[name]) - int(self._before[name])


def encode_prompt(runner: Runner, problem: EvalProblem) -> list[int]:
    """Token ids of a problem's prompt: by the model's chat template where both ask for it."""
    tokenizer = runner.tokenizer
    if not (problem.is_chat and tokenizer.has_chat_template):
        return tokenizer.encode(problem.prompt)
    rendered = tokenizer.render_chat([{"role": "user", "content": problem.prompt}])
    return tokenizer.encode(rendered, add_special_tokens=False)


def problem_seed(seed: int, problem_id: str) -> int:
    """Of a problem's samples, the same in every cell and on every machine."""
    digest = hashlib.sha256(f"{seed}/{problem_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
