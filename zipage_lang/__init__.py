"""Zipage-Lang's public names: `import zipage_lang as zipage`.

Each name is loaded when it is first used, so importing a sub-package costs nothing here.
Knows nothing of what the names do.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zipage_lang.async_state import AsyncState
    from zipage_lang.authored import (
        assistant,
        assistant_begin,
        assistant_end,
        image,
        keep,
        system,
        system_begin,
        system_end,
        user,
        user_begin,
        user_end,
        video,
    )
    from zipage_lang.backend import flush_cache, get_server_info, set_default_backend
    from zipage_lang.best_branch import BestOfResult, best_of
    from zipage_lang.budgets import Budget
    from zipage_lang.choices import (
        ScoreResult,
        greedy_token_selection,
        token_length_normalized,
        unconditional_likelihood_normalized,
    )
    from zipage_lang.errors import (
        BatchError,
        LoopThreadError,
        NoBackendError,
        ParseError,
        ProgramTimeoutError,
        RunCancelledError,
        ServerError,
        UnsupportedError,
    )
    from zipage_lang.frontend.llm import Engine
    from zipage_lang.gens import gen, gen_int, gen_string, separate_reasoning
    from zipage_lang.kv_report import KVReport
    from zipage_lang.openai_backend import OpenAIBackend
    from zipage_lang.pins import Pin, pin
    from zipage_lang.program import Program, function
    from zipage_lang.program_state import ProgramState
    from zipage_lang.runtime.kv_params import KVParams
    from zipage_lang.runtime.kv_params import KVParams as KV
    from zipage_lang.runtime.sampling_params import SamplingParams
    from zipage_lang.runtime.think_params import ThinkParams
    from zipage_lang.search_tree import SearchNode
    from zipage_lang.searching import SearchResult, search
    from zipage_lang.selects import score, select
    from zipage_lang.server_backend import ServerBackend
    from zipage_lang.server_backend import ServerBackend as RuntimeEndpoint
    from zipage_lang.trace import Trace
    from zipage_lang.voting import VoteResult, vote

__all__ = [
    "KV",
    "AsyncState",
    "BatchError",
    "BestOfResult",
    "Budget",
    "Engine",
    "KVParams",
    "KVReport",
    "LoopThreadError",
    "NoBackendError",
    "OpenAIBackend",
    "ParseError",
    "Pin",
    "Program",
    "ProgramState",
    "ProgramTimeoutError",
    "RunCancelledError",
    "RuntimeEndpoint",
    "SamplingParams",
    "ScoreResult",
    "SearchNode",
    "SearchResult",
    "ServerBackend",
    "ServerError",
    "ThinkParams",
    "Trace",
    "UnsupportedError",
    "VoteResult",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "best_of",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "greedy_token_selection",
    "image",
    "keep",
    "pin",
    "score",
    "search",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
    "vote",
]

_HOMES = {
    "BestOfResult": ("best_branch", "BestOfResult"),
    "best_of": ("best_branch", "best_of"),
    "Budget": ("budgets", "Budget"),
    "Pin": ("pins", "Pin"),
    "pin": ("pins", "pin"),
    "ProgramTimeoutError": ("errors", "ProgramTimeoutError"),
    "SearchNode": ("search_tree", "SearchNode"),
    "SearchResult": ("searching", "SearchResult"),
    "search": ("searching", "search"),
    "VoteResult": ("voting", "VoteResult"),
    "vote": ("voting", "vote"),
    "ThinkParams": ("runtime.think_params", "ThinkParams"),
    "ServerError": ("errors", "ServerError"),
    "RuntimeEndpoint": ("server_backend", "ServerBackend"),
    "ServerBackend": ("server_backend", "ServerBackend"),
    "OpenAIBackend": ("openai_backend", "OpenAIBackend"),
    "KV": ("runtime.kv_params", "KVParams"),
    "KVParams": ("runtime.kv_params", "KVParams"),
    "SamplingParams": ("runtime.sampling_params", "SamplingParams"),
    "Engine": ("frontend.llm", "Engine"),
    "set_default_backend": ("backend", "set_default_backend"),
    "flush_cache": ("backend", "flush_cache"),
    "get_server_info": ("backend", "get_server_info"),
    "ParseError": ("errors", "ParseError"),
    "UnsupportedError": ("errors", "UnsupportedError"),
    "ScoreResult": ("choices", "ScoreResult"),
    "greedy_token_selection": ("choices", "greedy_token_selection"),
    "token_length_normalized": ("choices", "token_length_normalized"),
    "unconditional_likelihood_normalized": ("choices", "unconditional_likelihood_normalized"),
    "KVReport": ("kv_report", "KVReport"),
    "gen": ("gens", "gen"),
    "gen_int": ("gens", "gen_int"),
    "gen_string": ("gens", "gen_string"),
    "separate_reasoning": ("gens", "separate_reasoning"),
    "score": ("selects", "score"),
    "select": ("selects", "select"),
    "BatchError": ("errors", "BatchError"),
    "LoopThreadError": ("errors", "LoopThreadError"),
    "NoBackendError": ("errors", "NoBackendError"),
    "RunCancelledError": ("errors", "RunCancelledError"),
    "Program": ("program", "Program"),
    "function": ("program", "function"),
    "AsyncState": ("async_state", "AsyncState"),
    "ProgramState": ("program_state", "ProgramState"),
    "Trace": ("trace", "Trace"),
}


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module(f"{__name__}.testing")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, attribute = _HOMES.get(name, ("authored", name))
    value = getattr(importlib.import_module(f"{__name__}.{home}"), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "testing"])
