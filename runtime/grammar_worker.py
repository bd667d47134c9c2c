"""The process that compiles grammars for an engine, so that a hostile one harms nobody but itself.

Started as `python -m zipage_lang.runtime.grammar_worker`; frames come on stdin and go to stdout.
The kernel bounds what it may take: memory for good, CPU time anew for each grammar. Either limit
may end it in the midst of one; the engine then starts another. Knows nothing of requests.
"""

import os
import resource
import sys
from typing import BinaryIO

from zipage_lang.runtime import grammar_frames as frames
from zipage_lang.runtime.grammar import (
    GrammarCompiler,
    GrammarError,
    GrammarTooCostly,
    compiled_data,
    try_out,
)
from zipage_lang.runtime.light_xgrammar import load_xgrammar_light

NICENESS = 10  # an engine that runs on the same CPUs goes first


def main() -> int:
    """Serve until the engine closes the pipe."""
    inbox, outbox = _claim_pipes()
    os.nice(NICENESS)
    setup = _read(inbox)
    if not isinstance(setup, frames.Setup):
        return 1
    load_xgrammar_light()
    compiler = GrammarCompiler(setup.texts, setup.eos_token_ids)
    _bound_memory(setup.bounds.max_memory_bytes)
    while isinstance(message := _read(inbox), frames.Compile):
        _bound_time(setup.bounds.max_compile_s)
        answer = _answer(compiler, message, setup.bounds.max_data_bytes)
        outbox.write(frames.frame(answer))
        outbox.flush()
        if isinstance(answer, frames.Refused) and answer.is_spent:
            return 0
    return 0


def _answer(
    compiler: GrammarCompiler, message: frames.Compile, max_data_bytes: int
) -> frames.FromWorker:
    try:
        compiled = compiler.compile(message.source)
        try_out(compiled, message.source.kind)
        data = compiled_data(compiled)
    except GrammarError as error:
        is_costly = isinstance(error, GrammarTooCostly)
        return frames.Refused(str(error), is_costly, is_spent="bad_alloc" in str(error))
    except MemoryError as error:
        return frames.Refused(repr(error), is_spent=True)
    if len(data) > max_data_bytes:
        return frames.Refused(
            f"the {message.source.kind} takes {len(data) >> 20} MiB when compiled; at most "
            f"{max_data_bytes >> 20} are allowed: make it simpler",
            is_costly=True,
        )
    return frames.Compiled(data)


def _claim_pipes() -> tuple[BinaryIO, BinaryIO]:
    """stdin and stdout for frames alone: whatever else is printed goes nowhere."""
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    return inbox, outbox


def _read(inbox: BinaryIO) -> frames.ToWorker | None:
    """The next message; None when the engine has closed the pipe."""
    head = inbox.read(frames.LENGTH_BYTES)
    if len(head) < frames.LENGTH_BYTES:
        return None
    return frames.decode_for_worker(inbox.read(int.from_bytes(head, "little")))


def _bound_memory(max_bytes: int) -> None:
    if sys.platform != "linux":  # elsewhere the kernel keeps no such limit; time is bounded anyway
        return
    with open("/proc/self/statm", encoding="ascii") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    limit = size + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _bound_time(max_s: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + max_s
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


if __name__ == "__main__":
    sys.exit(main())
