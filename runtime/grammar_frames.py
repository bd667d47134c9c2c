"""What an engine and its grammar workers say to each other, and how it is cut into frames.

Knows nothing of processes or of how grammars are compiled.
"""

import msgspec

from zipage_lang.runtime.grammar_source import GrammarSource

LENGTH_BYTES = 8  # before each frame, little-endian


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What the compilation of one grammar may take."""

    max_compile_s: int = 10  # CPU time
    max_memory_bytes: int = 2**30  # of address space, on top of what an idle worker has
    max_data_bytes: int = 128 * 2**20  # of the compiled grammar, as it is sent


class Setup(msgspec.Struct, tag="setup", frozen=True):
    """First of all: what tokens spell (special ones nothing), and which of them end an output."""

    texts: list[bytes]
    eos_token_ids: list[int]
    bounds: Bounds


class Compile(msgspec.Struct, tag="compile", frozen=True):
    """Answered with Compiled or Refused, or by the worker's end."""

    source: GrammarSource


class Compiled(msgspec.Struct, tag="compiled", frozen=True):
    """data: the compiled grammar as xgrammar writes it."""

    data: bytes


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """is_costly: it met a bound, and would again. is_spent: the worker has ended with it."""

    error: str
    is_costly: bool = False
    is_spent: bool = False


ToWorker = Setup | Compile
FromWorker = Compiled | Refused

_encoder = msgspec.msgpack.Encoder()
_worker_decoder = msgspec.msgpack.Decoder(ToWorker)
_engine_decoder = msgspec.msgpack.Decoder(FromWorker)


def frame(message: ToWorker | FromWorker) -> bytes:
    data = _encoder.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def decode_for_worker(data: bytes) -> ToWorker:
    return _worker_decoder.decode(data)


def decode_for_engine(data: bytes) -> FromWorker:
    return _engine_decoder.decode(data)
