"""Makes one self-contained HTML page of a trace's tree: no outside requests, no build step.

Knows nothing of running programs or of how the page draws.
"""

import html
import importlib.resources
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from zipage_lang.trace_events import (
    AnyEvent,
    Budget,
    Cancel,
    Failure,
    Fork,
    Join,
    Note,
    Role,
    Scratch,
    Splice,
    Text,
)
from zipage_lang.trace_reader import (
    CallRecord,
    NodeRecord,
    RunRecord,
    TraceTree,
    problems,
    read_trace,
)

MAX_TEXT_LEN = 300_000  # characters of one text that the page holds
MAX_TEXTS_LEN = 24_000_000  # characters of all; texts beyond it are cut to MAX_LATE_TEXT_LEN
MAX_LATE_TEXT_LEN = 400

_TITLE, _DATA = "<!--title-->", "<!--data-->"
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render_page(tree: TraceTree, source: str) -> str:
    """The page's HTML. `source` is the trace file's name, which the page shows."""
    template = (
        importlib.resources.files("zipage_lang").joinpath("trace_template.html").read_text("utf-8")
    )
    data = json.dumps(page_data(tree, source), ensure_ascii=False, separators=(",", ":"))
    for sign, escape in _UNSAFE.items():
        data = data.replace(sign, escape)
    before, _, after = template.partition(_DATA)
    return before.replace(_TITLE, html.escape(_title(tree, source))) + data + after


def make_page(file: Path, out: Path, num_last_runs: int | None = None) -> tuple[Path, list[str]]:
    """Write the page of the trace `file` to `out`; returns where it lies and what was skipped.

    Raises ValueError for a file without any event, or when `out` is the trace itself; OSError
    where a file can't be read or written.
    """
    if out.resolve() == file.resolve():
        raise ValueError(f"{out} is the trace itself; name another file with -o")
    tree = read_trace(file)
    if not tree.num_events:
        why = f": {problems(tree)[0]}" if tree.num_bad_lines else ""
        raise ValueError(f"{file} holds no events of a trace{why}")
    shown = tree if num_last_runs is None else tree.last_runs(num_last_runs)
    out.write_text(render_page(shown, file.name), encoding="utf-8")
    return out, problems(tree)


def page_data(tree: TraceTree, source: str) -> dict[str, Any]:
    """What the page's script draws, as plain JSON; nodes and children are indexes."""
    return {
        "source": source,
        "problems": problems(tree),
        "runs": [_run(run) for run in tree.runs],
        "nodes": _Nodes(tree).all(),
    }


def _title(tree: TraceTree, source: str) -> str:
    names = dict.fromkeys(run.start.program for run in tree.runs if run.start is not None)
    return f"{', '.join(names) or source} \u00b7 zipage trace"


def _run(run: RunRecord) -> dict[str, Any]:
    start, end = run.start, run.end
    return {
        "id": run.run_id,
        "root": run.root,
        "program": start.program if start else "",
        "args": start.args if start else {},
        # A page's numbers are floats, which would round a seed.
        "seed": None if start is None or start.seed is None else str(start.seed),
        "backend": start.backend if start else "",
        "versions": start.versions if start else {},
        "sampling": start.sampling if start else {},
        "kv": start.kv if start else {},
        "t0": start.t if start else None,
        "t1": end.t if end else None,
        "error": end.error if end else None,
        "returned": end.returned if end else None,
        "cancelled": run.cancelled,
    }


class _Nodes:
    """All nodes as the page has them."""

    def __init__(self, tree: TraceTree) -> None:
        self._tree = tree
        self._index = {(node.run, node.node_id): i for i, node in enumerate(tree.nodes)}
        self._texts_len = 0

    def all(self) -> list[dict[str, Any]]:
        return [self._node(index, node) for index, node in enumerate(self._tree.nodes)]

    def _node(self, index: int, node: NodeRecord) -> dict[str, Any]:
        steps: list[dict[str, Any]] = []
        placed: set[int] = set()
        for step in node.steps:
            made = self._step(node, index, step)
            placed.update(made.get("children", ()) if made["k"] == "fork" else ())
            steps.append(made)
        unplaced = [child for child in node.children if child not in placed]
        if unplaced:
            steps.append({"k": "fork", "t": None, "why": "unknown", "children": unplaced})
        return {
            "run": node.run,
            "parent": node.parent,
            "label": node.label,
            "why": node.why,
            "failed": node.failed,
            "cancelled": node.cancelled,
            "steps": steps,
        }

    def _step(self, node: NodeRecord, index: int, step: "CallRecord | AnyEvent") -> dict[str, Any]:
        match step:
            case CallRecord():
                return self._call(step)
            case Text():
                return {"k": "text", "t": step.t, **self._text(step.text)}
            case Role():
                return {"k": "role", "t": step.t, "role": step.role, "opens": step.opens}
            case Fork():
                own = [c for c in self._known(node, step.children) if self._parent(c) == index]
                return {"k": "fork", "t": step.t, "why": step.why, "children": own, "kv": step.kv}
            case Join():
                known = self._known(node, step.children)
                return {"k": "join", "t": step.t, "children": known, "mode": step.mode}
            case Splice():
                return {"k": "splice", "t": step.t, "children": self._known(node, [step.child])}
            case Scratch():
                known = [] if step.child is None else self._known(node, [step.child])
                return {"k": "scratch", "t": step.t, "begins": step.begins, "children": known}
            case Cancel():
                return {"k": "cancel", "t": step.t, **self._text(step.reason)}
            case Failure():
                return {"k": "error", "t": step.t, **self._text(step.error)}
            case Budget():
                return {"k": "budget", "t": step.t, **self._text(_as_text(step.data))}
            case Note():
                text = f"{step.kind} {_as_text(step.data)}"
                return {"k": "note", "t": step.t, **self._text(text)}
        raise AssertionError(f"no rule for {step!r}")

    def _call(self, call: CallRecord) -> dict[str, Any]:
        start, end = call.start, call.end
        return {
            "k": "call",
            "t": start.t,
            "t1": None if end is None else max(start.t, end.t),
            "first": call.first_token_t,
            "kind": start.kind,
            "name": start.name,
            "call": start.call,
            "prompt": (end.prompt_tokens if end else 0) or start.prompt_tokens,
            "cached": call.cached_tokens,
            "tokens": end.tokens if end else 0,
            "status": end.status if end else "open",
            "error": end.error if end else None,
            "seed": None if start.seed is None else str(start.seed),
            "sampling": start.sampling,
            "kv": start.kv,
            "choices": start.choices,
            "choice": end.choice if end else None,
            "distribution": end.distribution if end else [],
            "samples": [self._sample(sample) for sample in end.samples] if end else [],
            "compactions": [
                [c.t, c.sample, c.logical_len, c.resident_len, c.count, c.dropped]
                for c in call.compactions
            ],
        }

    def _sample(self, sample: Any) -> dict[str, Any]:
        thinking = None if sample.thinking is None else self._text(sample.thinking)["text"]
        kv = {name: getattr(sample.kv, name) for name in type(sample.kv).__struct_fields__}
        return {
            **self._text(sample.text),
            "thinking": thinking,
            "tokens": sample.tokens,
            "finish": sample.finish_reason,
            "logprob": sample.logprob_mean,
            "kv": kv,
        }

    def _text(self, text: str) -> dict[str, Any]:
        """The text, or its beginning and how many characters the page leaves out."""
        is_late = self._texts_len > MAX_TEXTS_LEN
        shown = text[: MAX_LATE_TEXT_LEN if is_late else MAX_TEXT_LEN]
        self._texts_len += len(shown)
        cut = len(text) - len(shown)
        return {"text": shown, "cut": cut} if cut else {"text": shown}

    def _known(self, node: NodeRecord, node_ids: Sequence[int]) -> list[int]:
        """Indexes of these states of the node's run, each once; unknown ones are left out."""
        found = (self._index.get((node.run, node_id)) for node_id in node_ids)
        return list(dict.fromkeys(index for index in found if index is not None))

    def _parent(self, index: int) -> int:
        return self._tree.nodes[index].parent


def _as_text(data: Any) -> str:
    return msgspec.json.encode(data).decode()
