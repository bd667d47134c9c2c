"""Pages whose Python is copied and pasted from top to bottom do what they say.

The language's page and the README's have tests of their own; the serving page needs a server.
Knows nothing of what the pages teach.
"""

import pytest
from test_support.doc_blocks import ROOT, blocks

import zipage_lang as zipage


@pytest.mark.parametrize("name", ["quickstart.md", "budget.md"])
def test_all_python_of_a_page_runs_in_order_and_prints_what_it_says(
    name, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    session = {"__name__": "page"}
    try:
        for block in blocks(ROOT / "docs" / name):
            if block.language == "python":
                exec(compile(block.source, str(block.page), "exec"), session)
                printed = capsys.readouterr().out
                assert block.printed in (None, printed), f"{block} printed {printed!r}"
    finally:
        close_engines(session)
    if name == "quickstart.md":
        assert "the vote: 12" in printed
        assert (tmp_path / "add.jsonl").stat().st_size > 0


def close_engines(session):
    for value in session.values():
        if isinstance(value, zipage.Engine):
            value.close()


def test_the_home_page_shows_the_program_of_the_readme():
    """That one is run by tests/test_documents.py."""
    (home,) = (block for block in blocks(ROOT / "docs" / "index.md") if block.language == "python")
    readme = next(b for b in blocks(ROOT / "README.md") if b.language == "python")
    assert home.code == readme.code
