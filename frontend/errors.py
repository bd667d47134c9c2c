"""What can go wrong with an engine or a request, as a small hierarchy of exceptions.

Knows nothing of sockets, processes or text.
"""


class ZipageError(Exception):
    """Base of all errors that are not the caller's input (those are ValueError).

    `retryable`: the same call may succeed on a new engine.
    """

    retryable = False


class EngineStartError(ZipageError):
    """The engine process did not come up; the message says why and what to do."""


class EngineDiedError(ZipageError):
    """The engine process ended while it was needed; nothing of the request is left."""

    retryable = True


class EngineClosedError(ZipageError):
    """The engine was closed by its owner; start a new one."""


class RequestError(ZipageError):
    """The engine refused or failed this one request and lives on.

    `has_run`: it was taken in and failed later; otherwise it was refused for what it asks.
    """

    def __init__(self, request_id: str, reason: str, *, has_run: bool = False) -> None:
        super().__init__(reason)
        self.has_run = has_run
        self.request_id = request_id
        self.reason = reason
