"""The reader takes any file, names what it skips, and builds a tree whose links can be trusted."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zipage_lang import trace_reader
from zipage_lang.trace_events import (
    AnyEvent,
    CallEnd,
    CallStart,
    Cancel,
    Failure,
    Fork,
    Lost,
    RunEnd,
    RunStart,
    Text,
    encode_event,
)
from zipage_lang.trace_page import render_page
from zipage_lang.trace_reader import build_tree, problems, read_trace

small = st.integers(0, 4)
names = st.sampled_from(["a", "b", ""])
common = {"t": st.floats(0, 100), "run": names, "node": small}
events = st.one_of(
    st.builds(RunStart, schema=st.integers(0, 3), program=st.text(max_size=3), **common),
    st.builds(RunEnd, **common),
    st.builds(Text, text=st.text(max_size=5), **common),
    st.builds(CallStart, call=small, **common),
    st.builds(CallEnd, call=small, **common),
    st.builds(Fork, children=st.lists(small, max_size=4), **common),
    st.builds(Cancel, **common),
    st.builds(Failure, error=st.text(max_size=3), **common),
    st.builds(Lost, count=small, **common),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
fields = sorted({f for kind in AnyEvent.__args__ for f in kind.__struct_fields__} | {"event"})
kinds = st.sampled_from([kind.__struct_config__.tag for kind in AnyEvent.__args__])
half_events = st.dictionaries(st.sampled_from(fields), json_values, max_size=6).flatmap(
    lambda data: kinds.map(lambda kind: msgspec.json.encode({"t": 1.0, **data, "event": kind}))
)
garbage_lines = st.binary(max_size=30) | json_values.map(msgspec.json.encode) | half_events


def check(tree):
    """What the page relies on."""
    for index, node in enumerate(tree.nodes):
        assert node.parent < index
        assert 0 <= node.run < len(tree.runs)
        for child in node.children:
            assert tree.nodes[child].parent == index
        if node.parent >= 0:
            assert tree.nodes[node.parent].children.count(index) == 1
            assert tree.nodes[node.parent].run == node.run
    roots = [index for index, node in enumerate(tree.nodes) if node.parent < 0]
    assert roots == [run.root for run in tree.runs]


@given(st.lists(events.map(encode_event) | garbage_lines, max_size=25))
def test_any_lines_make_a_sound_tree_and_a_page(lines):
    lines = [line for line in lines if b"\n" not in line]
    tree = build_tree(lines)
    check(tree)
    check(tree.last_runs(1))
    assert tree.num_events + tree.num_bad_lines == sum(bool(line.strip()) for line in lines)
    assert render_page(tree, "x.jsonl").startswith("<!doctype html>")


@given(st.lists(events, max_size=25))
def test_whole_events_are_never_bad_lines(drawn):
    tree = build_tree(map(encode_event, drawn))
    assert tree.num_bad_lines == 0
    assert tree.num_events == len(drawn)


@given(st.binary(max_size=300))
def test_any_bytes_are_read_as_a_file(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(data)
    check(read_trace(path))


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"null",
        b'{"event":"text"}',
        b'{"event":"nonsense","t":1}',
        b'{"event":"text","t":1,"text":3}',
        b'{"event":"text","t":-1,"text":"x"}',
        b'{"event":"call_start","t":1,"call":-1}',
        b'{"event":"fork","t":1,"run":"a","children":[99999999999999999999]}',
        b'{"event":"call_end","t":1,"call":0,"tokens":1e400}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_bad_line_is_counted_and_named_by_its_number(line):
    good = encode_event(Text(t=1.0, run="a", text="x"))
    tree = build_tree([good, b"", line, good])
    assert (tree.num_events, tree.num_bad_lines) == (2, 1)
    assert tree.bad_lines[0].number == 3
    assert tree.bad_lines[0].reason
    assert "line 3" in problems(tree)[0]


def test_only_the_first_bad_lines_are_kept_but_all_are_counted():
    tree = build_tree([b"x"] * 1000)
    assert tree.num_bad_lines == 1000
    assert len(tree.bad_lines) == trace_reader.MAX_NAMED_BAD_LINES


def test_a_line_beyond_the_limit_is_skipped_and_the_next_one_read(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_reader, "MAX_LINE_BYTES", 200)
    good = encode_event(Text(t=1.0, run="a", text="x"))
    path = tmp_path / "long.jsonl"
    path.write_bytes(good + b"\n" + b"x" * 1000 + b"\n" + good)
    tree = read_trace(path)
    assert (tree.num_events, tree.num_bad_lines) == (2, 1)
    assert tree.bad_lines[0].number == 2


def test_a_state_that_no_fork_told_of_hangs_below_the_root():
    tree = build_tree([encode_event(Text(t=1.0, run="a", node=7, text="x"))])
    assert [(node.node_id, node.parent) for node in tree.nodes] == [(0, -1), (7, 0)]


def test_a_fork_cannot_make_a_state_its_own_parent():
    told = [Fork(t=1.0, run="a", node=1, children=[1, 0]), Fork(t=2.0, run="a", children=[1, 2, 2])]
    tree = build_tree(map(encode_event, told))
    check(tree)
    assert sorted(node.node_id for node in tree.nodes) == [0, 1, 2]


def test_a_call_whose_first_line_is_missing_is_there():
    tree = build_tree([encode_event(CallEnd(t=1.0, run="a", call=3, tokens=5))])
    (record,) = tree.nodes[0].steps
    assert (record.start.call, record.end.tokens) == (3, 5)


def test_a_call_that_never_ended_has_no_end():
    tree = build_tree([encode_event(CallStart(t=1.0, run="a", call=0))])
    assert tree.nodes[0].steps[0].end is None


def test_the_last_runs_keep_their_links():
    lines = []
    for run in "abc":
        lines.append(RunStart(t=1.0, run=run, schema=1, program=run))
        lines.append(Fork(t=1.0, run=run, children=[1, 2]))
    tree = build_tree(map(encode_event, lines)).last_runs(2)
    check(tree)
    assert [run.run_id for run in tree.runs] == ["b", "c"]
    assert len(tree.nodes) == 6


def test_a_newer_schema_and_lost_events_are_told():
    lines = [RunStart(t=1.0, run="a", schema=9, program="p"), Lost(t=1.0, count=4)]
    found = " ".join(problems(build_tree(map(encode_event, lines))))
    assert "schema 9" in found
    assert "4 events were lost" in found
