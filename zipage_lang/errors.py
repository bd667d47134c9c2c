"""The errors that the language itself raises; an engine's own errors pass through as they are.

Knows nothing of engines, states or loops.
"""

from typing import Any

from zipage_lang.frontend.errors import ZipageError


class NoBackendError(ZipageError):
    """A program was run with no engine named and no default set."""

    def __init__(self) -> None:
        super().__init__(
            "no backend: pass backend=engine to run, or call zipage.set_default_backend(engine)"
        )


class LoopThreadError(ZipageError):
    """Blocking code was called on the event loop that has to do the work it would wait for."""

    def __init__(self) -> None:
        super().__init__(
            "this would block the event loop that must do the work, for ever; "
            "in an `async def` program use `await s[...]` and `await f.run_async(...)`"
        )


class RunCancelledError(ZipageError):
    """The run that a value belongs to was given up before the value was there."""

    def __init__(self) -> None:
        super().__init__("the run ended before this value was generated")


class BatchError(ZipageError):
    """Some programs of a batch raised. `results` holds, in input order, each state or exception."""

    def __init__(self, results: list[Any]) -> None:
        failed = [index for index, item in enumerate(results) if isinstance(item, BaseException)]
        first = results[failed[0]]
        super().__init__(
            f"{len(failed)} of {len(results)} programs raised, first item {failed[0]}: {first!r}; "
            "`.results` holds all of them, or pass return_exceptions=True"
        )
        self.results = results
