"""The trace's schema: one struct for each kind of line, shared by the writer and the reader.

Knows nothing of programs, files or pages.
"""

from typing import Annotated, Any, Literal

import msgspec

SCHEMA_VERSION = 1

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # what a page's numbers hold exactly
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]

CallKind = Literal["gen", "select", "score"]
CallStatus = Literal["ok", "error", "cancelled"]


class KVState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a sample's KV cache stood, in slots per (layer, KV head); as messages.KVUsage."""

    logical_len: Count = 0
    resident_len: Count = 0
    max_resident_len: Count = 0
    protected_len: Count = 0
    compactions: Count = 0
    dropped: Count = 0
    recomputed: Count = 0


class Sample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one sample of a call came to; of a cancelled one, as far as it had come."""

    text: str = ""
    thinking: str | None = None
    tokens: Count = 0
    finish_reason: str | None = None
    logprob_mean: float | None = None
    kv: KVState = KVState()


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    """What all lines hold. `t`: seconds since 1970; `node`: a state of the run, 0 is its root."""

    t: Seconds
    run: str = ""
    node: Count = 0


class RunStart(Event, tag="run_start", frozen=True, kw_only=True, omit_defaults=True):
    """A program begins. `args` are shortened reprs; `sampling` and `kv` are the run's defaults."""

    schema: Count
    program: str
    args: dict[str, str] = {}
    seed: int | None = None
    backend: str = ""
    versions: dict[str, str] = {}
    sampling: dict[str, Any] = {}
    kv: dict[str, Any] = {}


class RunEnd(Event, tag="run_end", frozen=True, kw_only=True, omit_defaults=True):
    """A program is over, its branches too. `error`: what its body raised."""

    error: str | None = None
    returned: str | None = None


class Text(Event, tag="text", frozen=True, kw_only=True, omit_defaults=True):
    """The author's text was appended."""

    text: str


class Role(Event, tag="role", frozen=True, kw_only=True, omit_defaults=True):
    """A chat message opened or closed."""

    role: str
    opens: bool


class CallStart(Event, tag="call_start", frozen=True, kw_only=True, omit_defaults=True):
    """A gen, select or score goes to the backend. `call` counts the calls of its node."""

    call: Count
    kind: CallKind = "gen"
    name: str = ""
    prompt_tokens: Count = 0
    seed: int | None = None
    sampling: dict[str, Any] = {}  # fields that differ from SamplingParams()
    kv: dict[str, Any] = {}
    choices: list[str] = []


class FirstToken(Event, tag="first_token", frozen=True, kw_only=True, omit_defaults=True):
    """The first token of any sample of the call."""

    call: Count


class CacheHit(Event, tag="cache_hit", frozen=True, kw_only=True, omit_defaults=True):
    """So many of the call's prompt tokens were not computed again."""

    call: Count
    cached_tokens: Count
    prompt_tokens: Count = 0


class Compaction(Event, tag="compaction", frozen=True, kw_only=True, omit_defaults=True):
    """A sample's KV cache was compacted `count` times since its output before."""

    call: Count
    sample: Count = 0
    count: Count = 1
    logical_len: Count
    resident_len: Count
    dropped: Count = 0  # slots, by these compactions


class CallEnd(Event, tag="call_end", frozen=True, kw_only=True, omit_defaults=True):
    """The call is over. `tokens` and `cached_tokens` are sums over its requests."""

    call: Count
    status: CallStatus = "ok"
    seconds: Seconds = 0.0
    tokens: Count = 0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    samples: list[Sample] = []
    choice: Count | None = None
    distribution: list[float] = []
    error: str | None = None


class Fork(Event, tag="fork", frozen=True, kw_only=True, omit_defaults=True):
    """`children` go on from here. `why` tells a search's or scratch's branches from a fork's."""

    children: list[Count]
    why: str = "fork"
    kv: dict[str, Any] = {}


class Join(Event, tag="join", frozen=True, kw_only=True, omit_defaults=True):
    """Names or texts of `children` were brought to the node."""

    children: list[Count]
    mode: str = "gather"


class Splice(Event, tag="splice", frozen=True, kw_only=True, omit_defaults=True):
    """What `child` said since its fork was appended."""

    child: Count


class Cancel(Event, tag="cancel", frozen=True, kw_only=True, omit_defaults=True):
    """The node (of node 0: the run) was given up, its requests aborted."""

    reason: str = ""


class Budget(Event, tag="budget", frozen=True, kw_only=True, omit_defaults=True):
    """A budget was set, charged or ran out."""

    data: dict[str, Any] = {}


class Scratch(Event, tag="scratch", frozen=True, kw_only=True, omit_defaults=True):
    """Text that does not stay begins or ends; it is in the state `child`."""

    begins: bool
    child: Count | None = None


class Failure(Event, tag="error", frozen=True, kw_only=True, omit_defaults=True):
    """The node ended with this error; nothing of it runs after."""

    error: str


class Lost(Event, tag="lost", frozen=True, kw_only=True, omit_defaults=True):
    """The writer could not keep up or could not encode so many events."""

    count: Count


class Note(Event, tag="note", frozen=True, kw_only=True, omit_defaults=True):
    """Anything else that was worth a line."""

    kind: str
    data: dict[str, Any] = {}


AnyEvent = (
    RunStart
    | RunEnd
    | Text
    | Role
    | CallStart
    | FirstToken
    | CacheHit
    | Compaction
    | CallEnd
    | Fork
    | Join
    | Splice
    | Cancel
    | Budget
    | Scratch
    | Failure
    | Lost
    | Note
)

_encoder = msgspec.json.Encoder(enc_hook=repr)
_decoder = msgspec.json.Decoder(AnyEvent)


class BadLineError(ValueError):
    """A line that is no event of this schema."""


def encode_event(event: Event) -> bytes:
    """One line without its end. Raises ValueError, TypeError or RecursionError for what JSON can't
    hold.
    """
    try:
        return _encoder.encode(event)
    except UnicodeEncodeError:  # a lone surrogate, which no JSON text may hold
        return _encoder.encode(_encodable(msgspec.to_builtins(event, enc_hook=repr)))


def decode_event(line: bytes) -> AnyEvent:
    """Raises BadLineError, with the reason, for what is no event."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLineError(str(error)) from error


def _encodable(value: Any) -> Any:
    """`value` with a question mark for each surrogate in its strings."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case dict():
            return {_encodable(name): _encodable(item) for name, item in value.items()}
        case list() | tuple():
            return [_encodable(item) for item in value]
    return value
