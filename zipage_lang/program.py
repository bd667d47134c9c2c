"""`@zipage.function`: a Python function becomes a program that runs alone, in a batch, or inside
another.

Knows nothing of how expressions run or of chat templates' text.
"""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, overload

from zipage_lang.async_state import AsyncState
from zipage_lang.batch import Batch, BatchPolicy, collect
from zipage_lang.body_parameters import BodyParameters, item_arguments
from zipage_lang.budgets import Budget
from zipage_lang.loops import LoopBridge
from zipage_lang.prefix import PrefixBackend, PrefixComputed
from zipage_lang.program_state import ProgramState
from zipage_lang.run_options import RunOptions, choose_backend
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.start import Start
from zipage_lang.state import StateHandle
from zipage_lang.trace import Trace

MAX_THREADS = 64  # of a batch; each waits for one program's body


@overload
def function(body: Callable[..., Any]) -> "Program": ...


@overload
def function(
    *, num_api_spec_tokens: int | None = None
) -> "Callable[[Callable[..., Any]], Program]": ...


def function(
    body: Callable[..., Any] | None = None, *, num_api_spec_tokens: int | None = None
) -> "Program | Callable[[Callable[..., Any]], Program]":
    """Decorator: make a program of a Python function.

    Parameters:
        body: takes the state first; `def` bodies read with `s["x"]`, which blocks, `async def`
            bodies with `await s["x"]`.
        num_api_spec_tokens: SGLang's, which saves calls of hosted APIs and changes no result; it is
            taken, and not needed here.

    Errors: ValueError for a body without a state, with *args, or with a parameter that `run` needs
    itself.

    >>> hello = zipage.function(lambda s, name: s.append("Hello " + name + zipage.gen("rest")))
    >>> hello.run("Ada", backend=zipage.testing.ScriptedBackend("!")).text()
    'Hello Ada!'
    """
    return Program if body is None else Program(body)


class Program:
    """A program, as `zipage.function` makes one. `run`, `run_async` and `run_batch` start it;
    `program(s, ...)` goes on in the state s.

    Parameters:
        body: as for `zipage.function`.
        bound: arguments that are set already, as by `bind`.

    Errors: as for `zipage.function`; `run` raises ValueError for an unknown argument, TypeError for
    a missing or surplus one, NoBackendError without a backend, and what the body raises.

    >>> double = zipage.Program(lambda s, text: s.append(text + text))
    >>> [state.text() for state in double.run_batch([("a",), ("b",)])]
    ['aa', 'bb']
    """

    def __init__(self, body: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        functools.update_wrapper(self, body)
        self._body = body
        self._parameters = BodyParameters(body)
        self._bound = dict(bound or {})

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._body)

    def __repr__(self) -> str:
        return f"<program {self.__name__}>"  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """With a state first: go on in that state (awaited in async programs). Else: `run`."""
        if not args or not isinstance(args[0], StateHandle):
            return self.run(*args, **kwargs)
        state, *values = args
        if isinstance(state, AsyncState) != self.is_async:
            raise TypeError(
                f"{self!r} and the program that calls it must both be async or both not"
            )
        return self._body(state, **self._match(values, kwargs))

    def bind(self, **values: Any) -> "Program":
        """A program with some arguments set; a call may still override them by name."""
        self._parameters.check_bound(self, values)
        return Program(self._body, self._bound | values)

    def run(
        self,
        *args: Any,
        backend: Any = None,
        stream: bool = False,
        seed: int | None = None,
        kv: KVParams | None = None,
        trace: "str | os.PathLike[str] | Trace | None" = None,
        budget: Budget | None = None,
        **kwargs: Any,
    ) -> ProgramState:
        """Run the program and return its state.

        Returns when all of it is done, or with `stream` at once. `kwargs` are the body's arguments
        and SamplingParams fields, which are the defaults of every call. What the body raises is
        raised here; a failed call raises its error where its value is read. `trace`: a file that
        gets what the run does, a line each, or a `zipage.Trace`; None: the variable ZIPAGE_TRACE.
        `budget`: what the run may spend; where it runs out, the program gets what it has.
        """
        start = self._start(
            args, kwargs, backend=backend, seed=seed, kv=kv, trace=trace, budget=budget
        )
        if stream:
            return start.in_background()
        return start.to_the_end()

    def cache(self, *args: Any, backend: Any = None, **kwargs: Any) -> int:
        """Compute what the program says before its first call, so that later runs find it in the
        cache; returns how many tokens that is.

        Arguments as for `run`. The body runs up to the first value it reads, and its own side
        effects happen; text that other arguments share is shared. `zipage.pin` keeps a prefix from
        being evicted.
        """
        prefix = PrefixBackend(choose_backend(backend))
        start = self._start(args, kwargs, backend=prefix)
        with contextlib.suppress(PrefixComputed):
            start.to_the_end()
        return prefix.num_tokens

    async def run_async(
        self,
        *args: Any,
        backend: Any = None,
        seed: int | None = None,
        kv: KVParams | None = None,
        trace: "str | os.PathLike[str] | Trace | None" = None,
        budget: Budget | None = None,
        **kwargs: Any,
    ) -> ProgramState:
        """`run` for callers on any event loop; their own is not blocked."""
        start = self._start(
            args, kwargs, backend=backend, seed=seed, kv=kv, trace=trace, budget=budget
        )
        return await start.awaited()

    def run_batch(
        self,
        items: Iterable[Mapping[str, Any] | Iterable[Any]],
        *,
        backend: Any = None,
        num_threads: int | Literal["auto"] | None = None,
        progress_bar: bool = False,
        return_exceptions: bool = False,
        max_errors: int | None = None,
        timeout: float | None = None,
        retries: int = 0,
        seed: int | None = None,
        kv: KVParams | None = None,
        trace: "str | os.PathLike[str] | Trace | None" = None,
        budget: Budget | None = None,
        **sampling: Any,
    ) -> list[ProgramState]:
        """Run the program once for each item (its arguments by name or by position), all at once.

        Every program runs to its end. Those whose body raised stand in the list as their exception
        with `return_exceptions`; otherwise BatchError is raised, which holds all results. A `def`
        body takes one of `num_threads` threads while it runs (None or "auto": up to 64), branches
        take none.

        `timeout`: seconds each program may take; then it is cancelled and stands in the list as a
        ProgramTimeoutError (a body that never comes back from its own Python code keeps its
        thread). `retries`: how often a program is run again that raised an error whose `retryable`
        is set (an engine that died, not a mistake); it draws the same seeds as before.
        `max_errors`: when more programs than this have raised, the rest is cancelled. `budget` is
        for each.
        """
        policy = BatchPolicy(max_errors, timeout, retries)
        batch = self._batch(
            items,
            num_threads,
            policy,
            backend=backend,
            seed=seed,
            kv=kv,
            trace=trace,
            budget=budget,
            sampling=sampling,
        )
        return collect(batch, progress_bar=progress_bar, return_exceptions=return_exceptions)

    def run_batch_iter(
        self,
        items: Iterable[Mapping[str, Any] | Iterable[Any]],
        *,
        backend: Any = None,
        num_threads: int | Literal["auto"] | None = None,
        max_errors: int | None = None,
        timeout: float | None = None,
        retries: int = 0,
        seed: int | None = None,
        kv: KVParams | None = None,
        trace: "str | os.PathLike[str] | Trace | None" = None,
        budget: Budget | None = None,
        **sampling: Any,
    ) -> Iterator[tuple[int, ProgramState | BaseException]]:
        """As run_batch, giving (index, state or exception) of each program as it ends.

        Programs begin with the first of them; leaving the iterator early cancels the rest.
        """
        policy = BatchPolicy(max_errors, timeout, retries)
        batch = self._batch(
            items,
            num_threads,
            policy,
            backend=backend,
            seed=seed,
            kv=kv,
            trace=trace,
            budget=budget,
            sampling=sampling,
        )
        return iter(batch)

    def _batch(
        self,
        items: Iterable[Mapping[str, Any] | Iterable[Any]],
        num_threads: int | Literal["auto"] | None,
        policy: BatchPolicy,
        **options: Any,
    ) -> Batch:
        num_threads = None if num_threads == "auto" else num_threads
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads={num_threads} must be at least 1")
        run_options = RunOptions(**options)
        bridge = LoopBridge(run_options.backend.loop)
        bridge.check_may_block()
        attempts = []
        for index, item in enumerate(items):
            arguments = self._match(*item_arguments(item))
            settings = run_options.item_settings(index)
            attempts.append(functools.partial(Start, self._body, settings, arguments))
        pool = ThreadPoolExecutor(num_threads or MAX_THREADS, "zipage-batch")
        return Batch(attempts, pool, bridge, policy)

    def _start(self, args: Iterable[Any], kwargs: Mapping[str, Any], **options: Any) -> Start:
        values, sampling = self._parameters.split_sampling(kwargs)
        arguments = self._match(args, values)
        settings = RunOptions(sampling=sampling, **options).settings()
        return Start(self._body, settings, arguments)

    def _match(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return self._parameters.match(self, self._bound, args, kwargs)
