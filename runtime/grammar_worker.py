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
    compiled_data,
    try_out,
)
from zipage_lang.runtime.light_xgrammar import load_xgrammar_light

MAX_MEMORY_BYTES = 2**30  # of address space, on top of what the worker has when it is ready
MAX_COMPILE_S = 10  # CPU time of one grammar
MAX_DATA_BYTES = 128 * 2**20  # of one compiled grammar, as it is sent
NICENESS = 10  # an engine that runs on the same CPUs goes first
OUT_OF_MEMORY = (
    f"the grammar takes more than {MAX_MEMORY_BYTES >> 20} MiB to compile; make it simpler"
)


def main() -> int:
    """Serve until the engine closes the pipe."""
    inbox, outbox = _claim_pipes()
    os.nice(NICENESS)
    first = _read(inbox)
    if not isinstance(first, frames.Vocabulary):
        return 1
    load_xgrammar_light()
    compiler = GrammarCompiler(first.texts, first.eos_token_ids)
    _bound_memory()
    while isinstance(message := _read(inbox), frames.Compile):
        _bound_time()
        answer = _answer(compiler, message)
        outbox.write(frames.frame(answer))
        outbox.flush()
        if isinstance(answer, frames.Refused) and answer.is_spent:
            return 0
    return 0


def _answer(compiler: GrammarCompiler, message: frames.Compile) -> frames.FromWorker:
    try:
        compiled = compiler.compile(message.source)
        try_out(compiled, message.source.kind)
        data = compiled_data(compiled)
    except GrammarError as error:
        return frames.Refused(str(error), is_spent="bad_alloc" in str(error))
    except MemoryError:
        return frames.Refused(OUT_OF_MEMORY, is_spent=True)
    if len(data) > MAX_DATA_BYTES:
        return frames.Refused(
            f"the {message.source.kind} takes {len(data) >> 20} MiB when compiled; at most "
            f"{MAX_DATA_BYTES >> 20} are allowed: make it simpler"
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


def _bound_memory() -> None:
    if sys.platform != "linux":  # elsewhere the kernel keeps no such limit; time is bounded anyway
        return
    with open("/proc/self/statm", encoding="ascii") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    limit = size + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _bound_time() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + MAX_COMPILE_S
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


if __name__ == "__main__":
    sys.exit(main())
