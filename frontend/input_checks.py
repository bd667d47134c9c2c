"""Refuses bad input before the engine hears of it: each error names the value and the fix.

Knows nothing of tokenizers, sockets or how requests run.
"""

from collections.abc import Iterable
from typing import Any

from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import AddRequest, Ready
from zipage_lang.runtime.sampling_params import SamplingParams


def check_prompt(token_ids: Any, ready: Ready) -> list[int]:
    """The prompt as a list of token ids that the model can take. Raises ValueError otherwise."""
    if not isinstance(token_ids, (list, tuple)):
        raise ValueError(
            f"a prompt must be a string or a list of token ids, not {type(token_ids).__name__}"
        )
    if not token_ids:
        raise ValueError("the prompt has no tokens; give at least one, e.g. the BOS token")
    _check_token_ids("prompt", token_ids, ready.vocab_size)
    if len(token_ids) >= ready.max_model_len:
        raise ValueError(
            f"the prompt has {len(token_ids)} tokens, but prompt and output together may have "
            f"max_model_len={ready.max_model_len}; shorten the prompt"
        )
    return list(token_ids)


def check_text_len(text: str, longest_token_len: int, max_model_len: int) -> str:
    """`text` if it could fit into the context at all: to find that out by tokenizing all of a text
    of many MiB takes minutes. Raises ValueError otherwise.

    A normalizer may write a text shorter, but hardly to a quarter.
    """
    most = 4 * longest_token_len * max_model_len
    if len(text) > most:
        raise ValueError(
            f"this model's maximum context length is {max_model_len} tokens (max_model_len), but "
            f"the text has {len(text)} characters, and over {most} never fit; shorten the prompt"
        )
    return text


def check_sampling(sampling: Any) -> SamplingParams:
    """`sampling` if it is one. Raises ValueError otherwise."""
    if not isinstance(sampling, SamplingParams):
        raise ValueError(f"sampling={sampling!r:.80} must be a SamplingParams")
    return sampling


def check_request(request: AddRequest, ready: Ready) -> None:
    """Raise ValueError for a field that the engine could not take."""
    check_sampling(request.sampling)
    if request.kv is not None and not isinstance(request.kv, KVParams):
        raise ValueError(f"kv={request.kv!r} must be a KVParams or None")
    _check_token_ids("stop_token_ids", request.sampling.stop_token_ids, ready.vocab_size)
    _check_token_ids("logit_bias", request.sampling.logit_bias or (), ready.vocab_size)
    if request.sampling.think is not None:
        think = request.sampling.think
        _check_token_ids("think start_token_ids", think.start_token_ids, ready.vocab_size)
        _check_token_ids("think end_token_ids", think.end_token_ids, ready.vocab_size)
    if request.sampling.grammar is not None and not ready.eos_token_ids:
        raise ValueError(
            "the model names no end-of-sequence token, so an answer that matches a grammar could "
            "not end; use a model whose config.json has eos_token_id"
        )
    if not isinstance(request.request_id, str) or not request.request_id:
        raise ValueError(f"request_id={request.request_id!r} must be a string that is not empty")
    if isinstance(request.priority, bool) or not isinstance(request.priority, int):
        raise ValueError(f"priority={request.priority!r} must be a whole number; lower goes first")
    for name in ("namespace", "tenant", "group_id"):
        if not isinstance(getattr(request, name), str):
            raise ValueError(f"{name}={getattr(request, name)!r} must be a string")


def _check_token_ids(name: str, token_ids: Iterable[Any], vocab_size: int) -> None:
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ValueError(f"{name} contains {token_id!r}; token ids must be whole numbers")
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{name} contains token id {token_id}; this model's ids go from 0 to "
                f"{vocab_size - 1}"
            )
