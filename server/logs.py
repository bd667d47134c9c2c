"""Log lines of the server on stderr, as text or as one JSON object each, with request ids.

Knows nothing of what is logged.
"""

import logging
import sys
import time

import msgspec

from zipage_lang.server.config import LogFormat
from zipage_lang.server.request_scope import current_scope

QUIET = ("uvicorn", "httpx2", "httpcore2", "asyncio")  # below warnings they tell nothing new


def set_up_logs(log_format: LogFormat, level: int = logging.INFO) -> None:
    """Send this process's log to stderr in that form. Replaces what was set up before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    handler.addFilter(_add_request_id)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("zipage").setLevel(level)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


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
