"""A conversation and the `/words` that steer it; says what to print, prints nothing.

Knows nothing of terminals, engines or servers.
"""

import difflib
import json
from collections.abc import Callable
from pathlib import Path

HELP = """\
/system TEXT   set the system message and start over (without TEXT: show it)
/reset         forget the conversation, keep the system message
/save FILE     write the conversation: JSON where FILE ends in .json, else Markdown
/help          this list
/quit          leave; so does Ctrl-D
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one."""


class Conversation:
    """What was said so far."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.is_over = False
        self._words: dict[str, Callable[[str], str]] = {
            "help": lambda _: HELP,
            "reset": self._reset,
            "system": self._set_system,
            "save": self._save,
            "quit": self._quit,
        }

    @property
    def messages(self) -> list[dict[str, str]]:
        """As a chat template takes them."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return first + self.turns

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def take_back(self) -> None:
        """The last question was not answered."""
        self.turns.pop()

    def answered(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})

    def command(self, line: str) -> str:
        """Do what a line that starts with / says; what to tell. Raises ValueError for a mistake."""
        word, _, rest = line[1:].partition(" ")
        act = self._words.get({"exit": "quit", "?": "help"}.get(word, word))
        if act is None:
            near = difflib.get_close_matches(word, self._words, n=1)
            hint = f"did you mean /{near[0]}?" if near else "see /help"
            raise ValueError(f"no such command /{word}; {hint}")
        return act(rest.strip())

    def _reset(self, _: str) -> str:
        self.turns.clear()
        return "the conversation starts over"

    def _set_system(self, text: str) -> str:
        if not text:
            return self.system or "there is no system message; set one with /system TEXT"
        self.system = text
        return self._reset("")

    def _save(self, name: str) -> str:
        if not name:
            raise ValueError("say where to: /save FILE")
        path = Path(name).expanduser()
        text = _as_json(self) if path.suffix == ".json" else _as_markdown(self)
        path.write_text(text, encoding="utf-8")
        return f"saved {len(self.turns)} messages in {path}"

    def _quit(self, _: str) -> str:
        self.is_over = True
        return ""


def _as_json(conversation: Conversation) -> str:
    return json.dumps({"messages": conversation.messages}, ensure_ascii=False, indent=2) + "\n"


def _as_markdown(conversation: Conversation) -> str:
    parts = [f"## {turn['role']}\n\n{turn['content']}\n" for turn in conversation.messages]
    return "\n".join(parts)
