"""The planted faults still fit the code they are planted in, and the runner tells caught from not.

Running them all takes minutes: `make mutations`. Knows nothing of what the faults are.
"""

import importlib.util
import sys
import time
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def load_runner():
    spec = importlib.util.spec_from_file_location("mutations_run", HERE / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutations_run"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


runner = load_runner()
MUTATIONS = runner.read_mutations(HERE)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.room}: {m.name}")
def test_a_planted_fault_fits_the_code_and_its_tests_exist(mutation):
    assert runner.fault_of(mutation, ROOT) is None


def test_there_are_twelve_faults_or_more_and_their_names_differ():
    assert len(MUTATIONS) >= 12
    assert len({(m.room, m.name) for m in MUTATIONS}) == len(MUTATIONS)


@pytest.fixture
def small_tree(tmp_path):
    """A package of one file, with a test of it."""
    tree = tmp_path / "work"
    for place in ("zipage_lang", "runtime", "tests"):
        (tree / place).mkdir(parents=True)
    (tree / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib -q"\n'
        "[tool.setuptools.package-dir]\n"
        'zipage_lang = "zipage_lang"\n"zipage_lang.runtime" = "runtime"\n'
    )
    (tree / "zipage_lang" / "__init__.py").write_text("")
    (tree / "runtime" / "__init__.py").write_text("")
    (tree / "runtime" / "messages.py").write_text("def double(x):\n    return 2 * x\n")
    (tree / "tests" / "test_it.py").write_text(
        "from zipage_lang.runtime.messages import double\n\n\n"
        "def test_two():\n    assert double(2) == 4\n\n\n"
        "def test_red():\n    assert double(1) == 3\n"
    )
    return tree


def mutation(**changes):
    values = {
        "room": "r",
        "name": "n",
        "file": "runtime/messages.py",
        "old": "2 * x",
        "new": "3 * x",
        "tests": ("tests/test_it.py::test_two",),
    }
    return runner.Mutation(**values | changes)


def test_a_fault_is_planted_in_a_copy_and_caught(small_tree, capsys):
    before = (small_tree / "runtime" / "messages.py").read_bytes()
    assert runner.run_all([mutation()], small_tree) == 0
    assert "1 of 1 planted faults were caught" in capsys.readouterr().out
    assert (small_tree / "runtime" / "messages.py").read_bytes() == before


def test_a_fault_that_no_test_notices_counts_as_missed(small_tree, capsys):
    missed = mutation(new="x * 2")
    red = mutation(tests=("tests/test_it.py::test_red",))
    assert runner.run_all([missed, red], small_tree) == 2
    printed = capsys.readouterr().out
    assert "0 of 2" in printed
    assert "fails without the fault" in printed


LEAVES_PROCESSES = """
import pathlib, subprocess, sys


def test_it():
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    left = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=own)
        for own in (False, True)
    ]
    pathlib.Path(r"{place}").write_text(" ".join(str(process.pid) for process in left))
    assert {outcome}
"""


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("outcome", [True, False])
def test_what_the_tests_started_does_not_outlive_them(small_tree, tmp_path, outcome):
    """A planted fault may be that an engine never ends."""
    place = tmp_path / "left.txt"
    code = LEAVES_PROCESSES.format(place=place, outcome=outcome)
    (small_tree / "tests" / "test_left.py").write_text(code)
    runner.copy_tree(small_tree, tmp_path)
    code, _ = runner.run_tests(tmp_path, ["tests/test_left.py"])
    assert code == (0 if outcome else runner.TESTS_FAILED)
    left = [int(pid) for pid in place.read_text().split()]
    assert len(left) == 2
    given_up_at = time.monotonic() + 60
    while any(map(runs, left)):
        assert time.monotonic() < given_up_at, f"{left} run on"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"old": "4 * x"}, "stands 0 times"),
        ({"old": "x"}, "stands 2 times"),
        ({"file": "runtime/nothing.py"}, "no file"),
        ({"tests": ("tests/test_it.py::test_gone",)}, "no test"),
        ({"new": "2 * x"}, "`new` is `old`"),
    ],
)
def test_what_can_not_be_planted_is_told(small_tree, changes, words):
    assert words in runner.fault_of(mutation(**changes), small_tree)
