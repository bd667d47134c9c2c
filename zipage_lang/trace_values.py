"""What a trace says of the clock, of arguments, of settings and of versions.

Knows nothing of events, files or states.
"""

import dataclasses
import functools
import importlib.metadata
import platform
import reprlib
import time
from typing import Any

from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams

_CLOCK_OFFSET_S = time.time() - time.perf_counter()


def now() -> float:
    """Seconds since 1970 by a clock that never goes back within this process."""
    return round(_CLOCK_OFFSET_S + time.perf_counter(), 6)


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 200
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = 10


def shortened(value: Any) -> str:
    """The repr of an argument, a few hundred characters at most."""
    try:
        text = _short.repr(value)
    except Exception as error:  # any: it is the argument's own code
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= 500 else f"{text[:240]}...{text[-240:]}"


_DEFAULT_SAMPLING = SamplingParams()


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """The fields that say something else than the defaults; the seed has its own place."""
    names = [field.name for field in dataclasses.fields(sampling) if field.name != "seed"]
    values = {name: getattr(sampling, name) for name in names}
    return {n: v for n, v in values.items() if v != getattr(_DEFAULT_SAMPLING, n)}


def kv_fields(kv: KVParams) -> dict[str, Any]:
    """The fields that were asked for."""
    values = {field.name: getattr(kv, field.name) for field in dataclasses.fields(kv)}
    return {name: value for name, value in values.items() if value is not None}


@functools.cache
def versions() -> dict[str, str]:
    """Of the package and of Python."""
    return {
        "zipage-lang": importlib.metadata.version("zipage-lang"),
        "python": platform.python_version(),
    }
