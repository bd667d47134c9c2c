"""The code blocks of a Markdown page, and whether a shell line is one that the machine would take.

Knows nothing of what the blocks do.
"""

import dataclasses
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md")
SHELL = {"sh", "bash"}

BLOCK = re.compile(
    r"^```(?P<language>\w*)\n(?P<code>.*?)^```$(?:\n\n```text\n(?P<printed>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, what it holds, and the output shown right behind it."""

    page: Path
    line: int  # of the page, where the code begins
    language: str
    code: str
    printed: str | None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def source(self) -> str:
        """With empty lines before it, so that a traceback names the page's line."""
        return "\n" * (self.line - 1) + self.code


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start("code")) + 1
        found.append(Block(page, line, block["language"], block["code"], block["printed"]))
    return found


def blocks_of(languages: set[str]) -> list[Block]:
    """Of all pages. Lines that call `zipage` outside a named language are shell too."""
    found = [block for page in PAGES for block in blocks(page)]
    if languages == SHELL:
        return [block for block in found if block.language in SHELL or _calls_us(block)]
    return [block for block in found if block.language in languages]


def _calls_us(block: Block) -> bool:
    return block.language == "" and block.code.startswith("zipage ")


def commands(code: str) -> list[list[str]]:
    """The words of each simple command, without redirections and what follows one."""
    code = re.sub(r"\\\n\s*", " ", code)
    code = re.sub(r"(^|\s)#.*$", "", code, flags=re.MULTILINE)
    lexer = shlex.shlex(code, posix=True, punctuation_chars="|&;<>\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    found: list[list[str]] = [[]]
    is_redirection = False
    for word in lexer:
        if set(word) <= set("|&;<>\n"):
            is_redirection = set(word) <= set("<>")
            found += [] if is_redirection else [[]]
        elif not is_redirection:
            found[-1].append(word)
    return [words for words in found if words]


def check_zipage(arguments: list[str]) -> None:
    """Raises typer's error for a command line of `zipage` that it would not take."""
    from zipage_lang.cli import load

    name, *rest = arguments
    if name == "--help":
        return
    command = load(name)
    subcommands = getattr(command, "commands", {})
    if subcommands:
        command, rest = subcommands[rest[0]], rest[1:]
    if "--help" not in rest:
        command.make_context(f"zipage {name}", rest)
