"""Request fields as SamplingParams and KVParams; what is wrong becomes a 400 that names the field.

Knows nothing of prompts, answers or of how a request runs.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.server.api_error import ApiError
from zipage_lang.server.openai.fields import SamplingFields

_NAMES_FIRST = re.compile(r"(\w+)(?:[=\[ ]|$)")
# Fields that go on under the same name; null is the engine's default.
SAME_NAME = (
    "n",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
    "temperature",
    "top_p",
)


def sampling_params(
    fields: SamplingFields, recommended: Mapping[str, Any], **more: Any
) -> SamplingParams:
    """The request's sampling. `more`: what the route adds, such as max_tokens and grammars.

    Raises ApiError 400 for values that don't go together.
    """
    chosen = dict(recommended)
    for name in SAME_NAME:
        value = getattr(fields, name)
        if value is not None:
            chosen[name] = value
    if fields.stop:
        chosen["stop"] = fields.stop
    if fields.logit_bias:
        chosen["logit_bias"] = _token_biases(fields.logit_bias)
    with bad_field():
        return SamplingParams(**chosen, **more)


def kv_params(fields: SamplingFields) -> KVParams | None:
    """What the request asks of its KV cache. Raises ApiError 400."""
    if fields.kv is None:
        return None
    with bad_field("kv"):
        return KVParams(**fields.kv.model_dump(exclude_none=True))


@contextlib.contextmanager
def bad_field(param: str | None = None) -> Iterator[None]:
    """A ValueError inside is the caller's: ApiError 400. Without `param` the text's first word."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        named = _NAMES_FIRST.match(text)
        first = named[1] if named and named[1] in SamplingFields.model_fields else None
        raise ApiError(400, text, param=param or first) from error


def _token_biases(biases: Mapping[str, float]) -> dict[int, float]:
    with bad_field("logit_bias"):
        return {_token_id(key): bias for key, bias in biases.items()}


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 9:
        raise ValueError(f"logit_bias has the key {key!r:.40}; keys must be token ids, say '42'")
    return int(key)
