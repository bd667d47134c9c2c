"""Trace files, cut and garbled: the reader builds a sound tree, and a page is made of it.

Knows nothing of running programs.
"""

import itertools
import tempfile
from pathlib import Path
from unittest import mock

import msgspec
from test_support.fuzz_input import Choices, words_of

from zipage_lang import trace_reader
from zipage_lang.trace_events import AnyEvent
from zipage_lang.trace_page import render_page

LINE_LIMIT = 600  # so that lines over the limit are found by small inputs
EVENTS = (
    {"event": "run_start", "t": 1.0, "run": "a", "schema": 1, "program": "p", "seed": 7},
    {"event": "text", "t": 1.0, "run": "a", "text": "hello"},
    {"event": "role", "t": 1.0, "run": "a", "role": "user", "opens": True},
    {"event": "call_start", "t": 1.1, "run": "a", "call": 0, "name": "x", "sampling": {"n": 2}},
    {"event": "first_token", "t": 1.2, "run": "a", "call": 0},
    {"event": "compaction", "t": 1.2, "run": "a", "call": 0, "logical_len": 9, "resident_len": 3},
    {"event": "cache_hit", "t": 1.2, "run": "a", "call": 0, "cached_tokens": 3},
    {
        "event": "call_end",
        "t": 2.0,
        "run": "a",
        "call": 0,
        "samples": [{"text": "y", "kv": {"resident_len": 3}, "logprob_mean": -0.5}],
        "distribution": [0.5, 0.5],
    },
    {"event": "fork", "t": 2.0, "run": "a", "children": [1, 2]},
    {"event": "join", "t": 3.0, "run": "a", "node": 0, "children": [1, 2]},
    {"event": "splice", "t": 3.0, "run": "a", "child": 1},
    {"event": "scratch", "t": 3.0, "run": "a", "begins": True, "child": 3},
    {"event": "cancel", "t": 3.0, "run": "a", "node": 2, "reason": "budget"},
    {"event": "budget", "t": 3.0, "run": "a", "data": {"left": 3}},
    {"event": "error", "t": 3.0, "run": "a", "node": 1, "error": "no"},
    {"event": "note", "t": 3.0, "run": "a", "kind": "k"},
    {"event": "lost", "t": 3.0, "count": 4},
    {"event": "run_end", "t": 4.0, "run": "a", "returned": "3"},
)
WORDS = words_of(*EVENTS, [f for kind in AnyEvent.__args__ for f in kind.__struct_fields__])


def target(data: bytes) -> None:
    choices = Choices(data)
    text = choices.rest() if choices.flag() else file_of(choices)
    with tempfile.TemporaryDirectory(prefix="fuzz-trace-") as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_bytes(text)
        with mock.patch.object(trace_reader, "MAX_LINE_BYTES", LINE_LIMIT):
            tree = trace_reader.read_trace(path)
    check(tree)
    check(tree.last_runs(choices.below(3)))
    page = render_page(tree, "<x>.jsonl")
    assert page.startswith("<!doctype html>")
    page.encode()
    assert all(line.isprintable() or line for line in trace_reader.problems(tree))


def file_of(choices: Choices) -> bytes:
    lines = []
    for _ in range(choices.below(16)):
        event = choices.changed(choices.pick(EVENTS), WORDS)
        try:
            lines.append(choices.damaged(msgspec.json.encode(event)))
        except (UnicodeEncodeError, OverflowError):
            lines.append(b"{")
    return choices.pick((b"\n", b"\r\n", b"\n\n", b"")).join(lines)


def check(tree: trace_reader.TraceTree) -> None:
    """What the page relies on."""
    for index, node in enumerate(tree.nodes):
        assert -1 <= node.parent < index
        assert 0 <= node.run < len(tree.runs)
        assert all(tree.nodes[child].parent == index for child in node.children)
        assert len(set(node.children)) == len(node.children)
    roots = [index for index, node in enumerate(tree.nodes) if node.parent < 0]
    assert roots == [run.root for run in tree.runs]
    assert len(tree.bad_lines) <= min(tree.num_bad_lines, trace_reader.MAX_NAMED_BAD_LINES)
    numbers = [line.number for line in tree.bad_lines]
    assert all(first < second for first, second in itertools.pairwise(numbers))
