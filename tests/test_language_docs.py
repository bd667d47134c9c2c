"""docs/language.md is true: all its code runs in order, in one session, and prints what it says.

Blocks behind the mark `<!-- on the model -->` run on the embedded model, all others on a script.
"""

import importlib
import re
from pathlib import Path

import pytest

import zipage_lang as zipage
from zipage_lang.testing import StatefulBackend, WordTokenizer
from zipage_lang.trace_reader import problems, read_trace

PAGE = Path(__file__).resolve().parent.parent / "docs" / "language.md"
README = PAGE.parents[1] / "README.md"
MODEL_MARK = "<!-- on the model -->"
BLOCK = re.compile(
    rf"(?P<mark>{MODEL_MARK}\n)?^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<out>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
SCRIPT = {
    "of France is": " Paris",
    "of Italy is": " Rome",
    "apples\n2.": " pears\n3.",
    "pears\n3.": " plums\n4.",
    "for a cat:": [" Momo", " Tiger", " Felix"],
    re.compile(r"of Italy\?(?!.*sure).*assistant\n$", re.DOTALL): "Rome",
    "I am ": "quite sure",
    "For it:": " It is healthy.\n",
    "Against it:": " It rains.\n",
    "So:": " Take a coat.\n",
    "number:": " 7",
    "Dear Ada,\n": "thank you for the engine.\nYours",
    "blue. As JSON: ": '{"name": "Ada", "age": 36}',
    "Bob as JSON: ": '{"name": "Bob", "age": 7}',
    "\nAge: ": "36.",
    "\nColor: ": "blue",
    re.compile(r"2 \+ 2"): "<think>two and two</think>\n\n4",
    re.compile(r"7 \+ 5"): ["12.", "13", "12", " 12", "11"],
    "for tea:": [" The best leaves.\n", " Drink up.\n", " Tea for you and me.\n"],
    "upon a time": " there was a fox in a box.",
    "Title:": " The Fox\n",
    "Author:": " Anna\n",
    "\nBetter plan:": " walk with a map.\n",
    "Plan:": " walk.\n",
    "Notes:": " 30 and 21\n",
    "A:": " 51\n",
    re.compile("Mood:"): "",  # scored, not drawn
}


def prefer_good(context, token):
    return -2.0 if token == " bad" else 0.0


def blocks():
    text = PAGE.read_text()
    found = [(text.count("\n", 0, block.start("code")), block) for block in BLOCK.finditer(text)]
    assert len(found) == text.count("```python"), "a block is not closed"
    return found


@pytest.fixture
def a_place_for_files(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    zipage.set_default_backend(None)


def test_all_code_of_the_page_runs_in_order_and_prints_what_it_says(a_place_for_files, capsys):
    script = StatefulBackend(SCRIPT, tokenizer=WordTokenizer(), token_logprob=prefer_good)
    session = {"__name__": "tutorial"}
    try:
        for line, block in blocks():
            zipage.set_default_backend(session.get("engine") if block["mark"] else script)
            source = "\n" * line + block["code"]  # so that a traceback names the page's line
            exec(compile(source, str(PAGE), "exec"), session)
            printed = capsys.readouterr().out
            if block["out"] is not None:
                assert printed == block["out"], f"docs/language.md, block of line {line + 1}"
    finally:
        if "engine" in session:
            session["engine"].close()
    assert (a_place_for_files / "run.jsonl").stat().st_size > 0


def test_the_programs_section_of_the_readme_runs_as_printed(a_place_for_files, capsys):
    section = README.read_text().partition("## Programs\n")[2]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    session = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), session)
    assert "KVReport(num_calls=1" in capsys.readouterr().out
    state = session["state"]
    assert state.ret_value is None or state.ret_value.isdigit()
    assert len(state["more"]) == 2
    assert state.kv("chain").kept_len <= state.kv("chain").protected_len + 48 + 16 + 16
    assert problems(read_trace("solve.jsonl")) == []


def test_the_readme_has_a_line_for_each_example():
    named = set(re.findall(r"`python examples/(\w+\.py)`", README.read_text()))
    assert named == {path.name for path in (README.parent / "examples").glob("*.py")}


@pytest.mark.parametrize("page", ["language.md", "trace.md"])
def test_links_of_the_pages_lead_to_files(page):
    path = PAGE.with_name(page)
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / link).exists(), f"docs/{page} links to {link}"


def test_every_public_verb_stands_on_the_page():
    """Types and twins of names that are explained may be left to their docstrings."""
    text = PAGE.read_text()
    verbs = {"assistant", "best_of", "function", "gen", "keep", "pin", "score", "search", "select"}
    verbs |= {"separate_reasoning", "set_default_backend", "system", "user", "vote"}
    assert verbs <= set(zipage.__all__)
    missing = {verb for verb in verbs if not re.search(rf"\b{verb}\b", text)}
    assert not missing
    for name in set(re.findall(r"zipage\.(\w+)", text)):
        assert name == "testing" or name in zipage.__all__, f"the page names zipage.{name}"
        if name != "testing":
            assert getattr(importlib.import_module("zipage_lang"), name)
