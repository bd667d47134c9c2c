"""Starts the engine that an evaluation asks for, and says what it is.

Knows nothing of tasks or results.
"""

import contextlib
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zipage_lang.evaluation.options import EvalOptions
from zipage_lang.evaluation.process_runner import ProcessRunner
from zipage_lang.evaluation.runner import Runner
from zipage_lang.runtime.config import SchedulerConfig


@contextlib.contextmanager
def started_runner(options: EvalOptions) -> Iterator[Runner]:
    """The engine that was asked for, ended behind the block."""
    engine = engine_options(options)
    if options.is_in_process:
        from zipage_lang.evaluation.inprocess_runner import InProcessRunner  # brings torch

        runner: Runner = InProcessRunner(options.model, **engine)
    else:
        runner = ProcessRunner.start(options.model, **engine)
    try:
        yield runner
    finally:
        runner.close()


def engine_options(options: EvalOptions) -> dict[str, Any]:
    """As given, but for what a sweep needs of its engine.

    A query slot per row: with short intervals most requests gather queries most of the time, and
    would wait for each other's slots. And compaction by default where any cell compacts, though
    each request says for itself: on a card memory is set aside and graphs are captured for it then.
    """
    rows = options.engine.get("max_running", SchedulerConfig().max_running)
    mode = {"kv_mode": "fixed"} if options.grid.policies else {}
    return {"num_query_slots": rows, **mode, **options.engine}


def facts_of(options: EvalOptions, runner: Runner) -> dict[str, str]:
    """What a report says beside its numbers."""
    ready = runner.ready
    given = ", ".join(f"{name}={value}" for name, value in options.engine.items())
    return {
        "architecture": ready.architecture,
        "backend": f"{ready.backend} on {platform.machine()}",
        "pool": f"{ready.num_blocks:,} blocks of {ready.block_size} slots",
        "rows": str(runner.max_running),
        "engine options": given or "defaults",
    }


def identity_of(options: EvalOptions, runner: Runner) -> dict[str, Any]:
    """Results of another model or number format are not gone on with."""
    return {
        "model": Path(runner.ready.model).name,
        "dtype": options.engine.get("dtype", "float32"),
    }
