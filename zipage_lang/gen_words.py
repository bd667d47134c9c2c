"""The keywords of `gen` and `run` as sampling fields, SGLang's names for them among these.

Knows nothing of expressions, states or engines.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.think_params import ThinkParams

RENAMED = {"max_new_tokens": "max_tokens"}
LOGPROB_WORDS = frozenset(
    {"return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs"}
)
SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
SAMPLING_WORDS = SAMPLING_FIELDS | RENAMED.keys() | LOGPROB_WORDS


def sampling_fields(words: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that `words` set; a word that is None sets none.

    `max_new_tokens` is max_tokens. `return_logprob=True` asks for the drawn tokens' logprobs, with
    `top_logprobs_num` for as many others, and with `logprob_start_len` >= 0 for the prompt's from
    there on; `get_meta_info` always gives the tokens' text, so `return_text_in_logprobs` sets
    nothing. Raises ValueError for a field given under both of its names.
    """
    given = {name: value for name, value in words.items() if value is not None}
    fields = {name: value for name, value in given.items() if name not in LOGPROB_WORDS}
    for theirs, ours in RENAMED.items():
        if theirs in fields:
            if ours in fields:
                raise ValueError(f"{theirs} and {ours} are the same field; give one")
            fields[ours] = fields.pop(theirs)
    if isinstance(fields.get("think"), Mapping):
        fields["think"] = ThinkParams(**fields["think"])
    return _logprob_fields(given) | fields


def _logprob_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    num_others = given.get("top_logprobs_num", 0)
    if not given.get("return_logprob", num_others > 0):
        return {}
    fields = {"logprobs": num_others}
    start = given.get("logprob_start_len", -1)
    if start >= 0:
        fields |= {"prompt_logprobs": num_others, "prompt_logprobs_start": start}
    return fields
