"""Log lines of the server on stderr, as text or as one JSON object each, with request ids.

Knows nothing of what is logged.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Mapping

import msgspec

from zipage_lang.server.config import LogFormat
from zipage_lang.server.request_scope import current_scope

QUIET = ("uvicorn", "httpx2", "httpcore2", "asyncio")  # below warnings they tell nothing new


@contextlib.contextmanager
def logs_on_stderr(log_format: LogFormat, level: int = logging.INFO) -> Iterator[None]:
    """This process's log goes to stderr in that form, in this block only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    handler.addFilter(_add_request_id)
    root = logging.getLogger()
    levels = {"": logging.WARNING, "zipage": level, **dict.fromkeys(QUIET, logging.WARNING)}
    handlers, before = root.handlers, {name: logging.getLogger(name).level for name in levels}
    root.handlers = [handler]
    _set_levels(levels)
    try:
        yield
    finally:
        root.handlers = handlers
        _set_levels(before)


def _set_levels(levels: Mapping[str, int]) -> None:
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def _add_request_id(record: logging.LogRecord) -> bool:
    scope = current_scope()
    record.request_id = scope.request_id if scope is not None else None
    return True


class TextLines(logging.Formatter):
    """`12:30:59 INFO zipage.server [req-1]: what happened`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s%(place)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", None)
        record.place = f" [{request_id}]" if request_id else ""
        return super().format(record)


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message, request_id, the `fields` given as extra."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", None),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(told, enc_hook=str).decode()
