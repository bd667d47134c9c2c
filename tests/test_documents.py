"""README and ARCHITECTURE are true: every file they name exists, and every room's file is named."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAMED = re.compile(r"`([\w./-]+/[\w./-]*|[\w-]+\.(?:py|md|txt|toml)|Makefile|\.importlinter)`")


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md"])
def test_every_file_a_document_names_exists(document):
    names = set(NAMED.findall((ROOT / document).read_text()))
    assert len(names) > 8
    kept = {name for name in names if not name.startswith("build/")}  # made by `make`
    missing = sorted(name for name in kept if not (ROOT / name).exists())
    assert not missing, f"{document} names {missing}"


def test_the_picture_names_only_files_that_exist():
    picture = (ROOT / "ARCHITECTURE.md").read_text().split("```")[1]
    files = {path.name for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    assert set(re.findall(r"\w+\.py", picture)) <= files


def test_architecture_names_every_file_of_the_deciding_and_caching_rooms():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for room in ("radix_cache", "runtime"):
        for path in (ROOT / room).glob("*.py"):
            if path.name != "__init__.py":
                assert path.stem in text, f"{room}/{path.name} is not in ARCHITECTURE.md"


def test_architecture_names_every_file_of_the_server():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    paths = [path.relative_to(ROOT) for path in (ROOT / "server").rglob("*.py")]
    missing = [path for path in paths if path.name != "__init__.py" and str(path) not in text]
    assert not missing


def test_no_document_still_has_a_placeholder():
    for document in ("README.md", "ARCHITECTURE.md"):
        assert "@@" not in (ROOT / document).read_text()


def test_the_tables_of_quality_are_those_of_the_results():
    """`python benchmarks/quality_tables.py --write` mends it."""
    path = ROOT / "benchmarks" / "quality_tables.py"
    spec = importlib.util.spec_from_file_location("quality_tables", path)
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = (ROOT / "QUALITY.md").read_text()
    assert tables.with_tables(text) == text
    for policy in ("zipage2", "zipage2:lot_share=0.3", "streaming"):
        assert text.count(f"\n| `{policy}` | ") >= 5, "a row per budget, and one without protection"


def test_the_readme_program_runs_as_printed(monkeypatch, capsys):
    """The first Python block of the README, copied and pasted."""
    block = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert printed.startswith("[")
    assert len(eval(printed)) == 4
