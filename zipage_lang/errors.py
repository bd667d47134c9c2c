"""The errors that the language itself raises; an engine's own errors pass through as they are.

Knows nothing of engines, states or loops.
"""

from typing import Any

from zipage_lang.frontend.errors import ZipageError


class NoBackendError(ZipageError):
    """A program was run with no engine named and no default set.

    Parameters: none. Errors: it is one; raised by `run`, `flush_cache` and `get_server_info`.

    >>> isinstance(zipage.NoBackendError(), Exception)
    True
    """

    def __init__(self) -> None:
        super().__init__(
            "no backend: pass backend=engine to run, or call zipage.set_default_backend(engine)"
        )


class LoopThreadError(ZipageError):
    """Blocking code was called on the event loop that has to do the work it would wait for.

    Parameters: none. Errors: it is one; raised by blocking reads and `run` inside of `async def`
    programs.

    >>> async def body(s): zipage.function(lambda inner: None).run()
    >>> zipage.function(body).run()
    Traceback (most recent call last):
    zipage_lang.errors.LoopThreadError: this would block the event loop ...
    """

    def __init__(self) -> None:
        super().__init__(
            "this would block the event loop that must do the work, for ever; "
            "in an `async def` program use `await s[...]` and `await f.run_async(...)`"
        )


class RunCancelledError(ZipageError):
    """The run or branch that a value belongs to was given up before the value was there.

    Parameters:
        reason: what `cancel(reason)` was told; None where the whole run ended.

    Errors: it is one; raised where such a value is read, its cause is what ended the run.

    >>> zipage.RunCancelledError()
    RunCancelledError('the run ended before this value was generated')
    """

    def __init__(self, reason: str | None = None) -> None:
        why = "the run ended" if reason is None else f"cancelled ({reason})"
        super().__init__(f"{why} before this value was generated")
        self.reason = reason


class ProgramTimeoutError(ZipageError):
    """A program of a batch took longer than `timeout`; its requests were aborted.

    Parameters:
        timeout_s: the seconds it had.

    Errors: none; it is one. Not retryable.

    >>> print(zipage.ProgramTimeoutError(2.5))
    the program took longer than timeout=2.5 s; give it more
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"the program took longer than timeout={timeout_s:g} s; give it more")
        self.timeout_s = timeout_s


class BatchError(ZipageError):
    """Some programs of a batch raised.

    Parameters:
        results: in input order, each program's state or exception; also an attribute.

    Errors: it is one; raised by `run_batch` without `return_exceptions`.

    >>> zipage.BatchError([ValueError("no")]).results
    [ValueError('no')]
    """

    def __init__(self, results: list[Any]) -> None:
        failed = [index for index, item in enumerate(results) if isinstance(item, BaseException)]
        first = results[failed[0]]
        super().__init__(
            f"{len(failed)} of {len(results)} programs raised, first item {failed[0]}: {first!r}; "
            "`.results` holds all of them, or pass return_exceptions=True"
        )
        self.results = results


class ParseError(ZipageError):
    """The text of a typed gen is no value of its type; the program goes on, the value is missing.

    Parameters:
        name: of the value.
        wanted: what was asked for; the attribute `type`.
        text: what was generated.
        finish_reason: why it ended ("length": the value was cut off, give more max_tokens).

    Errors: it is one; raised where the value is read.

    >>> count = zipage.function(lambda s: s.append(zipage.gen("n", type=int)))
    >>> count.run(backend=zipage.testing.ScriptedBackend("many"))["n"]
    Traceback (most recent call last):
    zipage_lang.errors.ParseError: n: 'many' is no int
    """

    def __init__(self, name: str, wanted: Any, text: str, finish_reason: str | None) -> None:
        cut = " (cut off by max_tokens; raise it)" if finish_reason == "length" else ""
        super().__init__(f"{name or 'gen'}: {text!r} is no {wanted!r}{cut}")
        self.name = name
        self.type = wanted
        self.text = text
        self.finish_reason = finish_reason


class UnsupportedError(ZipageError):
    """The backend can't do what was asked; raised at once, before anything is sent.

    Parameters:
        backend: the one that can't.
        what: it was asked for.
        instead: what the caller may do.

    Errors: it is one; raised where a call is appended.

    >>> zipage.UnsupportedError(zipage.testing.ScriptedBackend(), "kv=")
    UnsupportedError("ScriptedBackend can't do kv=")
    """

    def __init__(self, backend: Any, what: str, instead: str = "") -> None:
        hint = f"; {instead}" if instead else ""
        super().__init__(f"{type(backend).__name__} can't do {what}{hint}")
        self.what = what


class ServerError(ZipageError):
    """A server answered with an error, or not at all.

    Parameters:
        message: what it said.
        status: the HTTP status; None where there was no answer, or the stream broke off.
        retryable: the same call may succeed later (overload, restart, a broken connection).

    Errors: it is one; raised where the value of a call is read. What the server calls a bad request
    (400) is a ValueError instead.

    >>> zipage.ServerError("busy", 503, retryable=True).retryable
    True
    """

    def __init__(self, message: str, status: int | None, *, retryable: bool) -> None:
        super().__init__(message if status is None else f"{message} (HTTP {status})")
        self.status = status
        self.retryable = retryable
