"""A run's trace file: what stands in it, in which order, and that writing it never breaks a run."""

import asyncio
import dataclasses
import json
import logging
import os
import re
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import pytest

import zipage_lang as zipage
from zipage_lang import trace as trace_module
from zipage_lang.runtime.messages import KVUsage, Usage
from zipage_lang.testing import Reply, ScriptedBackend
from zipage_lang.trace import open_trace
from zipage_lang.trace_events import (
    SCHEMA_VERSION,
    AnyEvent,
    CallEnd,
    KVState,
    Note,
    Sample,
    Text,
    decode_event,
    encode_event,
)
from zipage_lang.trace_reader import read_trace
from zipage_lang.trace_values import shortened
from zipage_lang.trace_writer import TraceWriter


class CompactingBackend(ScriptedBackend):
    """Compacts each time 8 tokens were generated, and finds half of each prompt in its cache."""

    async def generate(self, token_ids, sampling, *, kv, group_id):
        num_prompt = len(token_ids)
        async for output in super().generate(token_ids, sampling, kv=kv, group_id=group_id):
            num_new = len(output.token_ids)
            dropped = num_new // 8 * 4
            usage = Usage(
                prompt_tokens=num_prompt, completion_tokens=num_new, cached_tokens=num_prompt // 2
            )
            state = KVUsage(
                logical_len=num_prompt + num_new,
                resident_len=num_prompt + num_new - dropped,
                max_resident_len=num_prompt + 12,
                compactions=num_new // 8,
                dropped=dropped,
            )
            yield dataclasses.replace(output, usage=usage, kv=state)


@zipage.function
def forked(s, question):
    s += question + zipage.gen("plan", max_tokens=20)
    branches = s.fork(2)
    branches += lambda index: f" path {index}:"
    branches += zipage.gen("step", max_tokens=4)
    branches.join("concat")
    s += zipage.select("sure", choices=["yes", "no"])
    return s["sure"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def events_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_forked_programs_events_are_in_order_and_complete(path):
    forked.run("Why?", backend=CompactingBackend("abcdefghijklmnopq"), trace=path, seed=5)
    events = events_of(path)
    assert len({event["run"] for event in events}) == 1
    assert [event["t"] for event in events] == sorted(event["t"] for event in events)
    of_root = [event["event"] for event in events if event.get("node", 0) == 0]
    assert of_root == [
        *("run_start", "text", "call_start", "first_token", "cache_hit", "compaction"),
        *("compaction", "call_end", "fork", "join", "splice", "splice"),
        *("call_start", "first_token", *["cache_hit"] * 2, "call_end", "run_end"),
    ]
    for branch in (1, 2):
        of_branch = [event["event"] for event in events if event.get("node") == branch]
        assert of_branch == ["text", "call_start", "first_token", "cache_hit", "call_end"]


def test_the_lines_say_what_was_asked_and_what_came(path):
    state = forked.run(
        "Why?", backend=CompactingBackend("abcdefghijklmnopq"), trace=path, seed=5, temperature=0.5
    )
    start, *events, end = events_of(path)
    assert (start["schema"], start["program"], start["args"]) == (
        1,
        "forked",
        {"question": "'Why?'"},
    )
    assert (start["seed"], start["sampling"]) == (5, {"temperature": 0.5})
    assert start["versions"].keys() == {"zipage-lang", "python"}
    assert end["returned"] == repr(state.ret_value)
    asked, told = (
        next(e for e in events if e["event"] == kind) for kind in ("call_start", "call_end")
    )
    assert (asked["name"], asked["prompt_tokens"]) == ("plan", 4)
    assert asked["sampling"] == {"max_tokens": 20, "temperature": 0.5}
    (sample,) = told["samples"]
    assert (sample["text"], told["cached_tokens"]) == (state["plan"], 2)
    assert told["tokens"] == len(state.meta("plan").token_ids) == 18
    assert sample["kv"]["compactions"] == 2
    assert sample["kv"]["dropped"] == 8
    compactions = [e for e in events if e["event"] == "compaction"]
    assert [c["logical_len"] for c in compactions] == [12, 20]
    assert sum(c["dropped"] for c in compactions) == 8
    choice = [e for e in events if e["event"] == "call_end"][-1]
    assert choice["samples"][0]["text"] == state["sure"]
    assert sum(choice["distribution"]) == pytest.approx(1)


def test_every_line_is_one_of_the_schema(path):
    forked.run("Why?", backend=CompactingBackend("abcdefghijklmnopq"), trace=path)
    for line in path.read_bytes().splitlines():
        assert encode_event(decode_event(line)) == line


def test_samples_of_one_call_are_told_apart(path):
    @zipage.function
    def several(s):
        s += "Q" + zipage.gen("a", n=3, max_tokens=2)

    several.run(backend=ScriptedBackend(["one", "two", "six"]), trace=path)
    (end,) = (event for event in events_of(path) if event["event"] == "call_end")
    assert [sample["text"] for sample in end["samples"]] == ["on", "tw", "si"]
    assert end["tokens"] == 6


def test_thinking_is_kept_apart_from_the_answer(path):
    @zipage.function
    def thinking(s):
        s += "Q" + zipage.separate_reasoning(zipage.gen("a"))

    thinking.run(backend=ScriptedBackend("<think>hm</think>yes"), trace=path)
    (end,) = (event for event in events_of(path) if event["event"] == "call_end")
    (sample,) = end["samples"]
    assert (sample["thinking"], sample["text"]) == ("hm", "yes")


def test_a_score_is_told_from_a_select(path):
    @zipage.function
    def scoring(s):
        s += "Sky: " + zipage.score("color", ["blue", "red"])

    scoring.run(backend=ScriptedBackend(), trace=path)
    asked, *_, told, _ = events_of(path)[2:]
    assert (asked["kind"], asked["choices"]) == ("score", ["blue", "red"])
    assert len(told["distribution"]) == 2
    assert told.get("tokens", 0) == 0


def test_a_budget_that_runs_out_is_told(path):
    @zipage.function
    def spending(s):
        s += "Q" + zipage.gen("a") + zipage.gen("b")

    backend = ScriptedBackend("x")
    spending.run(backend=backend, trace=path, budget=zipage.Budget(calls=1))
    events = events_of(path)
    assert sum(event["event"] == "call_start" for event in events) == 1
    (budget,) = (event for event in events if event["event"] == "budget")
    assert budget["data"]["call"] == 1


def test_a_failed_branch_says_why_and_its_own_branches_are_seen(path):
    @zipage.function
    def failing(s):
        branches = s.fork(2)
        branches += lambda index: f"path {index}"
        branches += zipage.gen("a")
        inner = branches[1].fork(2)
        inner += zipage.gen("b")
        branches.join(on_error="keep")

    backend = ScriptedBackend({"path 0": "fine", "path 1": RuntimeError("broken")})
    failing.run(backend=backend, trace=path)
    events = events_of(path)
    (failure,) = (event for event in events if event["event"] == "error")
    assert failure["error"] == "RuntimeError: broken"
    ended = {e["node"]: e.get("status", "ok") for e in events if e["event"] == "call_end"}
    assert ended == {1: "ok", 2: "error"}
    assert [e["children"] for e in events if e["event"] == "fork"] == [[1, 2], [3, 4]]
    cancelled = [event["node"] for event in events if event["event"] == "cancel"]
    assert cancelled == [3, 4]


def test_a_run_whose_body_raises_ends_with_its_error_and_cancelled_calls(path):
    never: Future[None] = Future()

    backend = ScriptedBackend(Reply("x", gate=never))

    @zipage.function
    def raising(s):
        s += "Q" + zipage.gen("a")
        while not backend.calls:
            time.sleep(0.001)
        raise KeyError("mine")

    with pytest.raises(KeyError):
        raising.run(backend=backend, trace=path)
    events = events_of(path)
    assert events[-1]["event"] == "run_end"
    assert events[-1]["error"] == "KeyError: 'mine'"
    (end,) = (event for event in events if event["event"] == "call_end")
    assert end["status"] == "cancelled"
    assert "cancel" in {event["event"] for event in events}


def test_an_async_program_and_a_streamed_one_are_traced_to_their_end(path):
    @zipage.function
    async def asking(s):
        s += "Q" + zipage.gen("a")
        return await s["a"]

    asyncio.run(asking.run_async(backend=ScriptedBackend("yes"), trace=path))
    assert events_of(path)[-1] == events_of(path)[-1] | {"event": "run_end", "returned": "'yes'"}
    with zipage.Trace(path) as trace:
        state = asking.run(backend=ScriptedBackend("yes"), trace=trace, stream=True)
        assert "".join(state.text_iter("a")) == "yes"
        state.core.session.trace.ended(state.core.session, state._body)
    assert Counter(event["event"] for event in events_of(path))["run_end"] == 2


def test_a_batch_writes_all_its_runs_to_one_file(path):
    items = [{"question": f"{index}?"} for index in range(20)]
    forked.run_batch(items, backend=ScriptedBackend("abc"), trace=path)
    tree = read_trace(path)
    assert len(tree.runs) == 20
    assert {run.start.args["question"] for run in tree.runs} == {f"'{i}?'" for i in range(20)}
    assert all(run.end is not None for run in tree.runs)
    assert tree.num_bad_lines == 0


def test_the_environment_traces_every_run_that_names_no_file(path, monkeypatch):
    monkeypatch.setenv("ZIPAGE_TRACE", str(path))
    forked.run("a", backend=ScriptedBackend("abc"))
    forked.run("b", backend=ScriptedBackend("abc"))
    assert len(read_trace(path).runs) == 2


def test_the_environments_path_that_cannot_be_written_breaks_no_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ZIPAGE_TRACE", str(tmp_path / "nowhere" / "a.jsonl"))
    assert forked.run("a", backend=ScriptedBackend("abc")).ret_value == "yes"
    assert "nowhere" in caplog.text


def test_a_path_that_cannot_be_opened_is_named_before_the_run_begins(tmp_path):
    backend = ScriptedBackend("abc")
    with pytest.raises(OSError, match="nowhere"):
        forked.run("a", backend=backend, trace=tmp_path / "nowhere" / "a.jsonl")
    assert backend.calls == []


@pytest.mark.parametrize("wrong", [3, "", True, object()])
def test_what_is_no_path_and_no_trace_is_refused(wrong):
    with pytest.raises(ValueError, match="trace="):
        open_trace(wrong)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full, which is a full disk")
def test_a_full_disk_gives_one_warning_and_the_run_goes_on(caplog):
    with caplog.at_level(logging.WARNING, "zipage.trace"):
        for _ in range(2):
            state = forked.run("Why?", backend=ScriptedBackend("abc"), trace="/dev/full")
            assert state.ret_value == "yes"
    assert [r.getMessage().count("/dev/full") for r in caplog.records] == [1, 1]  # one a file


def test_a_closed_trace_gives_one_warning_and_the_run_goes_on(path, caplog):
    trace = zipage.Trace(path)
    trace.close()
    with caplog.at_level(logging.WARNING, "zipage.trace"):
        assert forked.run("Why?", backend=ScriptedBackend("abc"), trace=trace).ret_value == "yes"
    assert len(caplog.records) == 1
    assert str(path) in caplog.text


def test_a_file_that_somebody_closed_gives_one_warning(path, caplog):
    with caplog.at_level(logging.WARNING, "zipage.trace"), zipage.Trace(path) as trace:
        trace._writer._file.close()
        assert forked.run("Why?", backend=ScriptedBackend("abc"), trace=trace).ret_value == "yes"
    assert len(caplog.records) == 1


def test_lines_after_a_torn_one_are_whole(path):
    path.write_bytes(b'{"event":"te')
    forked.run("Why?", backend=ScriptedBackend("abc"), trace=path)
    tree = read_trace(path)
    assert (tree.num_bad_lines, tree.bad_lines[0].number) == (1, 1)
    assert tree.runs[0].end is not None


def test_what_json_cannot_hold_is_written_as_its_repr_or_counted_as_lost(path):
    loop: list = []
    loop.append(loop)
    with zipage.Trace(path) as trace:
        trace.emit("odd", value={1, 2}, other=object(), text="a\ud800b", number=float("nan"))
        trace.emit("endless", value=loop)
        trace.emit("plain", value=1)
    tree = read_trace(path)
    kinds = [event.kind for event in tree.loose_events]
    assert kinds == ["odd", "plain"]
    assert tree.loose_events[0].data["text"] == "a?b"
    assert tree.num_lost == 1
    assert tree.num_bad_lines == 0


def test_events_beyond_what_may_wait_are_counted_not_kept(path, monkeypatch):
    monkeypatch.setattr("zipage_lang.trace_writer.MAX_QUEUED", 0)
    writer = TraceWriter(path)
    for _ in range(7):
        writer.put(Note(t=1.0, kind="x"))
    writer.close()
    assert read_trace(path).num_lost == 7


def test_a_budget_and_anything_else_have_lines_of_their_own(path):
    @zipage.function
    def noting(s):
        s.core.trace.emit("budget", reason="tokens", left=0)
        s.core.trace.emit("idea", text="mine")

    noting.run(backend=ScriptedBackend(), trace=path)
    _, budget, note, _ = events_of(path)
    assert (budget["event"], budget["data"]) == ("budget", {"reason": "tokens", "left": 0})
    assert (note["event"], note["kind"], note["data"]) == ("note", "idea", {"text": "mine"})


def test_a_scratch_frame_begins_and_ends_in_its_own_state(path):
    @zipage.function
    def thinking(s):
        s += "Q"
        with s.scratch() as frame:
            frame += "draft:" + zipage.gen("draft")
        s += "A" + zipage.gen("a")

    thinking.run(backend=ScriptedBackend("x"), trace=path)
    events = events_of(path)
    (fork,) = (event for event in events if event["event"] == "fork")
    assert (fork["children"], fork["why"]) == ([1], "scratch")
    frames = [e for e in events if e["event"] == "scratch"]
    assert [(e.get("node", 0), e["begins"], e["child"]) for e in frames] == [
        (0, True, 1),
        (0, False, 1),
    ]
    assert events.index(frames[1]) > next(
        at for at, e in enumerate(events) if e["event"] == "call_end" and e.get("node") == 1
    )


def test_a_cancelled_branch_says_why(path):
    never: Future[None] = Future()

    @zipage.function
    def losing(s):
        branches = s.fork(2)
        branches += zipage.gen("a")
        while len(backend.calls) < 2:
            time.sleep(0.001)
        branches.cancel(branches.states[1:], reason="one is enough")
        branches.join(on_error="drop")

    backend = ScriptedBackend(["yes", Reply("no", gate=never)])
    losing.run(backend=backend, trace=path)
    events = events_of(path)
    (cancel,) = (event for event in events if event["event"] == "cancel")
    assert cancel["node"] == 2
    assert "one is enough" in cancel["reason"]
    ended = {e["node"]: e.get("status", "ok") for e in events if e["event"] == "call_end"}
    assert ended == {1: "ok", 2: "cancelled"}


def test_a_run_that_nobody_traces_makes_no_trace_objects(monkeypatch):
    monkeypatch.delenv("ZIPAGE_TRACE", raising=False)
    for name in ("Trace", "RunTrace", "NodeTrace"):
        monkeypatch.setattr(trace_module, name, None)  # would raise if it were called
    monkeypatch.setattr(trace_module, "_of_environment", lambda: None)
    state = forked.run("Why?", backend=ScriptedBackend("abc"))
    assert state.core.trace is None
    assert state.core.session.trace is None


def test_an_argument_is_shortened_even_where_its_repr_raises():
    class Bad:
        def __repr__(self):
            raise RuntimeError("no")

    assert len(shortened("x" * 10**6)) <= 500
    assert len(shortened([["y" * 1000] * 1000] * 1000)) <= 500
    assert shortened(Bad()) == "<Bad whose repr raised RuntimeError>" or "Bad" in shortened(Bad())


def test_default_fields_are_left_out_of_a_line():
    assert json.loads(encode_event(Text(t=1.0, run="r", text="x"))) == {
        "event": "text",
        "t": 1.0,
        "run": "r",
        "text": "x",
    }
    assert b"samples" not in encode_event(CallEnd(t=1.0, run="r", call=0))


def test_the_documented_table_is_the_schema():
    text = (Path(__file__).resolve().parents[2] / "docs" / "trace.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)$", text, re.MULTILINE))
    kinds = {kind.__struct_config__.tag: kind for kind in AnyEvent.__args__}
    assert rows.keys() == kinds.keys()
    for tag, kind in kinds.items():
        fields = set(kind.__struct_fields__) - {"t", "run", "node"}
        assert not {name for name in fields if f"`{name}`" not in rows[tag]}, tag
    for name in (*Sample.__struct_fields__, *KVState.__struct_fields__):
        assert f"`{name}`" in text
    assert f"schema {SCHEMA_VERSION}" in text
