"""What the routes must know of a model: its sampling defaults, its thinking, its tool format.

Read from the files beside the model and from its chat template, once per engine.
Knows nothing of requests or of HTTP.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zipage_lang.frontend.async_llm import AsyncLLM
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.server.config import ToolFormat
from zipage_lang.server.openai.tool_formats import HERMES, LLAMA, ToolSyntax
from zipage_lang.server.service import Service

THINK_TAGS = (("<think>", "</think>"), ("◁think▷", "◁/think▷"), ("[THINK]", "[/THINK]"))
DEFAULT_TAGS = THINK_TAGS[0]
DEFAULT_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
LLAMA_MARKS = ("<|python_tag|>", '{"name": function name, "parameters":')

log = logging.getLogger("zipage.server")


@dataclasses.dataclass(frozen=True)
class ModelTraits:
    """One model's.

    think_tags: what opens and closes its thinking; None where it has no such words of its own.
    template_takes_tools: whether the chat template writes tools and calls itself.
    sampling: SamplingParams fields that the model's authors recommend.
    """

    think_tags: tuple[str, str] | None = None
    template_takes_tools: bool = False
    tool_syntax: ToolSyntax = HERMES
    hides_tool_tags: bool = False  # they are special tokens, which texts leave out
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class TraitsBook:
    """The traits of the model that a service serves, read again when its engine is a new one."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._llm: AsyncLLM | None = None
        self._traits = ModelTraits()

    def current(self) -> ModelTraits:
        """Raises ApiError 503 unless the service is ready."""
        llm = self._service.llm
        if llm is not self._llm:
            self._traits = read_traits(llm, self._service.config.tool_format)
            self._llm = llm
        return self._traits


def read_traits(llm: AsyncLLM, tool_format: ToolFormat) -> ModelTraits:
    """The traits of an engine's model."""
    template = llm.tokenizer.chat_template or ""
    syntax = _tool_syntax(template, tool_format)
    return ModelTraits(
        think_tags=_think_tags(llm, template),
        template_takes_tools="tools" in template,
        tool_syntax=syntax,
        hides_tool_tags=llm.tokenizer.token_id(syntax.trigger) in llm.tokenizer.special_token_ids,
        sampling=_recommended(Path(llm.ready.model_path)),
    )


def _think_tags(llm: AsyncLLM, template: str) -> tuple[str, str] | None:
    for tags in THINK_TAGS:
        if tags[1] in template or llm.tokenizer.token_id(tags[1]) is not None:
            return tags
    return None


def _tool_syntax(template: str, tool_format: ToolFormat) -> ToolSyntax:
    if tool_format != "auto":
        return LLAMA if tool_format == "llama" else HERMES
    is_llama = "<tool_call>" not in template and any(mark in template for mark in LLAMA_MARKS)
    return LLAMA if is_llama else HERMES


def _recommended(model_path: Path) -> dict[str, Any]:
    """What generation_config.json says; a GGUF file has none."""
    path = model_path / "generation_config.json"
    if not model_path.is_dir() or not path.is_file():
        return {}
    try:
        said = dict(json.loads(path.read_text(encoding="utf-8")))
        chosen = {name: said[name] for name in DEFAULT_FIELDS if said.get(name) is not None}
        SamplingParams(**chosen)  # else each request would be refused for them
    except (OSError, TypeError, ValueError, RecursionError) as error:
        log.warning("%s is of no use, so sampling defaults are 1.0: %s", path, error)
        return {}
    return chosen
