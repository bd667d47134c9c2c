"""What a starting engine is at: lines of one logger, which the engine's process sends its client.

Whoever does something long at a start says so with `logging.getLogger(LOGGER).info(stage,
extra={"count": (done, total)})`, the count where there is one. Nobody listens elsewhere.
Knows nothing of sockets or of what takes long.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator

from zipage_lang.runtime.messages import Starting

LOGGER = "zipage.start"


class ProgressSender(logging.Handler):
    """Sends each line as a `Starting`. Lines may come from any thread, one at a time."""

    def __init__(self, send: Callable[[Starting], None]) -> None:
        super().__init__(logging.INFO)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        done, total = getattr(record, "count", (0, 0))
        self._send(Starting(stage=record.getMessage(), done=done, total=total))


@contextlib.contextmanager
def told_progress(send: Callable[[Starting], None]) -> Iterator[None]:
    """Send what is said of progress in the `with` block, besides logging it as usual."""
    logger, sender = logging.getLogger(LOGGER), ProgressSender(send)
    logger.propagate = logging.getLogger().isEnabledFor(logging.INFO)
    logger.setLevel(logging.INFO)
    logger.addHandler(sender)
    try:
        yield
    finally:
        logger.removeHandler(sender)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
