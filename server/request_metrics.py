"""What requests ask for and how fast they are served: histograms and counts, fed as they go.

Knows nothing of the engine's inside.
"""

from prometheus_client import CollectorRegistry, Counter, Histogram

from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.server.request_record import RequestRecord

FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
)
TOKEN_S = (
    0.002,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2.5,
)
REQUEST_S = (0.1, 0.3, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 240, 480, 960, 1920)
TOKENS = tuple(2.0**power for power in range(3, 18))
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.999)


class RequestMetrics:
    """An observer of the service. Times are as the server sees them, queueing included."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"zipage:{name}", what, buckets=buckets, registry=registry)

        def counter(name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"zipage:{name}", what, labels, registry=registry)

        self._first_token = histogram(
            "time_to_first_token_seconds", "From the request to its first token.", FIRST_TOKEN_S
        )
        self._per_token = histogram(
            "time_per_output_token_seconds", "Mean per request, behind its first token.", TOKEN_S
        )
        self._between = histogram(
            "inter_token_latency_seconds", "Between two outputs of a streamed sample.", TOKEN_S
        )
        self._whole = histogram(
            "e2e_request_latency_seconds", "From the request to its end.", REQUEST_S
        )
        self._prompt_len = histogram("request_prompt_tokens", "Prompt tokens per request.", TOKENS)
        self._output_len = histogram(
            "request_generation_tokens", "Generated tokens per sample.", TOKENS
        )
        self._kept = histogram(
            "request_kv_kept_ratio", "Slots resident over tokens, as a sample ended.", SHARES
        )
        self._prompt = counter("prompt_tokens", "Prompt tokens asked for.")
        self._cached = counter("cached_tokens", "Prompt tokens that needed no computing.")
        self._ended = counter("request_success", "Requests that ended.", ("finished_reason",))
        self._failed = counter("request_errors", "Requests that ended with an error.")
        self._left = counter("requests_aborted_by_client", "Requests whose client left.")
        self._last_at: dict[RequestRecord, dict[int, float]] = {}

    def on_start(self, record: RequestRecord) -> None:
        self._prompt.inc(record.num_prompt_tokens)
        self._prompt_len.observe(record.num_prompt_tokens)

    def on_output(self, record: RequestRecord, output: RequestOutput) -> None:
        now = record.last_output_at
        if now is None:
            return
        last_at = self._last_at.setdefault(record, {})
        before = last_at.get(output.sample_index)
        if before is not None:
            self._between.observe(now - before)
        last_at[output.sample_index] = now

    def on_end(self, record: RequestRecord) -> None:
        self._last_at.pop(record, None)
        self._note_times(record)
        for output in record.outputs.values():
            self._output_len.observe(output.usage.completion_tokens)
            if output.kv.logical_len:
                self._kept.observe(output.kv.resident_len / output.kv.logical_len)
        first = record.outputs.get(0)
        if first is not None:
            self._cached.inc(first.usage.cached_tokens)
        if record.error is not None:
            self._failed.inc()
        elif record.finish == "abort":
            self._left.inc()
        elif record.finish is not None:
            self._ended.labels(finished_reason=record.finish).inc()

    def _note_times(self, record: RequestRecord) -> None:
        """An error's or a leaver's times say little of how fast the server is."""
        is_whole = record.error is None and record.finish in ("stop", "length")
        if record.first_token_at is None or record.ended_at is None:
            return
        self._first_token.observe(record.first_token_at - record.created)
        if not is_whole:
            return
        self._whole.observe(record.ended_at - record.created)
        longest = max((o.usage.completion_tokens for o in record.outputs.values()), default=0)
        if longest > 1 and record.last_output_at is not None:
            spent_s = record.last_output_at - record.first_token_at
            self._per_token.observe(spent_s / (longest - 1))
