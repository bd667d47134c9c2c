"""Messages of both directions, and what the engine's intake does with those that decode.

Knows nothing of sockets.
"""

import msgspec
from test_support.fuzz_input import Choices, words_of

from zipage_lang.runtime import messages
from zipage_lang.runtime.config import CompressionConfig
from zipage_lang.runtime.intake import Intake
from zipage_lang.runtime.limits import Limits
from zipage_lang.runtime.policies.registry import PolicyQueries, load_policies
from zipage_lang.runtime.request import RequestRefused
from zipage_lang.runtime.sampling_params import SamplingParams

LIMITS = Limits(
    num_blocks=64,
    num_host_blocks=8,
    num_query_slots=4,
    window=16,
    max_model_len=512,
    vocab_size=128,
    eos_token_ids=(2,),
)
INTAKE = Intake(
    CompressionConfig(), LIMITS, 16, PolicyQueries(load_policies(), LIMITS.window, lambda _: None)
)
ADD = msgspec.to_builtins(
    messages.AddRequest(
        request_id="r",
        token_ids=[1, 2, 3],
        sampling=SamplingParams(stop=["\n"], json_schema='{"type":"object"}', logit_bias={3: 1.0}),
        kv=messages.KVParams(mode="fixed", budget=32, interval=16, policy="zipage"),
        namespace="salt",
        group_id="g",
    )
)
TO_ENGINE = (
    ADD,
    {"type": "fork", "parent_id": "r", "children": [ADD]},
    {"type": "stop", "request_id": "r", "sample_index": 0, "num_output_tokens": 3},
    {"type": "abort", "request_ids": ["r"], "group_ids": ["g"]},
    {"type": "release", "request_ids": ["r"]},
    {"type": "get_stats", "call_id": "c"},
    {"type": "get_snapshot", "call_id": "c", "max_cells": 10},
)
TO_CLIENT = (
    {
        "type": "outputs",
        "items": [
            {
                "type": "token",
                "request_id": "r",
                "token_ids": [5],
                "logprobs": [[5, -0.5, 1, [[5, -0.5]]]],
                "prompt_logprobs": [None, [1, -1.0, 2, []]],
                "finish_reason": "stop",
                "stop_token_id": 2,
            }
        ],
    },
    {"type": "stats", "call_id": "c", "stats": {"steps": 1, "backend": "cpu"}},
    {"type": "starting", "stage": "loading", "done": 1, "total": 2},
    {"type": "failed", "error": "no memory"},
)
WORDS = words_of(*TO_ENGINE, *TO_CLIENT, list(SamplingParams.__dataclass_fields__))
DECODERS = (messages.decode_for_engine, messages.decode_for_client)


def target(data: bytes) -> None:
    choices = Choices(data)
    side = choices.below(2)
    if choices.flag():
        sent = choices.rest()
    else:
        template = choices.pick((TO_ENGINE, TO_CLIENT)[side])
        built = choices.changed(template, WORDS)
        try:
            sent = choices.damaged(msgspec.msgpack.encode(built))
        except (OverflowError, UnicodeEncodeError):  # no MessagePack can hold it
            return
    try:
        message = DECODERS[side](sent)
    except messages.MessageError as error:
        assert str(error)
        return
    again = DECODERS[side](messages.encode(message))
    assert repr(again) == repr(message)  # by repr: a NaN differs from itself
    for request in requests_of(message):
        taken_in(request)


def requests_of(message: object) -> list[messages.AddRequest]:
    if isinstance(message, messages.Fork):
        return message.children
    return [message] if isinstance(message, messages.AddRequest) else []


def taken_in(request: messages.AddRequest) -> None:
    """The intake refuses it, or makes as many requests as it asks for samples."""
    try:
        made = INTAKE.make_requests(request)
    except RequestRefused as error:
        assert str(error)
        return
    assert len(made) == request.sampling.n
    for sample in made:
        assert 0 < len(sample.token_ids) < sample.end_len <= LIMITS.max_model_len
        assert sample.kv.protected_len >= 0
