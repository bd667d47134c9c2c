"""`gen` and its kin: what a program asks the model to write.

Knows nothing of states, tokens or engines.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zipage_lang.gen_words import sampling_fields
from zipage_lang.ir import Concat, Gen, Select, SelectMethod, checked_name, parts_of
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.selects import check_greedy, select
from zipage_lang.thoughts import ThoughtMarks, marks_of
from zipage_lang.types import ValueType, quoted_type, value_type

GRAMMARS = ("regex", "json_schema", "ebnf", "lark", "structural_tag")


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    type: Any = None,
    dtype: Any = None,
    choices: Sequence[str] | None = None,
    choices_method: "SelectMethod | Callable[..., Any] | None" = None,
    stop_regex: str | None = None,
    kv: KVParams | None = None,
    **sampling: Any,
) -> "Gen | Select":
    """Generate text and store it under `name`; with n > 1 a list of n texts, of which the first
    goes on.

    Parameters:
        name: of the value; None only adds to the text.
        max_tokens: output tokens at most.
        type: what the value is: int, float, bool, str, Literal, an Enum, a dataclass, a pydantic
            model, or lists and dicts of them. The output is constrained to it and the value parsed;
            the text keeps the text, and `s.meta(name).text` all of it.
        dtype: SGLang's word for `type`; its `str` is a string in double quotes.
        choices: score these instead of generating, as `select` does, by `choices_method`.
        stop_regex: ends the text before its first match (Python's syntax; only with n=1). It is
            looked for as the text comes, so a stream may show the beginning of what is cut off.
        kv: bounds this call's KV cache.
        sampling: every field of SamplingParams (stop, temperature, n, regex, ...); a field left out
            or None takes the run's default. With `think` (a ThinkParams, or a dict of its fields)
            the value is the answer behind the thought; the text keeps both.

    Errors: ValueError for an unknown field (the nearest name is given), a value out of range, or a
    type that can't be described. ParseError where a value is read whose text is not of the type.

    >>> f = zipage.function(lambda s: s.append("2+2=" + zipage.gen("sum", type=int)))
    >>> f.run(backend=zipage.testing.ScriptedBackend("4"))["sum"]
    4
    """
    if choices is not None:
        _check_only_choices(name, max_tokens, type or dtype, kv, sampling)
        assert name is not None, "checked above"
        return select(name, list(choices), choices_method=choices_method)
    if choices_method is not None:
        raise ValueError(f"choices_method={choices_method!r} needs choices=[...]")
    wanted = _wanted_type(type, dtype)
    overrides = sampling_fields({"max_tokens": max_tokens, **sampling})
    if wanted is not None:
        _check_one_constraint(wanted, overrides)
    _check_alone(overrides)
    if name is not None:
        checked_name(name)
    pattern = _pattern("stop_regex", stop_regex)
    _pattern("regex", overrides.get("regex"))
    return Gen(name, tuple(overrides.items()), kv, wanted, stop_pattern=pattern)


def gen_int(name: str | None = None, max_tokens: int | None = None, **fields: Any) -> Gen | Select:
    """`gen` of a whole number; the value is an int.

    Parameters and errors as for `gen`, whose `type` is int here.

    >>> f = zipage.function(lambda s: s.append("Age: " + zipage.gen_int("age")))
    >>> f.run(backend=zipage.testing.ScriptedBackend("36"))["age"]
    36
    """
    return gen(name, max_tokens, type=int, **fields)


def gen_string(
    name: str | None = None, max_tokens: int | None = None, **fields: Any
) -> Gen | Select:
    """`gen` of a string in double quotes; the value goes without them, the text keeps them.

    Parameters and errors as for `gen`, whose `dtype` is str here.

    >>> f = zipage.function(lambda s: s.append("Name: " + zipage.gen_string("name")))
    >>> f.run(backend=zipage.testing.ScriptedBackend('"Ada"'))["name"]
    'Ada'
    """
    return gen(name, max_tokens, dtype=str, **fields)


def _wanted_type(wanted: Any, dtype: Any) -> ValueType | None:
    if wanted is not None and dtype is not None:
        raise ValueError(f"type={wanted!r} and dtype={dtype!r} are the same word; give one")
    if dtype is str:
        return quoted_type()
    chosen = dtype if wanted is None else wanted
    return None if chosen is None else value_type(chosen)


def _pattern(word: str, given: Any) -> "re.Pattern[str] | None":
    """Raises ValueError for what is no regular expression."""
    try:
        return None if given is None else re.compile(given)
    except (re.error, TypeError) as error:
        raise ValueError(f"{word}={given!r} is no regular expression: {error}") from error


def _check_one_constraint(wanted: ValueType, overrides: Mapping[str, Any]) -> None:
    for name in GRAMMARS:
        if name in overrides:
            raise ValueError(f"type={wanted!r} brings its own grammar; leave {name}= out")


def _check_only_choices(
    name: Any, max_tokens: Any, wanted: Any, kv: Any, sampling: Mapping[str, Any]
) -> None:
    checked_name(name)
    given = {"max_tokens": max_tokens, "type": wanted, "kv": kv, **sampling}
    set_words = [word for word, value in given.items() if value is not None]
    if set_words and set_words != ["temperature"]:
        raise ValueError(f"gen(choices=...) scores and generates nothing; leave {set_words} out")
    check_greedy(sampling.get("temperature"))


def _check_alone(overrides: dict[str, Any]) -> None:
    """Validate before the run's defaults are known: they may allow more min_tokens than ours."""
    checked = dict(overrides)
    if isinstance(checked.get("min_tokens"), int) and "max_tokens" not in checked:
        checked["max_tokens"] = max(1, checked["min_tokens"])
    if "max_tokens" in checked and "min_tokens" not in checked:
        checked["min_tokens"] = 0
    SamplingParams(**checked)


def separate_reasoning(
    expr: Any, model_type: str | None = None, *, begin: str = "<think>", end: str = "</think>"
) -> "Concat":
    """Take the thought out of what the gens of `expr` generate.

    `name` holds the answer, `name_reasoning_content` the thinking; the thinking leaves the text,
    and with it the context of later calls. All other text of `expr` stays. Works in streams too,
    whose pieces show the thought as it comes.

    Parameters:
        expr: a string or expression.
        model_type: a family of models whose marks are known, instead of `begin` and `end`.
        begin, end: what opens and closes the thought; the opening may stand in the prompt.

    Errors: ValueError for an unknown model_type.

    >>> f = zipage.function(lambda s: s.append(zipage.separate_reasoning(zipage.gen("a"))))
    >>> state = f.run(backend=zipage.testing.ScriptedBackend("<think>hm</think>yes"))
    >>> state["a"], state["a_reasoning_content"], state.text()
    ('yes', 'hm', 'yes')
    """
    marks = marks_of(model_type) if model_type is not None else ThoughtMarks(begin, end)
    return Concat(
        tuple(
            dataclasses.replace(part, thoughts=marks) if isinstance(part, Gen) else part
            for part in parts_of(expr)
        )
    )
