"""A sweep over a scripted runner: who is asked what, what is kept, what is skipped."""

import io

import pytest
from rich.console import Console

from zipage_lang.evaluation.grading import Grader
from zipage_lang.evaluation.grid import Grid, parse_amounts
from zipage_lang.evaluation.problem import EvalProblem, Task
from zipage_lang.evaluation.run_file import read_run
from zipage_lang.evaluation.sweep import RUNS_FOLDER, Sweep, SweepPlan
from zipage_lang.evaluation.sweep_progress import SweepProgress
from zipage_lang.runtime.sampling_params import SamplingParams

TASK = Task(
    "sums",
    tuple(
        EvalProblem(id=str(index), prompt=f"{index}+1=", answer=str(index + 1), checker="exact")
        for index in range(5)
    ),
)
GRID = Grid(
    policies=("zipage", "random"),
    budgets=parse_amounts("64,50%"),
    intervals=parse_amounts("32"),
)


def right(problem_id, setting, sample):
    return str(int(problem_id) + 1)


def run_sweep(runner, folder, **changes):
    plan = SweepPlan(
        **{
            "tasks": [TASK],
            "grid": GRID,
            "sampling": SamplingParams(n=3, temperature=0.6, seed=7),
            "max_tokens": 200,
            "identity": {"model": "scripted"},
            **changes,
        }
    )
    progress = SweepProgress(Console(file=io.StringIO()))
    with Grader(runner.tokenizer.decode, 2, keeps_text=True) as grader, progress:
        Sweep(plan, runner, grader, folder, progress).run()


def runs_in(folder):
    found = {path.stem: read_run(path) for path in (folder / RUNS_FOLDER).glob("*.jsonl")}
    return {name.removeprefix("sums--"): run for name, run in found.items()}


def test_every_cell_asks_every_problem_with_full_kv_first(scripted_runner, tmp_path):
    runner = scripted_runner(right)
    run_sweep(runner, tmp_path)
    asked = [(job.key[0].setting.name, job.key[1].id) for job in runner.jobs]
    assert asked[:5] == [("off", str(index)) for index in range(5)]
    runs = runs_in(tmp_path)
    # "1" and the end: two tokens on average, of which 50% is one.
    assert set(runs) == {
        "off",
        *(f"{policy}-k{k}-e32-fixed-prompt" for policy in ("zipage", "random") for k in (64, 1)),
    }
    for run in runs.values():
        assert len(run.samples) == 15
        assert all(sample.correct for sample in run.samples)
        assert len(run.laps) == 1
    assert runner.num_flushes == len(runs)


def test_samples_of_a_problem_have_the_same_seeds_in_every_cell(scripted_runner, tmp_path):
    runner = scripted_runner(right)
    run_sweep(runner, tmp_path)
    by_problem = {}
    for job in runner.jobs:
        by_problem.setdefault(job.key[1].id, set()).add(job.sampling.seed)
    assert all(len(seeds) == 1 for seeds in by_problem.values())
    assert len(set.union(*by_problem.values())) == 5


def test_samples_are_graded_by_their_own_texts(scripted_runner, tmp_path):
    runner = scripted_runner(lambda problem, setting, sample: str(int(problem) + sample))
    run_sweep(runner, tmp_path, grid=Grid())
    for sample in runs_in(tmp_path)["off"].samples:
        assert sample.correct == (sample.sample == 1)
        assert sample.text == sample.answer == str(int(sample.problem) + sample.sample)
        assert (sample.tokens, sample.finish) == (len(sample.text) + 1, "stop")
        assert (sample.resident, sample.compactions, sample.dropped) == (7, 2, 5)


def test_a_finished_sweep_asks_nothing_again(scripted_runner, tmp_path):
    run_sweep(scripted_runner(right), tmp_path)
    again = scripted_runner(right)
    run_sweep(again, tmp_path)
    assert again.jobs == []


def test_an_interrupted_sweep_goes_on_where_it_stopped(scripted_runner, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_sweep(scripted_runner(right, fail_after=6), tmp_path)
    kept = runs_in(tmp_path)["off"]
    assert {sample.problem for sample in kept.samples} == {"0", "1"}
    assert len(kept.laps) == 1
    again = scripted_runner(right)
    run_sweep(again, tmp_path)
    assert [job.key[1].id for job in again.jobs[:3]] == ["2", "3", "4"]
    assert len(runs_in(tmp_path)["off"].samples) == 15
    assert len(runs_in(tmp_path)["off"].laps) == 2


def test_more_problems_go_on_from_fewer(scripted_runner, tmp_path):
    run_sweep(
        scripted_runner(right), tmp_path, tasks=[Task("sums", TASK.problems[:2])], grid=Grid()
    )
    again = scripted_runner(right)
    run_sweep(again, tmp_path, grid=Grid())
    assert [job.key[1].id for job in again.jobs] == ["2", "3", "4"]


def test_cells_that_share_the_engine_run_as_one_and_have_no_lap(scripted_runner, tmp_path):
    runner = scripted_runner(right)
    run_sweep(runner, tmp_path, is_mixed=True)
    runs = runs_in(tmp_path)
    assert len(runs) == 5
    assert all(len(run.samples) == 15 and not run.laps for run in runs.values())


def test_parts_together_are_the_whole(scripted_runner, tmp_path):
    num_jobs = []
    for index in range(3):
        runner = scripted_runner(right)
        run_sweep(runner, tmp_path, part=(index, 3), mean_lens={"sums": 2.0})
        num_jobs.append(len(runner.jobs))
    assert num_jobs == [10, 10, 5]
    assert all(len(run.samples) == 15 for run in runs_in(tmp_path).values())
    assert len(runs_in(tmp_path)) == 5


def test_shares_without_full_results_are_refused(scripted_runner, tmp_path):
    with pytest.raises(ValueError, match="budgets in % need the full-KV results of 'sums'"):
        run_sweep(scripted_runner(right), tmp_path, part=(1, 2))


def test_a_given_mean_length_is_what_shares_are_of(scripted_runner, tmp_path):
    run_sweep(scripted_runner(right), tmp_path, mean_lens={"sums": 300.0})
    assert "zipage-k150-e32-fixed-prompt" in runs_in(tmp_path)


def test_outputs_are_as_long_as_asked_or_as_the_context_leaves(scripted_runner, tmp_path):
    runner = scripted_runner(right)
    run_sweep(runner, tmp_path / "a", grid=Grid())
    assert {job.sampling.max_tokens for job in runner.jobs} == {200}
    runner = scripted_runner(right)
    run_sweep(runner, tmp_path / "b", grid=Grid(), max_tokens=None)
    assert {job.sampling.max_tokens for job in runner.jobs} == {512 - len("0+1=")}


def test_a_prompt_that_fills_the_context_is_refused(scripted_runner, tmp_path):
    long = EvalProblem(id="long", prompt="x" * 512, answer="", checker="exact")
    with pytest.raises(ValueError, match="problem 'long' has 512 tokens, but the context holds"):
        run_sweep(scripted_runner(right), tmp_path, tasks=[Task("sums", (long,))])


def test_other_sampling_into_the_same_folder_is_refused(scripted_runner, tmp_path):
    run_sweep(scripted_runner(right), tmp_path)
    with pytest.raises(ValueError, match=r"sampling.temperature: 0.6, now 1.0"):
        run_sweep(scripted_runner(right), tmp_path, sampling=SamplingParams(n=3, seed=7))
