"""Code that is run against tests: what passes, what fails, and what the limits hold.

The programs here do what a model might write, harmful things included.
"""

import time
from pathlib import Path

import pytest

from zipage_lang.evaluation.checkers.python_tests import PythonTests, last_code_block
from zipage_lang.evaluation.checkers.sandbox import SandboxLimits, run_python

LIMITS = SandboxLimits(wall_s=8.0, cpu_s=6, memory_bytes=512 * 2**20, file_bytes=2**20)
# Long enough for a busy machine to start four processes.
ENDED = SandboxLimits(wall_s=6, cpu_s=6, memory_bytes=512 * 2**20, file_bytes=2**20)
METHOD = """
class Solution:
    def twice(self, items: List[int]):
        return [2 * item for item in items]
"""
ADD = "def add(a, b):\n    return a + b"


@pytest.fixture(scope="module")
def checker():
    return PythonTests(LIMITS)


def is_running(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def block(code):
    return f"Some thoughts.\n```python\n{code}\n```\nThat is it."


@pytest.mark.parametrize(
    ("code", "answer", "is_correct"),
    [
        (ADD, "assert add(2, 3) == 5", True),
        (ADD, "assert add(2, 3) == 6", False),
        (ADD, {"function": "add", "tests": [{"input": [2, 3], "output": 5}]}, True),
        (ADD, {"function": "add", "tests": [{"input": [2, 3], "output": 4}]}, False),
        (
            METHOD,
            {"function": "twice", "tests": [{"input": [[1, 2]], "output": [2, 4]}]},
            True,
        ),
        ("print(int(input()) * 2)", [{"input": "4\n", "output": "8"}], True),
        (
            "print(int(input()) * 2)",
            [{"input": "4\n", "output": "8"}, {"input": "5\n", "output": "11"}],
            False,
        ),
        ("def add(a, b):\n    return a +", "assert add(2, 3) == 5", False),
        ("import sys\nsys.exit(0)\n" + ADD, [{"input": "", "output": "8"}], False),
        ("raise SystemExit(3)", "pass", False),
    ],
)
def test_code_counts_where_every_test_passes(checker, code, answer, is_correct):
    checker.check_answer(answer)
    assert checker.check(answer, block(code)).is_correct is is_correct


def test_the_note_says_which_test_failed_and_how(checker):
    tests = [{"input": "1", "output": "1"}, {"input": "x", "output": "1"}]
    note = checker.check(tests, block("print(int(input()))")).note
    assert note.startswith("test 2 of 2: ValueError: invalid literal")


def test_an_output_without_a_code_block_is_wrong(checker):
    assert checker.check("pass", "I would sort them.").note == "no code block"


def test_the_last_block_counts_and_one_that_is_cut_off_too():
    assert last_code_block("```python\na\n```\n```py\nb\n```") == "b"
    assert last_code_block("```\na = 1") == "a = 1"


def test_what_runs_for_ever_is_ended_with_all_that_it_started():
    code = "import os, time\nos.fork()\nos.fork()\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    run = run_python(code, "", ENDED)
    assert not run.is_clean
    assert run.error == "ran longer than 6 s"
    pids = run.output.split()
    assert len(pids) == 4
    deadline = time.monotonic() + 10  # all are killed at once, but only the first is waited for
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, pids))


def test_memory_files_and_output_are_bounded():
    too_big = run_python("x = bytearray(2**31)", "", LIMITS)
    assert (too_big.is_clean, too_big.error) == (False, "MemoryError")
    too_long = run_python("open('f', 'w').write('x' * 2**22)", "", LIMITS)
    assert not too_long.is_clean
    assert "File too large" in too_long.error
    flood = run_python("while True: print('x' * 1000)", "", LIMITS)
    assert not flood.is_clean
    assert len(flood.output) <= LIMITS.file_bytes


def test_environment_and_folder_are_its_own(monkeypatch):
    monkeypatch.setenv("SECRET", "do not tell")
    run = run_python("import os\nprint(os.environ.get('SECRET'), os.listdir('.'))", "", LIMITS)
    assert run.is_clean
    assert run.output.startswith("None ['")
    assert "program.py" in run.output


def test_where_the_network_is_said_to_be_off_it_is():
    code = """
import socket
try:
    socket.create_connection(("127.0.0.1", 9), timeout=2)
except OSError as error:
    print(error.errno)
names = [name for _, name in socket.if_nameindex()]
print(names)
"""
    run = run_python(code, "", LIMITS)
    assert run.is_clean, run.error
    if run.has_no_network:
        assert run.output.splitlines()[-1] in ("['lo']", "[]")


def test_a_text_with_broken_characters_is_code_like_any_other(checker):
    assert not checker.check("pass", block("x = '\ud800'\nassert False")).is_correct
