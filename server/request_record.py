"""What is known of one running request, and who may watch it: metrics, logs, traces.

Knows nothing of HTTP or of how tokens are made.
"""

import dataclasses
import time
from typing import Protocol

from zipage_lang.frontend.outputs import Progress, RequestOutput


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class RequestRecord:
    """One request of the engine from the moment it is let in. Times are time.monotonic() seconds.

    finish: "stop", "length" or "abort", of the sample that ended last; "abort" too where the client
    left. None with `error` set, or while it runs.
    """

    request_id: str  # the engine's
    tenant: str = ""  # whose it is; "" where there are no keys
    http_request_id: str = ""  # of the call that it serves, as in x-request-id
    route: str = ""  # path of that call, say "/v1/completions"; "" outside of one
    client: str = ""  # address of the caller, or ""
    num_prompt_tokens: int
    num_samples: int = 1
    created: float
    first_token_at: float | None = None
    last_output_at: float | None = None
    ended_at: float | None = None
    outputs: dict[int, RequestOutput] = dataclasses.field(default_factory=dict)  # by sample, latest
    finish: str | None = None
    error: str | None = None


class RecordClock(Progress):
    """Notes in a record when tokens came, where nothing is streamed."""

    __slots__ = ("_record",)

    def __init__(self, record: RequestRecord) -> None:
        super().__init__(record.num_samples)
        self._record = record

    def count(self, num_new_tokens: int, has_finished: bool) -> None:
        super().count(num_new_tokens, has_finished)
        if self._record.first_token_at is None and num_new_tokens:
            self._record.first_token_at = time.monotonic()


class Observer(Protocol):
    """Told of every request, in the event loop: must be quick and must not raise.

    `on_output` comes with each output of a stream (with each sample's last one alone where nothing
    is streamed), after the record was updated.
    """

    def on_start(self, record: RequestRecord) -> None: ...

    def on_output(self, record: RequestRecord, output: RequestOutput) -> None: ...

    def on_end(self, record: RequestRecord) -> None: ...
