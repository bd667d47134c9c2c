"""What live branches cost the client: memory, time and turns of the event loop, without an engine.

    python benchmarks/language_branches.py --branches 2000 --tokens 16

Branches of one program run against a scripted backend that holds states as an engine does, so all
that is measured is the language's own. Prints one line each, and one JSON object last.
"""

import argparse
import asyncio
import gc
import json
import threading
import time
import tracemalloc
from typing import Any

import zipage_lang as zipage
from zipage_lang.loops import new_future
from zipage_lang.testing import Reply, StatefulBackend


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--branches", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=16, help="drawn by each branch")
    return parser.parse_args()


class Stages:
    """Seconds between marks, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def end(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._since = now - self._since, now


def measure(num_branches: int, num_tokens: int) -> dict[str, Any]:
    """Fork, call, cancel one, stream the rest and join, with all calls alive at one time."""
    all_here, gate = new_future(), new_future()

    def reply(call: Any) -> Reply:
        if len(backend.calls) == num_branches:
            all_here.set_result(None)
        return Reply("x" * num_tokens, gate=gate)

    @zipage.function
    async def program(s: Any) -> dict[str, Any]:
        s += "one prompt"
        stages = Stages()
        branches = s.fork(num_branches)
        stages.end("fork_s")
        branches += zipage.gen("x", max_tokens=num_tokens)
        stages.end("append_s")
        await asyncio.wrap_future(all_here)
        stages.end("all_calls_sent_s")
        branches[0].cancel("measured")
        await branches[0].error()
        stages.end("cancel_one_s")
        num_threads, num_tasks = threading.active_count(), len(asyncio.all_tasks())
        gate.set_result(None)
        await branches.join(on_error="drop")
        stages.end("stream_and_join_s")
        return {"threads": num_threads, "tasks": num_tasks, **stages.seconds}

    backend = StatefulBackend(reply)
    return dict(program.run(backend=backend).ret_value)


def bytes_per_branch(num_branches: int) -> float:
    """Traced memory of the client for each branch whose call is alive; tracing is slow."""
    gc.collect()
    all_here, gate = new_future(), new_future()

    def reply(call: Any) -> Reply:
        if len(backend.calls) == num_branches:
            all_here.set_result(None)
        return Reply("x", gate=gate)

    @zipage.function
    async def program(s: Any) -> int:
        s += "one prompt"
        branches = s.fork(num_branches)
        branches += zipage.gen("x", max_tokens=1)
        await asyncio.wrap_future(all_here)
        num_bytes = tracemalloc.get_traced_memory()[0]
        gate.set_result(None)
        await branches.join()
        return num_bytes

    backend = StatefulBackend(reply)
    tracemalloc.start()
    try:
        return float(program.run(backend=backend).ret_value) / num_branches
    finally:
        tracemalloc.stop()


def main() -> None:
    arguments = parse_arguments()
    result = measure(arguments.branches, arguments.tokens)
    num_drawn = (arguments.branches - 1) * arguments.tokens
    result["tokens_per_s"] = num_drawn / result["stream_and_join_s"]
    result["bytes_per_branch"] = bytes_per_branch(arguments.branches)
    result["branches"] = arguments.branches
    for name, value in result.items():
        print(f"{name:>20}  {value:,.4f}" if isinstance(value, float) else f"{name:>20}  {value:,}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
