"""Every program of examples/ runs on the embedded model, from its command line to its last line.

The model is small and its answers poor, so what is asserted is the programs' structure.
"""

import contextlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

import zipage_lang as zipage
from zipage_lang.trace_reader import problems, read_trace

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def engine():
    with zipage.Engine("smollm2-135m", num_threads=1, num_blocks=600) as engine:
        yield engine


@pytest.fixture
def run_example(engine, monkeypatch, capsys, tmp_path):
    """Runs `main` with a command line; all examples share one engine. Returns what it prints."""

    def run(name, *arguments):
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        monkeypatch.setattr(zipage, "Engine", lambda *_, **__: contextlib.nullcontext(engine))
        module.main()
        stats = engine.stats()
        left = [stats[name] for name in ("num_running", "num_waiting", "num_held_requests")]
        assert left == [0, 0, 0]
        return capsys.readouterr().out

    return run


def test_every_example_is_run_here():
    named = set(re.findall(r'run_example\(\s*"(\w+)"', Path(__file__).read_text()))
    assert named == {path.stem for path in EXAMPLES.glob("*.py")}


def test_self_consistency_compacts_votes_and_says_what_it_kept(run_example, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    printed = run_example(
        "self_consistency", "--samples", "4", "--max-tokens", "60", "--budget", "32"
    )
    rows = re.findall(r"(?m)^ +(\d+) +(\S+) +\d+", printed)
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    kept = [int(n) for n in re.findall(r" (\d+) +\d+ +\d+/\d+ *$", printed, re.MULTILINE)]
    assert max(kept, default=0) <= 32 + 16 + 16  # budget, interval, one block
    num_stopped = int(re.search(r"(\d+) chains stopped early", printed)[1])
    assert [row[1] for row in rows].count("stopped") == num_stopped


def test_the_game_of_24_searches_with_sums_that_are_right(run_example):
    printed = run_example("game_of_24", "--numbers", "6", "4", "1", "--trace", "game.jsonl")
    steps = re.findall(r"(\S+) ([-+*]) (\S+) = (\S+) \(left", printed)
    for left, operation, right, result in steps:
        assert eval(f"{left} {operation} {right}") == int(result)
    assert re.search(r"solved: \d+ states tried, ended by (done|depth)", printed)
    assert problems(read_trace("game.jsonl")) == []


def test_best_of_judge_grades_every_draft_and_keeps_the_best(run_example):
    printed = run_example("best_of_judge", "--drafts", "3")
    grades = re.findall(r"(?m)^([* ]) (\d\.\d{3})  ", printed)
    assert len(grades) == 3
    best = max(grades, key=lambda grade: float(grade[1]))
    assert [grade for grade in grades if grade[0] == "*"] == [best]
    assert all(1 <= float(grade[1]) <= 5 for grade in grades)


def test_skeleton_of_thought_shares_its_prompt_among_the_points(run_example):
    printed = run_example("skeleton_of_thought")
    points, prompt, cached = (
        int(re.search(pattern, printed)[1])
        for pattern in (r"(\d+) points at once", r"(\d+) prompt tokens", r"(\d+) came from")
    )
    assert 3 <= points <= 4
    assert cached > prompt / 2


def test_extraction_gives_typed_values_and_one_error_in_its_place(run_example):
    printed = run_example("extraction")
    results = re.findall(r"(?m)^    (\w+)\(", printed)
    assert results == ["Ticket", "ValueError", "Ticket", "Ticket"]
    assert "3 tickets, 1 errors" in printed


def test_a_long_thought_goes_on_from_what_is_kept(run_example):
    printed = run_example("long_thought", "--length", "48", "--budget", "24", "--branches", "3")
    rows = re.findall(r"(?m)^(first|second|third)\*? +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$", printed)
    names = [name for name, *_ in rows]
    assert names == ["first", "second", "second", "second", "third"]
    numbers = [[int(number) for number in row[1:]] for row in rows]
    for tokens, _, length, kept, missing in numbers:
        assert tokens == 48
        assert kept + missing == length
        assert kept <= 32 + 24 + 16 + 16  # the first prompt, budget, interval, less than one block
    prompt_len = numbers[0][2] - 48
    assert all(reused >= prompt_len + 47 for _, reused, *_ in numbers[1:])  # compacted, not redone
    assert numbers[-1][4] > numbers[0][4] > 0
    assert problems(read_trace("long_thought.jsonl")) == []
