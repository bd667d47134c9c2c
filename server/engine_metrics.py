"""The engine's counts as Prometheus families: one table of names, read anew at each scrape.

Knows nothing of HTTP or of how the engine counts.
"""

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from zipage_lang.runtime.messages import Ready
from zipage_lang.runtime.snapshot import Snapshot

# Indexes are radix_cache.census.Owner, which this room does not import.
OWNERS = ("free", "prefix", "cached", "tail", "compacted", "cached_compacted", "held")

GAUGES = {
    "num_requests_running": ("num_running", "Samples that hold a row."),
    "num_requests_waiting": ("num_waiting", "Requests in the queue."),
    "num_requests_held": ("num_held_requests", "States kept for a later fork."),
    "num_free_host_blocks": ("num_free_host_blocks", "Blocks left for swapped requests."),
    "num_free_query_slots": ("num_free_query_slots", "Query rings that nobody has."),
    "radix_plain_nodes": ("num_plain_nodes", "Runs of tokens in the radix tree."),
    "radix_compacted_nodes": ("num_atomic_nodes", "Compacted states in the radix tree."),
}
COUNTERS = {
    "generation_tokens": ("num_decoded_tokens", "Tokens generated."),
    "prefill_tokens": ("num_prefilled_tokens", "Prompt tokens computed."),
    "recomputed_tokens": ("num_recomputed_tokens", "Tokens computed again after a preemption."),
    "engine_steps": ("num_steps", "Steps of the engine."),
    "prefix_cache_queries": ("num_tokens_asked", "Prompt tokens looked up in the radix tree."),
    "prefix_cache_hits": ("num_tokens_hit", "Of them found there."),
    "prefix_cache_evicted_nodes": ("num_evicted_nodes", "Nodes that gave their blocks up."),
    "copied_blocks": ("num_copied_blocks", "Shared blocks copied before they were written to."),
    "compactions": ("num_compactions", "Compactions done."),
    "early_compactions": ("num_early_compactions", "Of them before a tail was full."),
    "kv_dropped_slots": ("num_dropped_slots", "Slots that compactions dropped."),
    "compaction_seconds": ("compaction_s", "Time spent on compactions."),
    "num_preemptions": ("num_preemptions", "Running requests put back into the queue."),
    "swap_outs": ("num_swap_outs", "Requests moved to host memory."),
    "swap_ins": ("num_swap_ins", "Requests brought back from there."),
    "requests_finished": ("num_finished", "Samples that ended by themselves."),
    "requests_aborted": ("num_aborted", "Samples aborted."),
    "requests_refused": ("num_refused", "Requests the engine did not take."),
    "requests_failed": ("num_failed", "Samples that ended with an error."),
    "out_of_memory": ("num_out_of_memory", "Times that memory was refused in a step."),
    "device_busy_seconds": ("device_busy_s", "Time the card computed."),
    "device_idle_seconds": ("device_idle_s", "Time it waited between steps."),
}
PHASES = {
    "schedule": "scheduling_s",
    "run": "launching_s",
    "wait": "waiting_s",
    "apply": "applying_s",
}
QUEUE_BUCKET = "queue_s_le_"
TABLE = "table_"


class EngineMetrics(Collector):
    """Whatever was last taken. `clear` it while no engine answers: old numbers would be lies."""

    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None
        self._ready: Ready | None = None
        self._num_restarts = 0

    def take(self, snapshot: Snapshot, ready: Ready, num_restarts: int) -> None:
        self._snapshot, self._ready, self._num_restarts = snapshot, ready, num_restarts

    def clear(self, num_restarts: int) -> None:
        self._snapshot = self._ready = None
        self._num_restarts = num_restarts

    def collect(self) -> Iterator[Metric]:
        is_up = self._snapshot is not None
        yield _gauge("engine_up", "1 while an engine answers.", int(is_up))
        yield _counter("engine_restarts", "Engines started anew.", self._num_restarts)
        if self._snapshot is None or self._ready is None:
            return
        stats = {
            name: float(v) for name, v in self._snapshot.stats.items() if not isinstance(v, str)
        }
        yield _info(self._ready)
        for name, (key, what) in GAUGES.items():
            yield _gauge(name, what, stats[key])
        for name, (key, what) in COUNTERS.items():
            yield _counter(name, what, stats.get(key, 0.0))
        yield _phases(stats)
        yield _queue_times(stats)
        yield _tables(stats)
        yield from _memory(self._snapshot, stats)


def _memory(snapshot: Snapshot, stats: dict[str, float]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "zipage:kv_blocks", "Blocks of the pool, by whom they serve.", labels=("owner",)
    )
    for owner, count in zip(OWNERS, snapshot.grid.num_by_owner, strict=True):
        blocks.add_metric((owner,), count)
    yield blocks
    yield _gauge("kv_block_size", "Slots in a block.", snapshot.grid.block_size)
    held = stats["num_held"] / stats["num_blocks"]
    yield _gauge("token_usage", "Share of the pool that requests hold.", held)
    asked = stats["num_tokens_asked"]
    hit_rate = stats["num_tokens_hit"] / asked if asked else 0.0
    yield _gauge("cache_hit_rate", "Found over looked-up tokens, since the start.", hit_rate)
    yield _gauge("kv_logical_tokens", "Tokens of all requests so far.", snapshot.logical_len)
    yield _gauge("kv_resident_slots", "Slots kept for them.", snapshot.resident_len)


def _tables(stats: dict[str, float]) -> Metric:
    sizes = GaugeMetricFamily(
        "zipage:table_entries",
        "Entries of the engine's tables; none grows for ever.",
        labels=("table",),
    )
    for name, size in stats.items():
        if name.startswith(TABLE):
            sizes.add_metric((name.removeprefix(TABLE),), size)
    return sizes


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"zipage:{name}", what, value=value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"zipage:{name}", what, value=value)


def _info(ready: Ready) -> Metric:
    info = GaugeMetricFamily(
        "zipage:engine_info",
        "What runs; always 1.",
        labels=("model_name", "architecture", "backend"),
    )
    info.add_metric((ready.model, ready.architecture, ready.backend), 1)
    return info


def _phases(stats: dict[str, float]) -> Metric:
    seconds = CounterMetricFamily(
        "zipage:engine_seconds", "Host time of the engine's loop.", labels=("phase",)
    )
    for phase, key in PHASES.items():
        seconds.add_metric((phase,), stats[key])
    return seconds


def _queue_times(stats: dict[str, float]) -> Metric:
    buckets = [
        (name.removeprefix(QUEUE_BUCKET), count)
        for name, count in stats.items()
        if name.startswith(QUEUE_BUCKET)
    ]
    return HistogramMetricFamily(
        "zipage:request_queue_time_seconds",
        "From a sample's arrival in the engine to its first place in a step.",
        buckets=[*buckets, ("+Inf", stats["queue_s_count"])],
        sum_value=stats["queue_s_sum"],
    )
