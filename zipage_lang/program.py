"""`@zipage.function`: a Python function becomes a program that runs alone, in a batch, or inside
another.

Knows nothing of how expressions run or of chat templates' text.
"""

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, overload

from zipage_lang.backend import Backend, as_backend, default_backend
from zipage_lang.batch import Batch, BatchPolicy, collect
from zipage_lang.budgets import Budget
from zipage_lang.chat import ChatTemplate, Message
from zipage_lang.gen_words import SAMPLING_WORDS, sampling_fields
from zipage_lang.loops import LoopBridge
from zipage_lang.prefix import PrefixBackend, PrefixComputed
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.strict_fields import unknown_name_error
from zipage_lang.seeds import derive_seed, random_root
from zipage_lang.session import RunSettings
from zipage_lang.start import Start
from zipage_lang.state import AsyncState, ProgramState, StateHandle
from zipage_lang.trace import Trace, open_trace

MAX_THREADS = 64  # of a batch; each waits for one program's body
RUN_WORDS = frozenset({"backend", "stream", "seed", "kv", "trace", "budget"})


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
        self._signature = inspect.signature(body)
        self._parameters = _program_parameters(body, self._signature)
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
        return self._body(state, **self._arguments(values, kwargs))

    def bind(self, **values: Any) -> "Program":
        """A program with some arguments set; a call may still override them by name."""
        for name in values:
            if not self._takes(name):
                raise unknown_name_error(f"argument of {self!r}", name, self._parameters)
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
        start = self._start(args, kwargs, backend, seed, kv, trace, budget)
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
        prefix = PrefixBackend(_choose_backend(backend))
        start = self._start(args, kwargs, prefix, None, None, None, None)
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
        start = self._start(args, kwargs, backend, seed, kv, trace, budget)
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
        options = _BatchOptions(backend, num_threads, seed, kv, trace, budget, sampling)
        batch = self._batch(items, options, policy)
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
        options = _BatchOptions(backend, num_threads, seed, kv, trace, budget, sampling)
        return iter(self._batch(items, options, policy))

    def _batch(
        self,
        items: Iterable[Mapping[str, Any] | Iterable[Any]],
        options: "_BatchOptions",
        policy: BatchPolicy,
    ) -> Batch:
        num_threads = None if options.num_threads == "auto" else options.num_threads
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads={num_threads} must be at least 1")
        chosen = _choose_backend(options.backend)
        bridge = LoopBridge(chosen.loop)
        bridge.check_may_block()
        root, template = _root(options.seed), _template_of(chosen)
        tracing = open_trace(options.trace)
        attempts = []
        for index, item in enumerate(items):
            settings = self._settings(
                chosen,
                template,
                options.sampling,
                derive_seed(root, ("item", index)),
                options.kv,
                tracing,
                options.budget,
            )
            arguments = self._arguments(*_as_arguments(item))
            attempts.append(functools.partial(Start, self._body, settings, arguments))
        pool = ThreadPoolExecutor(num_threads or MAX_THREADS, "zipage-batch")
        return Batch(attempts, pool, bridge, policy)

    def _start(
        self,
        args: Iterable[Any],
        kwargs: Mapping[str, Any],
        backend: Any,
        seed: int | None,
        kv: KVParams | None,
        trace: "str | os.PathLike[str] | Trace | None",
        budget: Budget | None,
    ) -> "Start":
        sampling = {n: v for n, v in kwargs.items() if n in SAMPLING_WORDS and not self._names(n)}
        values = {name: value for name, value in kwargs.items() if name not in sampling}
        arguments = self._arguments(args, values)
        chosen = _choose_backend(backend)
        template, tracing = _template_of(chosen), open_trace(trace)
        settings = self._settings(chosen, template, sampling, _root(seed), kv, tracing, budget)
        return Start(self._body, settings, arguments)

    def _settings(
        self,
        backend: Backend,
        template: ChatTemplate,
        sampling: Mapping[str, Any],
        root_seed: int,
        kv: KVParams | None,
        trace: Trace | None,
        budget: Budget | None,
    ) -> RunSettings:
        return RunSettings(
            backend=backend,
            template=template,
            sampling=SamplingParams(**sampling_fields(sampling)),
            kv=kv or KVParams(),
            root_seed=root_seed,
            trace=trace,
            budget=budget,
        )

    def _arguments(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The body's arguments by name. Positional ones fill the parameters that are not bound."""
        values = list(args)
        free = [name for name in self._parameters if name not in self._bound]
        if len(values) > len(free):
            raise TypeError(f"{self!r} takes {len(free)} positional arguments, got {len(values)}")
        by_position = dict(zip(free, values, strict=False))
        for name in kwargs:
            if name in by_position:
                raise TypeError(f"{self!r} got two values for {name!r}")
            if not self._takes(name):
                known = [*self._parameters, *SAMPLING_WORDS, *RUN_WORDS]
                raise unknown_name_error(f"argument of {self!r} or sampling field", name, known)
        arguments = {**self._bound, **by_position, **kwargs}
        self._signature.bind(None, **arguments)  # raises TypeError for what is missing
        return arguments

    def _names(self, name: str) -> bool:
        return name in self._parameters

    def _takes(self, name: str) -> bool:
        kinds = [parameter.kind for parameter in self._signature.parameters.values()]
        return self._names(name) or inspect.Parameter.VAR_KEYWORD in kinds


@dataclasses.dataclass(frozen=True)
class _BatchOptions:
    """What run_batch and run_batch_iter take alike."""

    backend: Any
    num_threads: int | Literal["auto"] | None
    seed: int | None
    kv: KVParams | None
    trace: "str | os.PathLike[str] | Trace | None"
    budget: Budget | None
    sampling: Mapping[str, Any]


def _program_parameters(body: Callable[..., Any], signature: inspect.Signature) -> list[str]:
    """Names after the state. Raises ValueError where the function can't be a program."""
    parameters = list(signature.parameters.values())
    kinds = inspect.Parameter
    if not parameters or parameters[0].kind not in (
        kinds.POSITIONAL_ONLY,
        kinds.POSITIONAL_OR_KEYWORD,
    ):
        raise ValueError(f"{body!r} needs the state as its first parameter: def program(s, ...)")
    names = []
    for parameter in parameters[1:]:
        if parameter.kind in (kinds.VAR_POSITIONAL, kinds.POSITIONAL_ONLY):
            raise ValueError(f"{body!r}: parameter {parameter} can't be given by name; change it")
        if parameter.name in RUN_WORDS:
            raise ValueError(
                f"{body!r}: {parameter.name!r} is a word of run(); rename the parameter"
            )
        if parameter.kind is not kinds.VAR_KEYWORD:
            names.append(parameter.name)
    return names


def _as_arguments(item: Any) -> tuple[list[Any], dict[str, Any]]:
    if isinstance(item, Mapping):
        return [], dict(item)
    if isinstance(item, list | tuple):
        return list(item), {}
    raise ValueError(f"batch item {item!r} must be a dict of arguments, or a list or tuple of them")


def _choose_backend(backend: Any) -> Backend:
    return default_backend() if backend is None else as_backend(backend)


def _template_of(backend: Backend) -> ChatTemplate:
    def render(messages: Iterable[Message], add_generation_prompt: bool) -> str:
        return backend.render_chat(list(messages), add_generation_prompt=add_generation_prompt)

    return ChatTemplate(render)


def _root(seed: int | None) -> int:
    return random_root() if seed is None else seed
