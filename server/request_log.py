"""A log line for each request that ends, with what it took: the lines' `fields` are for machines.

Knows nothing of how log lines are written or where they go.
"""

import logging
from typing import Any

from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.server.request_record import RequestRecord
from zipage_lang.server.service import Service

log = logging.getLogger("zipage.requests")


def install_request_log(service: Service) -> None:
    """Adds the observer, where the settings want it."""
    if service.config.log_requests:
        service.observers.append(RequestLog())


class RequestLog:
    """An observer of the service."""

    def on_start(self, record: RequestRecord) -> None:
        return

    def on_output(self, record: RequestRecord, output: RequestOutput) -> None:
        return

    def on_end(self, record: RequestRecord) -> None:
        fields = request_fields(record)
        words = "%(finish)s after %(output_tokens)s tokens on %(prompt_tokens)s in %(seconds)s s"
        log.info(words % fields, extra={"fields": fields})


def request_fields(record: RequestRecord) -> dict[str, Any]:
    """What is known of a request at its end, over all its samples."""
    outputs = record.outputs.values()
    ended_at = record.created if record.ended_at is None else record.ended_at
    first_s = None if record.first_token_at is None else record.first_token_at - record.created
    return {
        "engine_request_id": record.request_id,
        "tenant": record.tenant,
        "route": record.route,
        "client": record.client,
        "finish": "error" if record.error is not None else record.finish,
        "error": record.error,
        "samples": record.num_samples,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": max((o.usage.cached_tokens for o in outputs), default=0),
        "output_tokens": sum(o.usage.completion_tokens for o in outputs),
        "thinking_tokens": sum(o.usage.thinking_tokens for o in outputs),
        "kv_resident": sum(o.kv.resident_len for o in outputs),
        "kv_logical": sum(o.kv.logical_len for o in outputs),
        "kv_dropped": sum(o.kv.dropped for o in outputs),
        "compactions": sum(o.kv.compactions for o in outputs),
        "first_token_seconds": None if first_s is None else round(first_s, 4),
        "seconds": round(ended_at - record.created, 4),
    }
