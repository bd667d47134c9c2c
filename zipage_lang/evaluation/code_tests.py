"""LiveCodeBench rows: the prompt, and tests as `PythonTests` takes them.

Private tests are published as base64 of zlib of a pickled text; the pickle is read by a reader that
knows plain values only, so it can run nothing. Knows nothing of files or of how code is run.
"""

import base64
import io
import json
import pickle
import zlib
from typing import Any

from zipage_lang.evaluation.table_files import Row

MAX_TESTS_BYTES = 256 * 2**20  # of one problem's tests, unpacked
_STDIN_PROMPT = (
    "{}\n\nWrite a Python program that reads from standard input and prints the answer. Put the "
    "whole program in one ```python code block."
)
_CALL_PROMPT = (
    "{}\n\nComplete this Python code, keeping its names:\n\n```python\n{}\n```\n\nPut the whole "
    "code in one ```python code block."
)


def code_prompt(row: Row) -> str:
    """The question, and how the answer is to be written."""
    starter = row.get("starter_code") or ""
    if starter.strip():
        return _CALL_PROMPT.format(row["question_content"], starter.strip())
    return _STDIN_PROMPT.format(row["question_content"])


def code_answer(row: Row) -> Any:
    """Public and private tests together. Raises ValueError where there are none."""
    tests = _tests(row["public_test_cases"]) + _tests(row.get("private_test_cases") or "[]")
    if not tests:
        raise ValueError("no test cases")
    if tests[0].get("testtype") != "functional":
        return [{"input": test["input"], "output": test["output"]} for test in tests]
    metadata = row.get("metadata") or "{}"
    name = (json.loads(metadata) if isinstance(metadata, str) else metadata)["func_name"]
    return {"function": name, "tests": [_call(test) for test in tests]}


def _call(test: dict[str, Any]) -> dict[str, Any]:
    """Arguments stand one a line, each in JSON; so does the value."""
    arguments = [json.loads(line) for line in test["input"].splitlines() if line.strip()]
    return {"input": arguments, "output": json.loads(test["output"])}


def _tests(text: Any) -> list[dict[str, Any]]:
    if not isinstance(text, str):
        return list(text)
    tests = json.loads(text if text.lstrip().startswith("[") else _unpacked(text))
    if not isinstance(tests, list):
        raise ValueError("test cases must be a list")
    return tests


def _unpacked(text: str) -> str:
    unzip = zlib.decompressobj()
    try:
        data = unzip.decompress(base64.b64decode(text), MAX_TESTS_BYTES)
        if unzip.unconsumed_tail:
            raise ValueError(f"test cases of more than {MAX_TESTS_BYTES} bytes")
        value = _PlainReader(io.BytesIO(data)).load()
    except (zlib.error, pickle.UnpicklingError, EOFError, AttributeError, IndexError) as error:
        raise ValueError(f"test cases that can't be read ({error})") from error
    if not isinstance(value, str):
        raise ValueError(f"test cases of type {type(value).__name__}, not a text")
    return value


class _PlainReader(pickle.Unpickler):
    """Reads texts and numbers; whatever names a class or a function is refused."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise ValueError(f"test cases that name {module_name}.{global_name}; not read")
