"""What the engine and the frontend raise, as the errors that clients are told.

Knows nothing of routes or of who is let in.
"""

import contextlib
import logging
from collections.abc import Iterator

from zipage_lang.frontend.errors import EngineClosedError, EngineDiedError, RequestError
from zipage_lang.server.api_error import TYPES, ApiError

START_RETRY_S = 5.0
BUSY_RETRY_S = 2.0
UNSPELT = "no token of this model spells what the grammar asks for next"  # the engine's words

log = logging.getLogger("zipage.server")


@contextlib.contextmanager
def engine_errors() -> Iterator[None]:
    """Around whatever asks the engine. Raises ApiError in place of its errors and ValueError."""
    try:
        yield
    except RequestError as error:
        raise _of_refusal(error) from error
    except (ValueError, OverflowError) as error:
        raise ApiError(400, str(error)) from error
    except EngineDiedError as error:
        log.warning("a request was lost, as the engine died")
        raise _died() from error
    except EngineClosedError as error:
        raise not_ready("draining") from error


def _of_refusal(error: RequestError) -> ApiError:
    """The engine's words for a state that passes are "try again later"."""
    if error.has_run:
        if error.reason.startswith(UNSPELT):
            return ApiError(400, error.reason, code="no_token_left")
        return ApiError(500, error.reason, type=TYPES[500])
    if error.reason.endswith("try again later"):
        return busy(error.reason)
    return ApiError(400, error.reason)


def busy(message: str) -> ApiError:
    """More is asked for than the server takes on."""
    return ApiError(
        503,
        message,
        type=TYPES[503],
        code="overloaded",
        retry_after=BUSY_RETRY_S,
    )


def too_many(num_there: int, most: int) -> ApiError:
    """A tenant asks for more than its share of what the server takes on."""
    return ApiError(
        429,
        f"{num_there} samples of this key run or wait already, and together they may be {most}; "
        "try again when some have ended",
        type=TYPES[429],
        code="too_many_samples",
        retry_after=BUSY_RETRY_S,
    )


def _died() -> ApiError:
    return ApiError(
        503,
        "the engine died while it worked on this request; it is started again: try again soon",
        type=TYPES[503],
        code="engine_died",
        retry_after=START_RETRY_S,
    )


def not_ready(state: str) -> ApiError:
    """The service is in a state other than ready."""
    what = {
        "starting": "the engine is starting; try again soon",
        "draining": "the server is shutting down; ask another one",
    }.get(state, "the engine does not run; the server's log says why")
    return ApiError(503, what, type=TYPES[503], code=state, retry_after=START_RETRY_S)
