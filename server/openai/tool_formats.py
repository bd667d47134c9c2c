"""How a model writes tool calls: Hermes' tags (Qwen too) or Llama's plain objects.

Each syntax writes calls for templates that can't, binds calls by a grammar, and reads them back.
Knows nothing of requests, engines or of which tool is asked for.
"""

import dataclasses
import json
from collections.abc import Collection, Sequence
from typing import Any

from zipage_lang.server.openai.tool_calls import CLOSE, OPEN, HermesParser, LlamaParser, ToolParser

ANY_ARGUMENTS = {"type": "object"}
INSTRUCTIONS = """\
You may call functions to help the user. These functions exist, as JSON schemas, one a line:
<tools>
{tools}
</tools>
To call a function, answer with one JSON object per call, written like this:
{example}"""
EXAMPLE_NAME = "<name of the function>"


@dataclasses.dataclass(frozen=True)
class ToolSyntax:
    """One way of writing calls.

    opening, closing: around a call's object; arguments_key: what its arguments are called.
    separator: between two calls.
    """

    name: str
    opening: str
    closing: str
    arguments_key: str
    separator: str

    @property
    def trigger(self) -> str:
        """What tells a call from text; "" where nothing does."""
        return self.opening.strip()

    def written(self, name: str, arguments: str) -> str:
        """A call as the model would write it; arguments: JSON."""
        return f"{self._head(name)}{arguments}}}{self.closing}"

    def instructions(self, tools: Sequence[dict[str, Any]]) -> str:
        """What tells a model of its tools where the chat template does not."""
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        return INSTRUCTIONS.format(tools=lines, example=self.written(EXAMPLE_NAME, "{...}"))

    def tag(self, name: str, schema: Any) -> dict[str, Any]:
        """A call of one tool, for a structural tag."""
        content = {"type": "json_schema", "json_schema": schema}
        return {
            "type": "tag",
            "begin": self._head(name),
            "content": content,
            "end": "}" + self.closing,
        }

    def new_parser(self, names: Collection[str], max_calls: int | None) -> ToolParser:
        """A parser for one answer; names: of the tools it may call."""
        return HermesParser(max_calls) if self.trigger else LlamaParser(names, max_calls)

    def _head(self, name: str) -> str:
        quoted = json.dumps(name, ensure_ascii=False)
        return f'{self.opening}{{"name": {quoted}, "{self.arguments_key}": '


HERMES = ToolSyntax(
    name="hermes",
    opening=f"{OPEN}\n",
    closing=f"\n{CLOSE}",
    arguments_key="arguments",
    separator="\n",
)
LLAMA = ToolSyntax(name="llama", opening="", closing="", arguments_key="parameters", separator="; ")
