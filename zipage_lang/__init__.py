"""Zipage-Lang's public names: `import zipage_lang as zipage`.

Each name is loaded when it is first used, so importing a sub-package costs nothing here.
Knows nothing of what the names do.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zipage_lang.backend import set_default_backend
    from zipage_lang.errors import BatchError, LoopThreadError, NoBackendError, RunCancelledError
    from zipage_lang.frontend.llm import Engine
    from zipage_lang.ir import (
        assistant,
        assistant_begin,
        assistant_end,
        gen,
        select,
        system,
        system_begin,
        system_end,
        user,
        user_begin,
        user_end,
    )
    from zipage_lang.program import Program, function
    from zipage_lang.runtime.kv_params import KVParams
    from zipage_lang.runtime.kv_params import KVParams as KV
    from zipage_lang.runtime.sampling_params import SamplingParams
    from zipage_lang.state import AsyncState, ProgramState

__all__ = [
    "KV",
    "AsyncState",
    "BatchError",
    "Engine",
    "KVParams",
    "LoopThreadError",
    "NoBackendError",
    "Program",
    "ProgramState",
    "RunCancelledError",
    "SamplingParams",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "function",
    "gen",
    "select",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "user",
    "user_begin",
    "user_end",
]

_HOMES = {
    "KV": ("runtime.kv_params", "KVParams"),
    "KVParams": ("runtime.kv_params", "KVParams"),
    "SamplingParams": ("runtime.sampling_params", "SamplingParams"),
    "Engine": ("frontend.llm", "Engine"),
    "set_default_backend": ("backend", "set_default_backend"),
    "BatchError": ("errors", "BatchError"),
    "LoopThreadError": ("errors", "LoopThreadError"),
    "NoBackendError": ("errors", "NoBackendError"),
    "RunCancelledError": ("errors", "RunCancelledError"),
    "Program": ("program", "Program"),
    "function": ("program", "function"),
    "AsyncState": ("state", "AsyncState"),
    "ProgramState": ("state", "ProgramState"),
}


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module(f"{__name__}.testing")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, attribute = _HOMES.get(name, ("ir", name))
    value = getattr(importlib.import_module(f"{__name__}.{home}"), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "testing"])
