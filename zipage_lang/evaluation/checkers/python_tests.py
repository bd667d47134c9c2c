"""Python answers: the last code block of the output has to pass the problem's tests.

Knows nothing of how code is kept within limits.
"""

import json
import re
from typing import Any

from zipage_lang.evaluation.checkers.checker import Verdict
from zipage_lang.evaluation.checkers.sandbox import SandboxLimits, run_python

_BLOCK = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
_SHAPES = (
    "a text of asserts, a list of {input, output} for stdin and stdout, or {function, tests} with "
    "tests a list of {input: [arguments], output: value}"
)
# Names that solutions for judging sites take for granted; the tests come in as JSON.
_PRELUDE = "from typing import *\nimport math, collections, itertools, functools, heapq, bisect\n"
_CALL = """

def _run_test():
    import json, sys
    found = globals().get({name!r}) or getattr(globals()["Solution"](), {name!r})
    test = json.load(sys.stdin)
    result = found(*test["input"])
    sys.stdout.write("\\n" + json.dumps(result))


_run_test()
"""


class PythonTests:
    """Right where the code passes all tests; each test is a process of its own.

    answer: a text of asserts that runs behind the code; or [{"input", "output"}, ...], what it
    reads and must print (lines compared without spaces at their ends); or {"function", "tests":
    [{"input": [arguments], "output": value}, ...]}, a function or a method of `Solution`.
    """

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self._limits = limits or SandboxLimits()

    def check_answer(self, answer: Any) -> None:
        tests = answer["tests"] if _is_call(answer) else answer
        if isinstance(tests, str) and tests.strip():
            return
        is_list = isinstance(tests, list) and bool(tests)
        if not is_list or not all(map(_is_test, tests)):
            raise ValueError(f"answer={answer!r:.80} must be {_SHAPES}")

    def check(self, answer: Any, output: str) -> Verdict:
        code = last_code_block(output)
        if code is None:
            return Verdict(False, note="no code block")
        note = self._first_failure(answer, code)
        return Verdict(note is None, note=note)

    def _first_failure(self, answer: Any, code: str) -> str | None:
        """Which test failed, and how; None where all pass."""
        if isinstance(answer, str):
            run = run_python(f"{_PRELUDE}{code}\n\n{answer}\n", "", self._limits)
            return None if run.is_clean else run.error or "failed"
        tests = answer["tests"] if _is_call(answer) else answer
        for number, test in enumerate(tests, 1):
            if _is_call(answer):
                note = self._call(code, answer["function"], test)
            else:
                note = self._feed(code, test)
            if note is not None:
                return f"test {number} of {len(tests)}: {note}"
        return None

    def _feed(self, code: str, test: dict[str, Any]) -> str | None:
        run = run_python(_PRELUDE + code, str(test["input"]), self._limits)
        if not run.is_clean:
            return run.error or "failed"
        return None if _lines(run.output) == _lines(str(test["output"])) else "other output"

    def _call(self, code: str, name: str, test: dict[str, Any]) -> str | None:
        call = _PRELUDE + code + _CALL.format(name=name)
        run = run_python(call, json.dumps({"input": test["input"]}), self._limits)
        if not run.is_clean:
            return run.error or "failed"
        try:
            result = json.loads(run.output.rpartition("\n")[2])
        except ValueError:
            return "no result"
        return None if result == test["output"] else "other result"


def last_code_block(output: str) -> str | None:
    """The last fenced block (one that is cut off counts); None without one."""
    blocks = _BLOCK.findall(output)
    return str(blocks[-1]) if blocks else None


def _is_call(answer: Any) -> bool:
    """Whether the tests call a function, rather than read and print."""
    has_name = isinstance(answer, dict) and isinstance(answer.get("function"), str)
    return has_name and "tests" in answer


def _is_test(test: Any) -> bool:
    return isinstance(test, dict) and {"input", "output"} <= test.keys()


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
