"""`@zipage.function`: a Python function becomes a program that runs alone, in a batch, or inside
another.

Knows nothing of how expressions run or of chat templates' text.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from zipage_lang.backend import Backend, as_backend, default_backend
from zipage_lang.batch import collect
from zipage_lang.chat import ChatTemplate, Message
from zipage_lang.loops import LoopBridge
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.strict_fields import unknown_name_error
from zipage_lang.seeds import derive_seed, random_root
from zipage_lang.session import RunSettings
from zipage_lang.start import Start
from zipage_lang.state import AsyncState, ProgramState, StateHandle

SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
MAX_THREADS = 64  # of a batch; each waits for one program's body
RUN_WORDS = frozenset({"backend", "stream", "seed", "kv"})


def function(body: Callable[..., Any]) -> "Program":
    """Decorator: make a program of `body`, whose first parameter is the state.

    `def` bodies read with `s["x"]`, which blocks; `async def` bodies with `await s["x"]`. Raises
    ValueError for a body without a state, with *args, or with a parameter that `run` needs itself.
    """
    return Program(body)


class Program:
    """A program. `run`, `run_async` and `run_batch` start it; `program(s, ...)` goes on in the
    state s.
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
        **kwargs: Any,
    ) -> ProgramState:
        """Run the program and return its state.

        Returns when all of it is done, or with `stream` at once. `kwargs` are the body's arguments
        and SamplingParams fields, which are the defaults of every call. What the body raises is
        raised here; a failed call raises its error where its value is read.
        """
        start = self._start(args, kwargs, backend, seed, kv)
        if stream:
            return start.in_background()
        return start.to_the_end()

    async def run_async(
        self,
        *args: Any,
        backend: Any = None,
        seed: int | None = None,
        kv: KVParams | None = None,
        **kwargs: Any,
    ) -> ProgramState:
        """`run` for callers on any event loop; their own is not blocked."""
        start = self._start(args, kwargs, backend, seed, kv)
        return await start.awaited()

    def run_batch(
        self,
        items: Iterable[Mapping[str, Any] | Iterable[Any]],
        *,
        backend: Any = None,
        num_threads: int | None = None,
        progress_bar: bool = False,
        return_exceptions: bool = False,
        seed: int | None = None,
        kv: KVParams | None = None,
        **sampling: Any,
    ) -> list[ProgramState]:
        """Run the program once for each item (its arguments by name or by position), all at once.

        Every program runs to its end. Those whose body raised stand in the list as their exception
        with `return_exceptions`; otherwise BatchError is raised, which holds all results. A `def`
        body takes one of `num_threads` threads while it runs (None: up to 64), branches take none.
        """
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads={num_threads} must be at least 1")
        chosen = _choose_backend(backend)
        LoopBridge(chosen.loop).check_may_block()
        root, template = _root(seed), _template_of(chosen)
        starts = []
        for index, item in enumerate(items):
            item_seed = derive_seed(root, ("item", index))
            settings = self._settings(chosen, template, sampling, item_seed, kv)
            starts.append(Start(self._body, settings, self._arguments(*_as_arguments(item))))
        with ThreadPoolExecutor(num_threads or MAX_THREADS, "zipage-batch") as pool:
            return collect(
                [start.submitted(pool) for start in starts],
                progress_bar=progress_bar,
                return_exceptions=return_exceptions,
                cancel_all=lambda: _cancel(starts),
            )

    def _start(
        self,
        args: Iterable[Any],
        kwargs: Mapping[str, Any],
        backend: Any,
        seed: int | None,
        kv: KVParams | None,
    ) -> "Start":
        sampling = {n: v for n, v in kwargs.items() if n in SAMPLING_FIELDS and not self._names(n)}
        values = {name: value for name, value in kwargs.items() if name not in sampling}
        arguments = self._arguments(args, values)
        chosen = _choose_backend(backend)
        settings = self._settings(chosen, _template_of(chosen), sampling, _root(seed), kv)
        return Start(self._body, settings, arguments)

    def _settings(
        self,
        backend: Backend,
        template: ChatTemplate,
        sampling: Mapping[str, Any],
        root_seed: int,
        kv: KVParams | None,
    ) -> RunSettings:
        return RunSettings(
            backend=backend,
            template=template,
            sampling=SamplingParams(**sampling),
            kv=kv or KVParams(),
            root_seed=root_seed,
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
                known = [*self._parameters, *SAMPLING_FIELDS, *RUN_WORDS]
                raise unknown_name_error(f"argument of {self!r} or sampling field", name, known)
        arguments = {**self._bound, **by_position, **kwargs}
        self._signature.bind(None, **arguments)  # raises TypeError for what is missing
        return arguments

    def _names(self, name: str) -> bool:
        return name in self._parameters

    def _takes(self, name: str) -> bool:
        kinds = [parameter.kind for parameter in self._signature.parameters.values()]
        return self._names(name) or inspect.Parameter.VAR_KEYWORD in kinds


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


def _cancel(starts: Iterable[Start]) -> None:
    for start in starts:
        start.session.cancel()


def _choose_backend(backend: Any) -> Backend:
    return default_backend() if backend is None else as_backend(backend)


def _template_of(backend: Backend) -> ChatTemplate:
    def render(messages: Iterable[Message], add_generation_prompt: bool) -> str:
        return backend.render_chat(list(messages), add_generation_prompt=add_generation_prompt)

    return ChatTemplate(render)


def _root(seed: int | None) -> int:
    return random_root() if seed is None else seed
