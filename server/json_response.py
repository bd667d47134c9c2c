"""JSON answers written by msgspec: structs as they are, text that is no Unicode made into some.

Knows nothing of what is answered.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

_encoder = msgspec.json.Encoder(enc_hook=str)


def encode_json(value: Any) -> bytes:
    """`value` as JSON. NaN and infinities become null; lone surrogates become "?"."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return _encoder.encode(_clean(msgspec.to_builtins(value, str_keys=True)))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value


class JsonResponse(Response):
    """An answer whose content is encoded by `encode_json`."""

    media_type = "application/json"

    def __init__(
        self, content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(encode_json(content), status_code, headers)
