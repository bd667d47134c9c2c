"""Which grammar binds an answer: response_format and its relatives as fields of SamplingParams.

Knows nothing of tools, thinking or of how grammars are compiled.
"""

import re
from typing import Any

from zipage_lang.server.api_error import ApiError
from zipage_lang.server.openai.chat_request import ResponseFormat
from zipage_lang.server.openai.fields import SamplingFields

ANY_OBJECT = {"type": "object"}
PLAIN_NAMES = ("regex", "ebnf", "lark", "json_schema")

Grammar = dict[str, Any]  # at most one grammar field of SamplingParams


def grammar_of(fields: SamplingFields, response_format: ResponseFormat | None) -> Grammar:
    """The one grammar that a request asks for; {} for none. Raises ApiError 400 for two."""
    found = {**_plain(fields), **_guided(fields), **_structured(fields)}
    found |= _of_format(response_format)
    given = [name for name, value in found.items() if value]
    if len(given) > 1:
        raise ApiError(400, f"{' and '.join(given)} can't be combined; give one", param=given[1])
    return found[given[0]] if given else {}


def _plain(fields: SamplingFields) -> dict[str, Grammar]:
    values = {name: getattr(fields, name) for name in PLAIN_NAMES}
    return {name: {name: value} for name, value in values.items() if value is not None}


def _guided(fields: SamplingFields) -> dict[str, Grammar]:
    """vLLM's older names."""
    return {
        "guided_json": _one("json_schema", fields.guided_json),
        "guided_regex": _one("regex", fields.guided_regex),
        "guided_grammar": _one("ebnf", fields.guided_grammar),
        "guided_choice": _choice("guided_choice", fields.guided_choice),
    }


def _structured(fields: SamplingFields) -> dict[str, Grammar]:
    """vLLM's newer form: an object with one of these keys."""
    asked = fields.structured_outputs or {}
    name = "structured_outputs"
    return {
        f"{name}.json": _one("json_schema", asked.get("json")),
        f"{name}.json_object": {"json_schema": ANY_OBJECT} if asked.get("json_object") else {},
        f"{name}.regex": _one("regex", asked.get("regex")),
        f"{name}.grammar": _one("ebnf", asked.get("grammar")),
        f"{name}.choice": _choice(f"{name}.choice", asked.get("choice")),
        f"{name}.structural_tag": _one("structural_tag", asked.get("structural_tag")),
    }


def _of_format(form: ResponseFormat | None) -> dict[str, Grammar]:
    if form is None or form.type == "text":
        return {}
    if form.type == "json_object":
        grammar: Grammar = {"json_schema": ANY_OBJECT}
    elif form.type == "json_schema":
        grammar = {"json_schema": _schema(form)}
    elif form.type == "regex":
        grammar = _needed("regex", form.regex or form.pattern, "regex")
    elif form.type == "structural_tag":
        tag = form.model_dump(exclude_none=True, by_alias=True)
        grammar = {"structural_tag": _needed("format", tag.get("format"), "tag") and tag}
    else:
        grammar = _needed("grammar", form.grammar or form.ebnf, "ebnf")
    return {"response_format": grammar}


def _schema(form: ResponseFormat) -> Any:
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise ApiError(
            400,
            "response_format of type json_schema needs json_schema.schema",
            param="response_format.json_schema",
        )
    return form.json_schema.schema_


def _needed(name: str, value: Any, field: str) -> Grammar:
    if not value:
        raise ApiError(400, f"response_format needs {name}", param=f"response_format.{name}")
    return {field: value}


def _one(field: str, value: Any) -> Grammar:
    return {} if value is None else {field: value}


def _choice(name: str, choices: Any) -> Grammar:
    """One of some texts."""
    if choices is None:
        return {}
    if not isinstance(choices, list) or not all(isinstance(text, str) for text in choices):
        raise ApiError(400, f"{name} must be a list of texts", param=name)
    if not choices:
        raise ApiError(400, f"{name} is empty; give at least one text", param=name)
    return {"regex": "|".join(map(re.escape, choices))}
