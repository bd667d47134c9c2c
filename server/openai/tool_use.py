"""Which tools a request offers and demands, and the grammar that holds the model to it.

Knows nothing of messages, templates or of how calls are read back.
"""

import dataclasses
from typing import Any

from zipage_lang.server.api_error import ApiError
from zipage_lang.server.openai.chat_request import AllowedTools, ChatRequest, NamedTool, Tool
from zipage_lang.server.openai.grammar_fields import Grammar
from zipage_lang.server.openai.tool_formats import ANY_ARGUMENTS, ToolSyntax

TAG_TYPE = "structural_tag"


@dataclasses.dataclass(frozen=True)
class ToolUse:
    """The tools of one request.

    offered: what the model is told of; callable_: those it may call now.
    must_call: at least one call, and nothing else, is the answer.
    """

    offered: tuple[Tool, ...] = ()
    callable_: tuple[Tool, ...] = ()
    must_call: bool = False
    is_parallel: bool = True

    @property
    def names(self) -> list[str]:
        return [tool.function.name for tool in self.callable_]

    @property
    def max_calls(self) -> int | None:
        return None if self.is_parallel else 1

    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates read them."""
        return [tool.model_dump(exclude_none=True) for tool in self.offered]

    def grammar(self, syntax: ToolSyntax, answer: Grammar) -> Grammar:
        """The grammar of calls, or of `answer` where no call need be made."""
        if self.must_call:
            return _tagged(self._calls(syntax))
        if not self.callable_:
            return answer
        if answer:
            return _tagged({"type": "or", "elements": [_element(answer), self._calls(syntax)]})
        if syntax.trigger and any(tool.function.strict for tool in self.callable_):
            return _tagged(self._free_text(syntax))
        return {}

    def _calls(self, syntax: ToolSyntax) -> dict[str, Any]:
        return {
            "type": "tags_with_separator",
            "tags": self._tags(syntax),
            "separator": syntax.separator,
            "at_least_one": True,
            "stop_after_first": not self.is_parallel,
        }

    def _free_text(self, syntax: ToolSyntax) -> dict[str, Any]:
        """Any text, but calls in it keep to their schemas."""
        return {
            "type": "triggered_tags",
            "triggers": [syntax.trigger],
            "tags": self._tags(syntax),
            "stop_after_first": not self.is_parallel,
        }

    def _tags(self, syntax: ToolSyntax) -> list[dict[str, Any]]:
        must_fit = self.must_call
        return [
            syntax.tag(tool.function.name, _schema(tool, must_fit=must_fit))
            for tool in self.callable_
        ]


def tool_use(body: ChatRequest) -> ToolUse:
    """What the request offers and demands. Raises ApiError 400."""
    tools, choice = tuple(body.tools or ()), body.tool_choice
    _check_names(tools)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return ToolUse()
    is_parallel = body.parallel_tool_calls is not False
    if choice == "none":
        return ToolUse()
    if isinstance(choice, NamedTool):
        named = (_find(tools, choice.function.name),)
        return ToolUse(tools, named, must_call=True, is_parallel=False)
    if isinstance(choice, AllowedTools):
        allowed = choice.allowed_tools
        found = tuple(_find(tools, named.function.name) for named in allowed.tools)
        if not found:
            raise ApiError(400, "tool_choice allows no tool", param="tool_choice")
        return ToolUse(tools, found, allowed.mode == "required", is_parallel)
    return ToolUse(tools, tools, choice == "required", is_parallel)


def _check_names(tools: tuple[Tool, ...]) -> None:
    names = [tool.function.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise ApiError(400, f"tools has {name!r} twice; names must differ", param="tools")


def _find(tools: tuple[Tool, ...], name: str) -> Tool:
    for tool in tools:
        if tool.function.name == name:
            return tool
    known = ", ".join(tool.function.name for tool in tools)
    raise ApiError(
        400, f"tool_choice names {name!r}, but the tools are {known}", param="tool_choice"
    )


def _schema(tool: Tool, *, must_fit: bool) -> Any:
    """Of a tool's arguments; where only strict tools are held to theirs, any object's."""
    if not (must_fit or tool.function.strict):
        return ANY_ARGUMENTS
    return tool.function.parameters or ANY_ARGUMENTS


def _element(answer: Grammar) -> dict[str, Any]:
    """A grammar as a part of a structural tag. Raises ApiError 400 for one that can't be."""
    (kind, value), *_ = answer.items()
    if kind == "json_schema" and isinstance(value, (dict, bool)):
        return {"type": "json_schema", "json_schema": value}
    if kind == "regex":
        return {"type": "regex", "pattern": value}
    if kind == "ebnf":
        return {"type": "grammar", "grammar": value}
    if kind == TAG_TYPE and isinstance(value, dict) and "format" in value:
        return dict(value["format"])
    raise ApiError(
        400, f"{kind} can't be combined with tools; set tool_choice to none", param="tools"
    )


def _tagged(form: dict[str, Any]) -> Grammar:
    return {TAG_TYPE: {"type": TAG_TYPE, "format": form}}
