"""One evaluation from start to end: tasks, engine, sweep, results.

Knows nothing of command lines.
"""

import contextlib
from pathlib import Path

from zipage_lang.evaluation.datasets import load_dataset
from zipage_lang.evaluation.engine_start import facts_of, identity_of, started_runner
from zipage_lang.evaluation.family_tasks import family_task
from zipage_lang.evaluation.grading import Grader
from zipage_lang.evaluation.options import EvalOptions
from zipage_lang.evaluation.problem import Task
from zipage_lang.evaluation.results import REPORT_FILE, SWEEP_FILE, SweepResults, write_results
from zipage_lang.evaluation.runner import Runner
from zipage_lang.evaluation.sweep import Sweep, SweepPlan
from zipage_lang.evaluation.sweep_progress import SweepProgress
from zipage_lang.evaluation.task_files import read_task_file
from zipage_lang.evaluation.warm_up import warm_up
from zipage_lang.runtime.sampling_params import SamplingParams


def run_evaluation(options: EvalOptions) -> list[str]:
    """Run what is not there yet, write the results; returns lines to print.

    Raises ValueError for input to be mended, ZipageError where the engine does not go on.
    """
    tasks = load_tasks(options)
    _check_lengths(options, tasks)
    sampling = _sampling_of(options)
    with started_runner(options) as runner:
        plan = _plan_of(options, tasks, sampling, runner)
        warm_up(runner, options.grid)
        decode = runner.tokenizer.decode
        with (
            Grader(decode, options.num_graders, options.keeps_text) as grader,
            SweepProgress() as progress,
        ):
            try:
                Sweep(plan, runner, grader, options.out, progress).run()
            except BaseException:  # Ctrl-C too leaves a report of what there is
                with contextlib.suppress(ValueError):
                    write_results(options.out, _facts(options, runner))
                raise
        results = write_results(options.out, _facts(options, runner))
    return _closing_lines(options.out, results)


def load_tasks(options: EvalOptions) -> list[Task]:
    """Every task asked for, at most so many problems each. Raises ValueError or OSError."""
    whole = [read_task_file(path) for path in options.task_files]
    whole += [load_dataset(name, options.data_folder) for name in options.datasets]
    tasks = [Task(task.name, task.problems[: options.num_problems]) for task in whole]
    tasks += [
        family_task(spec, options.num_problems, options.levels, options.seed)
        for spec in options.families
    ]
    names = [task.name for task in tasks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"task {twice!r} is asked for twice; rename the file or drop one")
    return tasks


def _sampling_of(options: EvalOptions) -> SamplingParams:
    return SamplingParams(
        n=options.num_samples,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
    )


def _plan_of(
    options: EvalOptions, tasks: list[Task], sampling: SamplingParams, runner: Runner
) -> SweepPlan:
    return SweepPlan(
        tasks=tasks,
        grid=options.grid,
        sampling=sampling,
        max_tokens=options.max_tokens,
        identity=identity_of(options, runner),
        mean_lens=options.mean_lens,
        part=options.part,
        is_mixed=options.is_mixed,
    )


def _facts(options: EvalOptions, runner: Runner) -> dict[str, str]:
    order = "share the engine" if options.is_mixed else "one after the other"
    return {**facts_of(options, runner), "cells": order}


def _check_lengths(options: EvalOptions, tasks: list[Task]) -> None:
    names = [task.name for task in tasks]
    for name in options.mean_lens:
        if name not in names:
            raise ValueError(f"--mean-length {name!r} is no task here; tasks: {', '.join(names)}")


def _closing_lines(out: Path, results: SweepResults) -> list[str]:
    lines = [f"{len(results.cells)} cells in {out / SWEEP_FILE} and {out / REPORT_FILE}"]
    for cell in results.cells:
        kept = f" {cell.mode} K={cell.budget} E={cell.interval} {cell.protect}"
        where = "" if cell.is_full else kept
        rate = "" if cell.tok_s is None else f", {cell.tok_s:,.0f} tok/s"
        value = cell.pass_at[1]
        lines.append(
            f"{cell.task}  {cell.label}{where}: pass@1 {100 * value.value:.1f}% "
            f"[{100 * value.low:.1f}, {100 * value.high:.1f}], "
            f"{cell.mean_len.value:,.0f} tokens{rate}"
        )
    return lines
