"""The page holds every state and nothing from outside; the command makes it; a browser draws it."""

import json
import re
import shutil
import subprocess

import pytest
from typer.testing import CliRunner

import zipage_lang as zipage
from zipage_lang.cli import app
from zipage_lang.testing import ScriptedBackend
from zipage_lang.trace_events import (
    CallEnd,
    CallStart,
    Cancel,
    Compaction,
    Failure,
    Fork,
    KVState,
    RunEnd,
    RunStart,
    Sample,
    Text,
    encode_event,
)
from zipage_lang.trace_page import MAX_TEXT_LEN, page_data, render_page
from zipage_lang.trace_reader import build_tree

NASTY = '</script><script>document.title="owned"</script><!-- & \u2028 <b>bold</b> <!--data-->'
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def tree_of(events):
    return build_tree(encode_event(event) for event in events)


def many(num_branches):
    """A run with a root call and so many branches of one call each; one failed, one cancelled."""
    events = [
        RunStart(t=1.0, run="r", schema=1, program="many", args={"question": "'why'"}),
        Text(t=1.0, run="r", text="The question"),
        *call(0, "plan", "the plan", 1.0),
        Fork(t=3.0, run="r", children=list(range(1, num_branches + 1))),
    ]
    for node in range(1, num_branches + 1):
        events += [Text(t=3.0, run="r", node=node, text=f"path {node}:")]
        events += call(node, "step", f"said by {node}", 3.0)
    events.append(Failure(t=5.0, run="r", node=1, error="RuntimeError: broken"))
    events.append(Cancel(t=5.0, run="r", node=2, reason="lost the vote"))
    return [*events, RunEnd(t=6.0, run="r", returned="'x'")]


def call(node, name, text, begin):
    kv = KVState(logical_len=90, resident_len=50, max_resident_len=60, compactions=1, dropped=40)
    sample = Sample(text=text, tokens=9, finish_reason="stop", kv=kv)
    place = {"run": "r", "node": node, "call": 0}
    return [
        CallStart(t=begin, name=name, prompt_tokens=40, **place),
        Compaction(t=begin + 1, logical_len=80, resident_len=40, dropped=40, **place),
        CallEnd(
            t=begin + 2, tokens=9, prompt_tokens=40, cached_tokens=32, samples=[sample], **place
        ),
    ]


def data_in(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1])


def test_the_page_holds_every_state_with_its_text_and_numbers():
    data = data_in(render_page(tree_of(many(300)), "many.jsonl"))
    assert len(data["nodes"]) == 301
    for node in range(1, 301):
        text, spoken = data["nodes"][node]["steps"][:2]
        assert text["text"] == f"path {node}:"
        assert spoken["samples"][0]["text"] == f"said by {node}"
        assert (spoken["tokens"], spoken["cached"], spoken["prompt"]) == (9, 32, 40)
        assert spoken["samples"][0]["kv"]["dropped"] == 40
        assert spoken["compactions"] == [[4.0, 0, 80, 40, 1, 40]]
    assert data["nodes"][1]["failed"] == "RuntimeError: broken"
    assert data["nodes"][2]["cancelled"] == "lost the vote"
    (fork,) = (step for step in data["nodes"][0]["steps"] if step["k"] == "fork")
    assert fork["children"] == list(range(1, 301))


def test_the_page_asks_for_nothing_from_outside():
    page = render_page(tree_of(many(3)), "many.jsonl")
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<link|\bsrc=", page.split('id="data"')[0])
    assert "default-src 'none'" in page
    assert not re.search(r"https?:|\bfetch\(|XMLHttpRequest|import\(", page)


def test_markup_in_a_trace_stays_text():
    events = [
        RunStart(t=1.0, run="r", schema=1, program=NASTY, args={NASTY: NASTY}),
        Text(t=1.0, run="r", text=NASTY),
        Failure(t=2.0, run="r", error=NASTY),
    ]
    page = render_page(tree_of(events), NASTY)
    plain = render_page(tree_of([]), "x")
    assert page.count("<script") == plain.count("<script")
    assert page.count("</script>") == plain.count("</script>")
    assert "<b>" not in page
    assert data_in(page)["nodes"][0]["steps"][0]["text"] == NASTY
    assert data_in(page)["source"] == NASTY


def test_a_large_value_is_cut_and_the_page_says_by_how_much():
    data = page_data(tree_of([Text(t=1.0, run="r", text="x" * 1_000_000)]), "x.jsonl")
    (step,) = data["nodes"][0]["steps"]
    assert len(step["text"]) == MAX_TEXT_LEN
    assert step["cut"] == 1_000_000 - MAX_TEXT_LEN


def test_many_large_values_make_no_endless_page():
    events = [Text(t=1.0, run="r", text="x" * MAX_TEXT_LEN) for _ in range(200)]
    assert len(render_page(tree_of(events), "x.jsonl")) < 30_000_000


def test_a_seed_keeps_all_its_digits():
    start = RunStart(t=1.0, run="r", schema=1, program="p", seed=2**64 - 1)
    assert page_data(tree_of([start]), "x")["runs"][0]["seed"] == "18446744073709551615"


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(encode_event(event) + b"\n" for event in many(4)))
    return path


def zipage_trace(*arguments):
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def test_the_command_makes_the_page_of_a_real_run(tmp_path):
    @zipage.function
    def hello(s):
        s += "Hi " + zipage.gen("name")

    path, page = tmp_path / "run.jsonl", tmp_path / "tree.html"
    hello.run(backend=ScriptedBackend("Ada"), trace=path)
    result = zipage_trace(path, "-o", page)
    assert (result.exit_code, result.stdout) == (0, f"{page}\n")
    (node,) = data_in(page.read_text())["nodes"]
    assert [step["k"] for step in node["steps"]] == ["text", "call"]
    assert node["steps"][1]["samples"][0]["text"] == "Ada"


def test_the_command_names_the_page_after_the_file(trace_file):
    assert zipage_trace(trace_file).exit_code == 0
    assert trace_file.with_suffix(".html").exists()


def test_the_command_says_which_lines_it_skipped(trace_file):
    trace_file.write_bytes(trace_file.read_bytes() + b"nonsense\n")
    result = zipage_trace(trace_file)
    assert result.exit_code == 0
    assert "no events: 1; the first is line 26" in result.stderr


def test_the_command_can_show_the_last_run_only(trace_file):
    more = [RunStart(t=9.0, run="s", schema=1, program="later")]
    trace_file.write_bytes(trace_file.read_bytes() + b"\n".join(map(encode_event, more)))
    assert zipage_trace(trace_file, "--last", 1).exit_code == 0
    data = data_in(trace_file.with_suffix(".html").read_text())
    assert [run["program"] for run in data["runs"]] == ["later"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"", "holds no events"), (b"nonsense\n", "line 1")],
)
def test_the_command_explains_a_file_it_cannot_use(tmp_path, content, message):
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_bytes(content)
    result = zipage_trace(path)
    assert result.exit_code == 2
    assert message in result.stderr
    assert str(path) in result.stderr


def test_the_command_never_writes_over_the_trace(trace_file):
    before = trace_file.read_bytes()
    result = zipage_trace(trace_file, "-o", trace_file)
    assert (result.exit_code, trace_file.read_bytes()) == (2, before)


def drawn(tmp_path, events, source="many.jsonl"):
    """The page's document after its script ran in a headless browser."""
    page = tmp_path / "page.html"
    page.write_text(render_page(tree_of(events), source), encoding="utf-8")
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,800"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", "--dump-dom"),
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH to draw the page")


@browser
@pytest.mark.parametrize("num_branches", [3, 300])
def test_a_browser_draws_the_tree(tmp_path, num_branches):
    document = drawn(tmp_path, many(num_branches))
    assert 'data-ready="yes"' in document
    rows = re.findall(r'<div class="row[^>]*role="treeitem"', document)
    assert 3 <= len(rows) <= 60
    assert f"{num_branches} branches, {num_branches} calls, 1 failed, 1 cancelled" in document


@browser
def test_a_browser_runs_nothing_that_a_trace_holds(tmp_path):
    events = [
        RunStart(t=1.0, run="r", schema=1, program=NASTY, args={NASTY: NASTY}),
        Text(t=1.0, run="r", text=NASTY + "y" * 1_000_000),
        Failure(t=2.0, run="r", error=NASTY),
    ]
    document = drawn(tmp_path, events)
    assert 'data-ready="yes"' in document
    assert "<title>owned" not in document
    assert "<b>bold" not in document
    assert "Show all 300,000 characters" in document


@browser
def test_a_browser_draws_a_trace_without_any_run(tmp_path):
    assert "The trace holds no run." in drawn(tmp_path, [])
