"""README and ARCHITECTURE are true: every file they name exists, and every room's file is named."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAMED = re.compile(r"`([\w./-]+/[\w./-]*|[\w-]+\.(?:py|md|txt|toml)|Makefile|\.importlinter)`")


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md"])
def test_every_file_a_document_names_exists(document):
    names = set(NAMED.findall((ROOT / document).read_text()))
    assert len(names) > 8
    kept = {name for name in names if not name.startswith("build/")}  # made by `make`
    missing = sorted(name for name in kept if not (ROOT / name).exists())
    assert not missing, f"{document} names {missing}"


def test_the_picture_names_only_files_that_exist():
    picture = (ROOT / "ARCHITECTURE.md").read_text().split("```")[1]
    files = {path.name for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    assert set(re.findall(r"\w+\.py", picture)) <= files


def test_architecture_names_every_file_of_the_deciding_and_caching_rooms():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for room in ("radix_cache", "runtime"):
        for path in (ROOT / room).glob("*.py"):
            if path.name != "__init__.py":
                assert path.stem in text, f"{room}/{path.name} is not in ARCHITECTURE.md"


def test_architecture_names_every_file_of_the_server():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    paths = [path.relative_to(ROOT) for path in (ROOT / "server").rglob("*.py")]
    missing = [path for path in paths if path.name != "__init__.py" and str(path) not in text]
    assert not missing


def test_no_document_still_has_a_placeholder():
    for document in ("README.md", "ARCHITECTURE.md"):
        assert "@@" not in (ROOT / document).read_text()


def test_the_tables_of_quality_are_those_of_the_results(quality_tables):
    """`python benchmarks/quality_tables.py --write` mends it."""
    text = (ROOT / "QUALITY.md").read_text()
    assert quality_tables.with_tables(text) == text
    for policy in ("zipage2", "zipage2:lot_share=0.3", "streaming"):
        assert text.count(f"\n| `{policy}` | ") >= 8, "a row per budget, protected and not"


def test_what_was_not_measured_is_a_dash_and_what_is_thin_a_star(quality_tables):
    main = _full_runs(quality_tables, 200)
    unprotected = _full_runs(quality_tables, 200)
    for policy in ("zipage2", "rkv", "gkv", "keydiff", "h2o"):
        main[policy, "12%", "trace@1"] = _run(90, 200)
        unprotected[policy, "12%", "trace@1"] = _run(20, 100, mean_len=1180)
    main["rkv", "12%", "trace@1"] = _run(90, 100) | _run(50, 200, first=100)
    unprotected["gkv", "12%", "trace@1"] = _run(80, 30)
    unprotected["h2o", "12%", "trace@1"] = _run(80, 24)
    table = quality_tables.budget_table(quality_tables.cells_of(main), "12%").splitlines()
    assert table[4] == "| `rkv` | 70.0 | - | - | - |"
    pairs = quality_tables.pairs_of(main, unprotected)
    table = quality_tables.unprotected_table(pairs, "12%").splitlines()
    assert table[2] == "| `zipage2` | 90.0 -> 20.0 (x1.18) | - | - | - |"
    assert table[3] == "| `zipage2:lot_share=0.3` | - | - | - | - |"
    assert table[4] == "| `rkv` | 90.0 -> 20.0 (x1.18) | - | - | - |", "both on the same problems"
    assert table[6] == "| `gkv` | 90.0 -> 80.0* | - | - | - |"
    assert table[11] == "| `h2o` | - | - | - | - |", "24 problems are too few"
    assert len(table) == 2 + len(quality_tables.POLICIES)


def test_a_run_that_has_more_problems_than_its_column_counts_on_those_of_the_column(quality_tables):
    runs = _full_runs(quality_tables, 200)
    runs["zipage2", "6%", "recall@1"] = _run(90, 100) | _run(10, 200, first=100)
    runs["rkv", "6%", "recall@1"] = _run(50, 100)
    runs["gkv", "6%", "recall@1"] = _run(50, 100)
    table = quality_tables.budget_table(quality_tables.cells_of(runs), "6%").splitlines()
    assert table[2] == "| `zipage2` | - | 90.0 | - | - |"


def test_only_whole_cells_count_as_worse_or_better_without_protection(quality_tables):
    rates = {"zipage2": (90, 20), "rkv": (30, 30), "gkv": (12, 30), "h2o": (2, 0)}
    main, unprotected = _full_runs(quality_tables, 200), _full_runs(quality_tables, 200)
    for policy, (old, new) in (rates | {"snapkv": (90, 10)}).items():
        main[policy, "25%", "trace@1"] = _run(old, 200)
        unprotected[policy, "25%", "trace@1"] = _run(new, 200 if policy in rates else 100)
    pairs = quality_tables.pairs_of(main, unprotected)
    table = quality_tables.count_table(pairs).splitlines()
    assert table[2] == "| K = 25% | 1 / 1 / 1 of 4 | - | - | - |", "h2o has nothing to lose"
    assert table[3] == "| K = 12% | - | - | - | - |"
    lines = quality_tables.change_lines(pairs).splitlines()
    assert lines[0] == "25% trace@1 zipage2: 90.0 -> 20.0, -70.0 [-70.0, -70.0]"
    assert len(lines) == 5, "the thin one has its line too"


def test_a_change_is_taken_problem_by_problem(quality_tables):
    main, unprotected = _full_runs(quality_tables, 200), _full_runs(quality_tables, 200)
    main["rkv", "25%", "trace@1"] = _run(100, 100) | _run(10, 200, first=100)
    unprotected["rkv", "25%", "trace@1"] = _run(90, 100) | _run(0, 200, first=100)
    change = quality_tables.pairs_of(main, unprotected)["rkv", "25%", "trace@1"].change
    assert change.high - change.low < 1e-9, "each problem loses the same"


@pytest.fixture(scope="module")
def quality_tables():
    path = ROOT / "benchmarks" / "quality_tables.py"
    spec = importlib.util.spec_from_file_location("quality_tables", path)
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    return tables


def _full_runs(quality_tables, num_problems):
    """Full KV's, for every task."""
    return {
        quality_tables.Key("", "", task): _run(100, num_problems) for task in quality_tables.TASKS
    }


def _run(percent, last, first=0, mean_len=1000):
    """Problems [first, last), each solved in so many percent of its samples."""
    outcome = SimpleNamespace(rate=percent / 100, mean_len=mean_len)
    return {f"trace/1/{index:03}": outcome for index in range(first, last)}


def test_the_readme_program_runs_as_printed(monkeypatch, capsys):
    """The first Python block of the README, copied and pasted."""
    block = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert printed.startswith("[")
    assert len(eval(printed)) == 4
