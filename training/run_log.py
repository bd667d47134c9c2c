"""The record of a training: one JSON object a line in a file, and a readable line on the screen.

Knows nothing of what is recorded.
"""

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class RunLog:
    """Appends to a file and writes through at once, so that nothing is lost with the process."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._started = time.monotonic()

    def write(self, kind: str, **values: Any) -> None:
        """One record of this kind."""
        record = {"kind": kind, "at_s": round(time.monotonic() - self._started, 1), **values}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        shown = " ".join(f"{name}={_short(value)}" for name, value in values.items())
        print(f"[{record['at_s']:7.1f}] {kind}: {shown}", flush=True)

    def note(self, text: str) -> None:
        self.write("note", text=text)

    def guard(self, what: str, act: Callable[[], None]) -> bool:
        """Do something that training can go on without; whether it went well."""
        try:
            act()
        except Exception:  # whatever it is, the weights matter more; the log tells
            self.write("failure", what=what, trace=traceback.format_exc(limit=8))
            return False
        return True


def read_log(path: Path) -> list[dict[str, Any]]:
    """All records of a log."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
