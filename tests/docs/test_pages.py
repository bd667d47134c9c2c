"""Every block of the documentation is what it says: code that parses, commands that exist.

Knows nothing of the site that is made of the pages.
"""

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import tomllib
import xml.etree.ElementTree as ElementTree

import pytest
import yaml
from test_support.doc_blocks import PAGES, ROOT, SHELL, blocks, blocks_of, check_zipage, commands

MAKE_TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
OURS = re.compile(r"(?:\S*/)?zipage")
DRAWINGS = sorted((ROOT / "docs" / "img").glob("*.svg"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_a_page_is_closed(page):
    assert page.read_text().count("\n```") % 2 == 0
    for block in blocks(page):
        assert "```" not in block.code, f"{block} runs into another"


@pytest.mark.parametrize("block", blocks_of({"python"}), ids=str)
def test_python_of_a_page_parses_and_imports_what_exists(block):
    code = re.sub(r'^--8<-- "([^"]+)"$', _included, block.code, flags=re.MULTILINE)
    for node in ast.walk(ast.parse(code, str(block))):
        if isinstance(node, ast.ImportFrom) and node.module and _is_ours(node.module):
            module = importlib.import_module(node.module)
            missing = [name.name for name in node.names if not hasattr(module, name.name)]
            assert not missing, f"{block}: {node.module} has no {missing}"
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "zipage":
            assert hasattr(importlib.import_module("zipage_lang"), node.attr), (
                f"{block}: {node.attr}"
            )


def _included(snippet: re.Match[str]) -> str:
    return (ROOT / snippet[1]).read_text()


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == "zipage_lang"


@pytest.mark.parametrize("block", blocks_of(SHELL), ids=str)
def test_shell_of_a_page_is_shell_and_calls_what_exists(block):
    subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
    for words in commands(block.code):
        if words[0] == "sudo":
            words = words[1:]
        match words:
            case [program, *rest] if OURS.fullmatch(program):
                check_zipage(rest)
            case ["podman" | "docker", "run", *rest]:
                check_zipage(["serve", *rest[rest.index("zipage") + 1 :]])
            case ["make", *targets]:
                assert set(targets) <= MAKE_TARGETS, f"{block}: make {targets}"
            case [program, "-m", module, *_] if "python" in program and _is_ours(module):
                assert importlib.util.find_spec(module), f"{block}: no module {module}"
            case [program, script, *_] if "python" in program and script.endswith(".py"):
                assert (ROOT / script).is_file(), f"{block}: no {script}"


@pytest.mark.parametrize("block", blocks_of({"json", "toml", "yaml", "ini"}), ids=str)
def test_data_of_a_page_can_be_read(block):
    match block.language:
        case "json":
            json.loads(block.code)
        case "toml":
            tomllib.loads(block.code)
        case "yaml":
            yaml.safe_load(block.code)
        case "ini":  # settings of the service
            settings = dict(line.split("=", 1) for line in block.code.splitlines())
            check_zipage(["serve", settings["ZIPAGE_MODEL"], *settings["ZIPAGE_FLAGS"].split()])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_to_files_and_headings(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in headings(target.read_text()), f"{page.name} links to {link}"


def headings(text):
    """What headings are called in links."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles)
    return {re.sub(r"[-\s]+", "-", title) for title in words}


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda path: path.name)
def test_a_drawing_stands_alone_in_light_and_dark(drawing):
    text = drawing.read_text()
    tree = ElementTree.fromstring(text)
    assert tree.find("{*}title") is not None, "for whoever can't see it"
    assert tree.find("{*}desc") is not None
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r'href="(?!#)|url\((?!#)|@import|<script', text), "asks for something else"
    for rule in re.findall(r"^([^@{]+)\{", text[: text.index("</style>")], re.MULTILINE):
        assert f"#{tree.get('id')}" in rule, f"{rule} would colour the rest of the page"


def literals() -> str:
    """All texts in our code, those of an f-string with its holes as …."""
    found = []
    rooms = ("zipage_lang", "frontend", "runtime", "kernels", "server")
    for path in (path for room in rooms for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (getattr(part, "value", "…") for part in node.values)
                found.append("".join(part if isinstance(part, str) else "…" for part in parts))
            elif isinstance(node, ast.ClassDef):
                found.append(node.name)
    return "\n".join(found)


def test_every_message_that_troubleshooting_explains_is_one_of_ours():
    rows = re.findall(
        r"^\| `(.+?)` \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 20
    ours = literals()
    for row in rows:
        for piece in (piece.strip(" ();:,") for piece in row.split("…")):
            assert piece in ours, f"nobody says {piece!r} (of {row!r})"
