"""Everything that crosses ZMQ between a client and the engine process, and its encoding.

Tagged msgspec structs in MessagePack, never pickle; size-limited.
Knows nothing of sockets, text or the scheduler.
"""

from typing import Any

import msgspec

from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.snapshot import Snapshot

MAX_MESSAGE_BYTES = 64 * 2**20


class MessageError(ValueError):
    """A message that could not be decoded; the engine counts and drops it."""


class AddRequest(msgspec.Struct, tag="add", frozen=True, kw_only=True):
    """Generate from `token_ids`. With sampling.n > 1, n samples fork from a prompt computed once.

    Ends with exactly one final TokenOutput per sample (finish_reason set, or error set).
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    kv: KVParams | None = None
    namespace: str = ""  # requests of other namespaces never share KV (cache salt, adapter)
    priority: int = 0  # lower goes first
    tenant: str = ""  # whose it is: tenants that wait share the engine fairly
    group_id: str = ""  # requests that can be aborted together
    hold: bool = False  # keep the state after the end, for Fork, until Release


class Fork(msgspec.Struct, tag="fork", frozen=True, kw_only=True):
    """Start `children` from the state of `parent_id` (running or held); they share its blocks.

    Each child's token_ids start with the parent's tokens at the fork point. Where the parent's
    state is gone the children start from what the radix tree still holds.
    """

    parent_id: str
    children: list[AddRequest]


class Stop(msgspec.Struct, tag="stop", frozen=True, kw_only=True):
    """The client saw a stop string: end this sample as finished; only its first tokens count."""

    request_id: str
    sample_index: int
    num_output_tokens: int


class Abort(msgspec.Struct, tag="abort", frozen=True, kw_only=True):
    """The caller left: end these requests (and all of these groups), free their blocks."""

    request_ids: list[str] = []
    group_ids: list[str] = []


class Release(msgspec.Struct, tag="release", frozen=True, kw_only=True):
    """Drop the held states of these requests."""

    request_ids: list[str]


class GetStats(msgspec.Struct, tag="get_stats", frozen=True, kw_only=True):
    call_id: str


class GetSnapshot(msgspec.Struct, tag="get_snapshot", frozen=True, kw_only=True):
    """Take a picture of pool, tree and requests; of each at most so much. 0 leaves it out."""

    call_id: str
    max_cells: int = 4096
    max_nodes: int = 96
    max_requests: int = 48


class FlushCache(msgspec.Struct, tag="flush_cache", frozen=True, kw_only=True):
    """Evict all that no request holds. Answered with a StatsReply."""

    call_id: str


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True, kw_only=True):
    """The client is done: an engine that it started ends, one that it joined lets go of it."""


class Hello(msgspec.Struct, tag="hello", frozen=True, kw_only=True):
    """May this client have an engine that runs already? Answered with Ready or Failed."""


class LogprobEntry(msgspec.Struct, frozen=True, array_like=True):
    """As step_plan.TokenLogprobs."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class KVUsage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a sample's KV cache stands. Counts are slots per (layer, KV head)."""

    logical_len: int = 0  # tokens so far
    resident_len: int = 0  # slots that attention reads
    max_resident_len: int = 0
    protected_len: int = 0
    compactions: int = 0
    dropped: int = 0  # slots dropped by compactions
    recomputed: int = 0  # tokens computed again after a preemption


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens of one sample. cached_tokens: prompt tokens taken from the radix tree or a sibling.

    thinking_tokens: leading completion tokens that are thinking, tags included, where the request
    asked for thinking control.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    thinking_tokens: int = 0


class TokenOutput(msgspec.Struct, tag="token", frozen=True, kw_only=True):
    """New tokens of one sample; the last one of a sample has finish_reason or error set."""

    request_id: str
    sample_index: int = 0
    token_ids: list[int] = []  # new since the last output
    logprobs: list[LogprobEntry] | None = None  # one per new token, if asked for
    prompt_logprobs: list[LogprobEntry | None] | None = None  # once, with sample 0's first output
    finish_reason: str | None = None  # stop, length, abort
    stop_token_id: int | None = None  # which token ended it, for finish_reason "stop"
    error: str | None = None
    usage: Usage = Usage()
    kv: KVUsage = KVUsage()

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class Outputs(msgspec.Struct, tag="outputs", frozen=True, kw_only=True):
    """All outputs of one step."""

    items: list[TokenOutput]


class StatsReply(msgspec.Struct, tag="stats", frozen=True, kw_only=True):
    call_id: str
    stats: dict[str, int | float | str]


class Starting(msgspec.Struct, tag="starting", frozen=True, kw_only=True):
    """What an engine is at that does not take requests yet; `total` 0: it can't be counted."""

    stage: str
    done: int = 0
    total: int = 0


class SnapshotReply(msgspec.Struct, tag="snapshot", frozen=True, kw_only=True):
    call_id: str
    snapshot: Snapshot


class Ready(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """The engine has loaded and takes requests."""

    model: str
    model_path: str  # where tokenizer and weights were found
    architecture: str
    backend: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    num_blocks: int
    block_size: int
    kv_mode: str = "off"  # of requests that ask for none


class Failed(msgspec.Struct, tag="failed", frozen=True, kw_only=True):
    """The engine could not start, or has no use for this client; `error`: why, what to do."""

    error: str


ToEngine = (
    AddRequest
    | Fork
    | Stop
    | Abort
    | Release
    | GetStats
    | GetSnapshot
    | FlushCache
    | Shutdown
    | Hello
)
ToClient = Outputs | StatsReply | SnapshotReply | Starting | Ready | Failed

_encoder = msgspec.msgpack.Encoder()
_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
_client_decoder = msgspec.msgpack.Decoder(ToClient)


def encode(message: ToEngine | ToClient) -> bytes:
    return _encoder.encode(message)


def decode_for_engine(data: bytes) -> ToEngine:
    """Raises MessageError for anything that is no well-formed client message."""
    return _decode(_engine_decoder, data)  # type: ignore[no-any-return]


def decode_for_client(data: bytes) -> ToClient:
    """Raises MessageError for anything that is no well-formed engine message."""
    return _decode(_client_decoder, data)  # type: ignore[no-any-return]


def _decode(decoder: "msgspec.msgpack.Decoder[Any]", data: bytes) -> Any:
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"message of {len(data)} bytes is over {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise MessageError(str(error)) from error
