"""`select` and `score`: choices that the model weighs instead of writing.

Knows nothing of states, tokens or engines.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast, get_args

from zipage_lang.ir import Score, Select, SelectMethod, checked_name

MAX_TEMPERATURE = 1e-5  # SGLang's bound for a select


def select(
    name: str,
    choices: Sequence[str],
    method: "SelectMethod | Callable[..., Any] | None" = None,
    *,
    temperature: float | None = None,
    choices_method: "SelectMethod | Callable[..., Any] | None" = None,
) -> Select:
    """Append the choice the model finds likeliest and store it under `name`.

    The scores and the distribution over all choices stand in `s.meta(name)`, a ScoreResult.

    Parameters:
        name: of the value.
        choices: the texts; each is scored as it stands, so begin it with a space where the text
            before it does not end in one.
        method: "token_length_normalized", "greedy_token_selection" or
            "unconditional_likelihood_normalized", or the function of that name.
        choices_method: SGLang's word for `method`.
        temperature: SGLang's; only 0 is possible.

    Errors: ValueError for no choices, an empty or repeated choice, an unknown method, or a
    temperature above 0.

    >>> f = zipage.function(lambda s: s.append("Sky: " + zipage.select("c", ["blue", "red"])))
    >>> f.run()["c"] in ("blue", "red")
    True
    """
    check_greedy(temperature)
    return Select(checked_name(name), _checked_choices(choices), _method(method or choices_method))


def score(
    name: str,
    choices: Sequence[str],
    method: "SelectMethod | Callable[..., Any] | None" = None,
) -> Score:
    """Score every choice as a continuation and store the ScoreResult under `name`; appends nothing.

    All choices are scored at once, in context and alone, so all three methods' winners are known.

    Parameters:
        name: of the ScoreResult.
        choices: as for `select`.
        method: whose scores, distribution and winner the result puts first.

    Errors: ValueError for no choices, an empty or repeated choice, or an unknown method.

    >>> f = zipage.function(lambda s: s.append("Sky: " + zipage.score("c", ["blue", "red"])))
    >>> sum(f.run()["c"].probabilities)
    1.0
    """
    return Score(checked_name(name), _checked_choices(choices), _method(method))


def _checked_choices(choices: Any) -> tuple[str, ...]:
    if isinstance(choices, str) or not choices or not all(isinstance(c, str) for c in choices):
        raise ValueError(f"choices={choices!r} must be a list of at least one string")
    if "" in choices or len(set(choices)) != len(choices):
        raise ValueError(f"choices={choices!r} must be different and not empty")
    return tuple(choices)


def _method(given: Any) -> SelectMethod:
    if given is None:
        return "token_length_normalized"
    name = given if isinstance(given, str) else getattr(given, "__name__", None)
    if name not in get_args(SelectMethod):
        raise ValueError(f"method={given!r} must be one of {', '.join(get_args(SelectMethod))}")
    return cast("SelectMethod", name)


def check_greedy(temperature: Any) -> None:
    """Raise ValueError for a temperature that would draw: scoring draws nothing."""
    if temperature is not None and temperature > MAX_TEMPERATURE:
        raise ValueError(f"temperature={temperature} of a select must be 0: it draws nothing")
