"""Reads a trace file, whatever is in it, and builds the tree of its runs.

A line that is no event is skipped, counted and named by its number; numbers and links between
states are never believed without a check.
Knows nothing of running programs or of pages.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator
from typing import Any

from zipage_lang.trace_events import (
    SCHEMA_VERSION,
    AnyEvent,
    BadLineError,
    CacheHit,
    CallEnd,
    CallStart,
    Cancel,
    Compaction,
    Failure,
    FirstToken,
    Fork,
    Lost,
    RunEnd,
    RunStart,
    decode_event,
)

MAX_LINE_BYTES = 64 << 20
MAX_NAMED_BAD_LINES = 20


@dataclasses.dataclass
class BadLine:
    """A line that was skipped, and why."""

    number: int
    reason: str


@dataclasses.dataclass
class CallRecord:
    """One call: its first line, and what came of it. `end` is None where the trace was cut."""

    start: CallStart
    first_token_t: float | None = None
    end: CallEnd | None = None
    compactions: list[Compaction] = dataclasses.field(default_factory=list)
    cached_tokens: int = 0  # as far as it was told before the end


@dataclasses.dataclass
class NodeRecord:
    """One state: where it comes from and what it did, in order.

    `steps` holds CallRecords and all other events of the state. `parent` is -1 for a root, else an
    index into `TraceTree.nodes` that is smaller than this node's own.
    """

    run: int
    node_id: int
    parent: int
    label: str
    why: str = "root"
    steps: "list[CallRecord | AnyEvent]" = dataclasses.field(default_factory=list)
    children: list[int] = dataclasses.field(default_factory=list)
    failed: str | None = None
    cancelled: str | None = None


@dataclasses.dataclass
class RunRecord:
    """One run: its first and last line where they are there, and its root's index."""

    run_id: str
    root: int
    start: RunStart | None = None
    end: RunEnd | None = None
    cancelled: str | None = None


@dataclasses.dataclass
class TraceTree:
    """All runs of a file. Parents stand before their children in `nodes`."""

    runs: list[RunRecord] = dataclasses.field(default_factory=list)
    nodes: list[NodeRecord] = dataclasses.field(default_factory=list)
    num_events: int = 0
    num_bad_lines: int = 0
    bad_lines: list[BadLine] = dataclasses.field(default_factory=list)  # the first ones
    num_lost: int = 0
    loose_events: list[AnyEvent] = dataclasses.field(default_factory=list)  # of no run
    newest_schema: int = 0

    def last_runs(self, num_runs: int) -> "TraceTree":
        """A tree of the last runs only."""
        first = max(0, len(self.runs) - num_runs)
        new_index: dict[int, int] = {}
        for index, node in enumerate(self.nodes):
            if node.run >= first:
                new_index[index] = len(new_index)
        nodes = [
            dataclasses.replace(
                self.nodes[index],
                run=self.nodes[index].run - first,
                parent=new_index.get(self.nodes[index].parent, -1),
                children=[new_index[child] for child in self.nodes[index].children],
            )
            for index in new_index
        ]
        runs = [dataclasses.replace(r, root=new_index[r.root]) for r in self.runs[first:]]
        return dataclasses.replace(self, runs=runs, nodes=nodes)


def read_trace(path: "str | os.PathLike[str]") -> TraceTree:
    """The tree of the file's runs. Raises OSError where it can't be read."""
    with open(path, "rb") as file:
        return build_tree(_lines(file))


def build_tree(lines: Iterable[bytes | None]) -> TraceTree:
    """The tree of these lines; None stands for one that was too long to be read. Raises nothing."""
    builder = _Builder()
    for number, line in enumerate(lines, 1):
        if line is None:
            builder.skip(number, f"longer than {MAX_LINE_BYTES} bytes")
        elif line.strip():
            builder.read(number, line)
    return builder.tree


def _lines(file: Any) -> Iterator[bytes | None]:
    while line := file.readline(MAX_LINE_BYTES):
        if line.endswith(b"\n") or len(line) < MAX_LINE_BYTES:
            yield line
            continue
        while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
            pass
        yield None


class _Builder:
    """Puts events into a tree, one after the other."""

    def __init__(self) -> None:
        self.tree = TraceTree()
        self._runs: dict[str, int] = {}
        self._nodes: dict[tuple[int, int], int] = {}
        self._calls: dict[tuple[int, int], CallRecord] = {}

    def skip(self, number: int, reason: str) -> None:
        self.tree.num_bad_lines += 1
        if len(self.tree.bad_lines) < MAX_NAMED_BAD_LINES:
            self.tree.bad_lines.append(BadLine(number, reason[:300]))

    def read(self, number: int, line: bytes) -> None:
        try:
            event = decode_event(line)
        except BadLineError as error:
            self.skip(number, str(error))
            return
        self.tree.num_events += 1
        if isinstance(event, Lost):
            self.tree.num_lost += event.count
        elif not event.run:
            self.tree.loose_events.append(event)
        else:
            self._place(event)

    def _place(self, event: AnyEvent) -> None:
        run = self._run(event.run)
        match event:
            case RunStart():
                self.tree.runs[run].start = event
                self.tree.newest_schema = max(self.tree.newest_schema, event.schema)
            case RunEnd():
                self.tree.runs[run].end = event
            case Cancel(node=0):
                self.tree.runs[run].cancelled = event.reason
                self._step(run, event)
            case _:
                self._step(run, event)

    def _step(self, run: int, event: AnyEvent) -> None:
        index = self._node(run, event.node)
        node = self.tree.nodes[index]
        match event:
            case CallStart():
                record = CallRecord(event)
                self._calls[index, event.call] = record
                node.steps.append(record)
            case FirstToken() | CacheHit() | Compaction() | CallEnd():
                self._of_call(index, event)
            case _:
                node.steps.append(event)
        match event:
            case Fork():
                self._fork(run, index, event)
            case Failure():
                node.failed = event.error
            case Cancel():
                node.cancelled = event.reason

    def _of_call(self, index: int, event: FirstToken | CacheHit | Compaction | CallEnd) -> None:
        record = self._calls.get((index, event.call))
        if record is None:  # its first line was lost or skipped
            start = CallStart(t=event.t, run=event.run, node=event.node, call=event.call)
            record = self._calls[index, event.call] = CallRecord(start)
            self.tree.nodes[index].steps.append(record)
        match event:
            case FirstToken():
                record.first_token_t = event.t
            case CacheHit():
                record.cached_tokens += event.cached_tokens
            case Compaction():
                record.compactions.append(event)
            case CallEnd():
                record.end = event
                record.cached_tokens = event.cached_tokens

    def _fork(self, run: int, parent: int, event: Fork) -> None:
        for place, node_id in enumerate(event.children):
            if (run, node_id) not in self._nodes:  # else it has a parent, or would be its own
                label = "scratch" if event.why == "scratch" else f"branch {place}"
                self._add_node(run, node_id, parent, label, event.why)

    def _run(self, run_id: str) -> int:
        if run_id not in self._runs:
            self._runs[run_id] = len(self.tree.runs)
            self.tree.runs.append(RunRecord(run_id, root=len(self.tree.nodes)))
            self._add_node(self._runs[run_id], 0, -1, "root", "root")
        return self._runs[run_id]

    def _node(self, run: int, node_id: int) -> int:
        """The state's index; one that no fork told of hangs below the run's root."""
        if (run, node_id) not in self._nodes:
            root = self.tree.runs[run].root
            self._add_node(run, node_id, root, f"state {node_id}", "unknown")
        return self._nodes[run, node_id]

    def _add_node(self, run: int, node_id: int, parent: int, label: str, why: str) -> None:
        index = len(self.tree.nodes)
        self._nodes[run, node_id] = index
        self.tree.nodes.append(NodeRecord(run, node_id, parent, label, why))
        if parent >= 0:
            self.tree.nodes[parent].children.append(index)


def problems(tree: TraceTree) -> list[str]:
    """What a reader of the page should know of the file, a sentence each."""
    found = []
    if tree.num_bad_lines:
        first = tree.bad_lines[0]
        found.append(
            f"lines skipped, since they are no events: {tree.num_bad_lines}; the first is line "
            f"{first.number}: {first.reason}"
        )
    if tree.num_lost:
        found.append(f"{tree.num_lost} events were lost when the trace was written")
    if tree.newest_schema > SCHEMA_VERSION:
        found.append(
            f"written by schema {tree.newest_schema}; this reader knows {SCHEMA_VERSION}, "
            "so update zipage-lang"
        )
    return found
