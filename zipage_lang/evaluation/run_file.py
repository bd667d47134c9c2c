"""One cell's results on disk: a header, then a JSON line per sample and per lap. Resumable.

Knows nothing of engines or statistics.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any, Self

import msgspec


class Header(msgspec.Struct, tag="header", tag_field="line", frozen=True, kw_only=True):
    """What all samples of the file depend on; a file goes on only under an equal one."""

    version: int = 1
    task: str
    setting: dict[str, Any]
    sampling: dict[str, Any]
    asked_budget: str = ""  # as the sweep named it, say 12%; not compared


class Sample(
    msgspec.Struct,
    tag="sample",
    tag_field="line",
    frozen=True,
    kw_only=True,
    gc=False,
    omit_defaults=True,
):
    """One graded sample."""

    problem: str
    sample: int
    correct: bool
    answer: str | None  # what votes; None where the output has none
    tokens: int  # output tokens
    finish: str  # stop or length
    resident: int = 0  # most slots per layer and head at once
    compactions: int = 0
    dropped: int = 0
    note: str | None = None  # why a check failed, where the checker says so
    text: str | None = None  # the output, where it is kept


class Lap(msgspec.Struct, tag="lap", tag_field="line", frozen=True, kw_only=True):
    """One stretch of running this cell alone; what was shared with other cells has no lap."""

    wall_s: float
    tokens: int
    peak_blocks: int
    compactions: int
    preemptions: int
    swap_outs: int
    max_running: int


Line = Header | Sample | Lap
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Line)


@dataclasses.dataclass(frozen=True, slots=True)
class RunData:
    """What a file holds."""

    header: Header
    samples: tuple[Sample, ...]
    laps: tuple[Lap, ...]


def read_run(path: Path) -> RunData:
    """A file as it stands; a torn last line is left out. Raises ValueError for another kind."""
    text = path.read_bytes()
    lines = text[: text.rfind(b"\n") + 1].splitlines()
    decoded = [_decode(path, number, line) for number, line in enumerate(lines, 1)]
    if not decoded or not isinstance(decoded[0], Header):
        raise ValueError(f"{path} is no file of results")
    samples = tuple(line for line in decoded if isinstance(line, Sample))
    laps = tuple(line for line in decoded if isinstance(line, Lap))
    return RunData(decoded[0], samples, laps)


class RunFile:
    """Append-only. A last line torn by a kill is dropped when the file is opened again."""

    def __init__(self, path: Path, header: Header) -> None:
        """Raises ValueError where the file holds results of other settings, or is none of ours."""
        self.path = path
        self.samples: dict[tuple[str, int], Sample] = {}
        self.laps: list[Lap] = []
        self._file = _open_whole_lines(path)
        try:
            self._read(header)
        except BaseException:
            self._file.close()
            raise

    def missing_problems(self, problem_ids: list[str], num_samples: int) -> list[str]:
        """Those of which some sample is not here yet."""
        wanted = range(num_samples)
        return [
            problem_id
            for problem_id in problem_ids
            if any((problem_id, index) not in self.samples for index in wanted)
        ]

    def add(self, line: Sample | Lap) -> None:
        """A sample that is here already is not written again."""
        if isinstance(line, Lap):
            self.laps.append(line)
        else:
            if (line.problem, line.sample) in self.samples:
                return
            self.samples[line.problem, line.sample] = line
        self._write(line)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self, header: Header) -> None:
        lines = self._file.readlines()
        if not lines:
            self._write(header)
        for number, text in enumerate(lines, 1):
            line = _decode(self.path, number, text)
            if isinstance(line, Header):
                self._check(line, header)
            elif isinstance(line, Sample):
                self.samples[line.problem, line.sample] = line
            else:
                self.laps.append(line)

    def _check(self, found: Header, wanted: Header) -> None:
        differing = _differences(_compared(found), _compared(wanted))
        if differing:
            raise ValueError(
                f"{self.path} holds results of other settings ({', '.join(differing)}); give "
                "another --out, or delete the file"
            )

    def _write(self, line: Line) -> None:
        self._file.write(_encoder.encode(line) + b"\n")
        self._file.flush()


def _decode(path: Path, number: int, text: bytes) -> Line:
    try:
        line: Line = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}, line {number}: not a line of results ({error}); move the file away"
        ) from error
    if isinstance(line, Header) != (number == 1):
        raise ValueError(f"{path}, line {number}: a header belongs on the first line only")
    return line


def _open_whole_lines(path: Path) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+b")
    file.seek(0)
    content = file.read()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    file.seek(0)
    return file


def _compared(header: Header) -> dict[str, Any]:
    """Through JSON, so that tuples and lists are alike."""
    fields: dict[str, Any] = msgspec.json.decode(_encoder.encode(header))
    return {name: value for name, value in fields.items() if name != "asked_budget"}


def _differences(found: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> list[str]:
    """`seed: 0, now 1` for each field that is not the same."""
    differing = []
    for name in {**found, **wanted}:
        left, right = found.get(name), wanted.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            differing += _differences(left, right, f"{prefix}{name}.")
        elif left != right:
            differing.append(f"{prefix}{name}: {left}, now {right}")
    return differing
