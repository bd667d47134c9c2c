"""The tables of QUALITY.md, from the sweeps' runs.tar.xz files.

    python benchmarks/quality_tables.py            # prints them
    python benchmarks/quality_tables.py --write    # puts them into QUALITY.md
    python benchmarks/quality_tables.py --changes  # what protection changed, with intervals

One table per budget: a row is a policy, a column a task, a cell pass@1 in percent and, where
outputs were over 1.02 times as long as full KV's, how many times. A column counts the problems that
more than half of its runs have whole, so all its cells are of the same ones. `*`: a run lacks some
of them; `-`: it has fewer than 25. Where the prompt may go too, a cell is protected -> evictable,
both on the problems that both runs have, and a table ahead counts what became worse. Knows nothing
of how sweeps are run.
"""

import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from zipage_lang.evaluation.run_file import Header, Line, Sample
from zipage_lang.evaluation.statistics import Interval, difference_interval

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "quality"
DOCUMENT = ROOT / "QUALITY.md"
TASKS = ("trace@1", "recall@1", "countdown@0", "multiply@2")
BUDGETS = ("25%", "12%", "50%", "6%")
POLICIES = (
    "zipage2", "zipage2:lot_share=0.3", "rkv", "rkv:mass_weight=0.5", "gkv", "keydiff", "tiers",
    "zipage", "snapkv", "h2o", "triattention", "kvcompress", "pyramidkv", "vase", "page", "random",
    "streaming",
)  # fmt: skip
LEAST_PROBLEMS = 25
NOTED_GROWTH = 1.02
LEAST_RATE = 0.05  # a policy that solves less either way has nothing to lose


class Outcome(NamedTuple):
    """What became of one problem."""

    rate: float  # share of its samples that are right
    mean_len: float  # in tokens


class Key(NamedTuple):
    """Names a run; full KV's policy and budget are empty."""

    policy: str
    budget: str  # as the sweep was asked for it
    task: str


class Cell(NamedTuple):
    """One run on some problems."""

    rate: float
    growth: float  # mean length over full KV's
    is_thin: bool


class Pair(NamedTuple):
    """One policy, budget and task, protected and evictable, on the problems that both have."""

    before: Cell
    after: Cell
    change: Interval  # evictable minus protected pass@1, problem by problem


Run = dict[str, Outcome]  # by problem
Runs = dict[Key, Run]
Pairs = dict[Key, Pair]


def read_runs(name: str) -> Runs:
    """A folder's runs, each with the problems whose samples are all there."""
    runs = {}
    with tarfile.open(RESULTS / name / "runs.tar.xz") as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                header, *lines = msgspec.json.Decoder(Line).decode_lines(file.read())
                assert isinstance(header, Header), member.name
                key = Key(header.setting["policy"], header.asked_budget, header.task)
                samples = (line for line in lines if isinstance(line, Sample))
                runs[key] = _outcomes(samples, int(header.sampling["samples"]))
    return runs


def cells_of(runs: Runs) -> dict[Key, Cell]:
    """By policy, budget and task; what has too few problems is left out."""
    cells = {}
    for key in _table_keys():
        usual = usual_problems(runs, key)
        found = [problem for problem in usual if problem in runs.get(key, {})]
        if len(found) >= LEAST_PROBLEMS:
            cells[key] = _cell(runs, key, found, len(found) < len(usual))
    return cells


def pairs_of(main: Runs, unprotected: Runs) -> Pairs:
    """What was run both ways, in the order of the tables."""
    pairs = {}
    for key in _table_keys():
        before, after = main.get(key, {}), unprotected.get(key, {})
        usual = usual_problems(unprotected, key)
        found = [problem for problem in usual if problem in before and problem in after]
        if len(found) >= LEAST_PROBLEMS:
            is_thin = len(found) < len(usual)
            change = difference_interval(
                [after[problem].rate for problem in found],
                [before[problem].rate for problem in found],
            )
            old, new = (_cell(runs, key, found, is_thin) for runs in (main, unprotected))
            pairs[key] = Pair(old, new, change)
    return pairs


def usual_problems(runs: Runs, key: Key) -> list[str]:
    """Those that more than half of the runs of its column have."""
    column = [run for other, run in runs.items() if other[1:] == key[1:]]
    counts = Counter(problem for run in column for problem in run)
    return sorted(problem for problem, count in counts.items() if 2 * count > len(column))


def budget_table(cells: dict[Key, Cell], budget: str) -> str:
    """Every policy at one budget."""
    return _policy_table(budget, {key: _text(cell) for key, cell in cells.items()})


def unprotected_table(pairs: Pairs, budget: str) -> str:
    """Every policy at one budget, protected -> evictable."""
    return _policy_table(budget, {key: _change(pair) for key, pair in pairs.items()})


def count_table(pairs: Pairs) -> str:
    """By budget and task: how many policies are worse, the same and better without protection."""
    lines = [_header("worse / same / better")]
    for budget in BUDGETS:
        texts = (_counts(pairs, budget, task) for task in TASKS)
        lines.append(f"| K = {budget} | {' | '.join(texts)} |")
    return "\n".join(lines)


def change_lines(pairs: Pairs) -> str:
    """A line per pair, with the interval of the change in points."""
    lines = []
    for (policy, budget, task), pair in pairs.items():
        change = pair.change
        value, low, high = (100 * bound for bound in (change.value, change.low, change.high))
        text = f"{_change(pair)}, {value:+.1f} [{low:+.1f}, {high:+.1f}]"
        lines.append(f"{budget} {task} {policy}: {text}")
    return "\n".join(lines)


def _outcomes(samples: Iterable[Sample], num_samples: int) -> Run:
    found: defaultdict[str, dict[int, Sample]] = defaultdict(dict)
    for sample in samples:
        found[sample.problem][sample.sample] = sample
    return {
        problem: Outcome(
            sum(sample.correct for sample in group.values()) / num_samples,
            sum(sample.tokens for sample in group.values()) / num_samples,
        )
        for problem, group in found.items()
        if len(group) == num_samples
    }


def _cell(runs: Runs, key: Key, problems: list[str], is_thin: bool) -> Cell:
    run, full = runs[key], runs[Key("", "", key.task)]
    full_len = sum(full[problem].mean_len for problem in problems)
    return Cell(
        sum(run[problem].rate for problem in problems) / len(problems),
        sum(run[problem].mean_len for problem in problems) / full_len,
        is_thin,
    )


def _table_keys() -> Iterator[Key]:
    for budget in BUDGETS:
        for task in TASKS:
            for policy in POLICIES:
                yield Key(policy, budget, task)


def _policy_table(budget: str, texts: dict[Key, str]) -> str:
    lines = [_header(f"K = {budget}")]
    for policy in POLICIES:
        found = (texts.get(Key(policy, budget, task), "-") for task in TASKS)
        lines.append(f"| `{policy}` | {' | '.join(found)} |")
    return "\n".join(lines)


def _counts(pairs: Pairs, budget: str, task: str) -> str:
    """Of whole cells only: a run that was stopped may lean to what ends early."""
    whole = [
        pair
        for key, pair in pairs.items()
        if (key.budget, key.task) == (budget, task) and not pair.after.is_thin
    ]
    if not whole:
        return "-"
    told = [pair.change for pair in whole if max(pair.before.rate, pair.after.rate) >= LEAST_RATE]
    worse = sum(change.high < 0 for change in told)
    better = sum(change.low > 0 for change in told)
    return f"{worse} / {len(told) - worse - better} / {better} of {len(whole)}"


def _header(corner: str) -> str:
    return f"| {corner} | {' | '.join(TASKS)} |\n|---|{'---:|' * len(TASKS)}"


def _change(pair: Pair) -> str:
    return f"{_percent(pair.before)} -> {_text(pair.after)}"


def _text(cell: Cell) -> str:
    length = f" (x{cell.growth:.2f})" if cell.growth > NOTED_GROWTH else ""
    return f"{_percent(cell)}{length}{'*' if cell.is_thin else ''}"


def _percent(cell: Cell) -> str:
    return f"{100 * cell.rate:.1f}"


def with_tables(text: str) -> str:
    """QUALITY.md with what stands between its marks replaced."""
    main = read_runs("main")
    cells, pairs = cells_of(main), pairs_of(main, read_runs("unprotected"))
    tables = {
        "main": "\n\n".join(budget_table(cells, budget) for budget in BUDGETS),
        "counts": count_table(pairs),
        "unprotected": "\n\n".join(unprotected_table(pairs, budget) for budget in BUDGETS),
    }
    for name, table in tables.items():
        begin, end = f"<!-- tables: {name} -->", f"<!-- end: {name} -->"
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
        assert after, f"QUALITY.md has no marks {begin} and {end}"
        text = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    return text


def main() -> None:
    if sys.argv[1:] == ["--changes"]:
        print(change_lines(pairs_of(read_runs("main"), read_runs("unprotected"))))
        return
    text = with_tables(DOCUMENT.read_text())
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
