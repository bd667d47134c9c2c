"""The live page: one HTML file, and the numbers it draws as JSON.

Knows nothing of how pictures are taken or drawn.
"""

import base64
import hashlib
import re
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Query
from fastapi.responses import HTMLResponse

from zipage_lang.runtime.snapshot import CompactionView, NodeView, RequestView, Snapshot
from zipage_lang.server.json_response import JsonResponse
from zipage_lang.server.live.watcher import Moment, Watcher
from zipage_lang.server.openapi import MEANINGS, ErrorBody
from zipage_lang.server.service import Service
from zipage_lang.server.tenants import operator_only

PAGE = Path(__file__).with_name("dashboard.html")
FIELDS = {
    "request": RequestView.__struct_fields__,
    "node": NodeView.__struct_fields__,
    "compaction": CompactionView.__struct_fields__,
    "moment": Moment.__struct_fields__,
}


def install_dashboard(app: FastAPI, service: Service) -> None:
    """Adds the page and its data to the app, where the settings want it."""
    if not service.config.dashboard:
        return
    watcher = Watcher(service)
    page = PAGE.read_text(encoding="utf-8")
    page_headers = headers_of(page)
    server = uuid.uuid4().hex  # a page outlives it: counts of the next one begin anew

    @app.get("/dashboard", response_class=HTMLResponse, tags=["live page"])
    async def dashboard() -> HTMLResponse:
        """The live page. It holds no data: it asks for them, with an API key where one is set."""
        return HTMLResponse(page, headers=page_headers)

    @app.get(
        "/dashboard/data",
        tags=["live page"],
        responses={400: {"description": MEANINGS[400], "model": ErrorBody}},
    )
    async def dashboard_data(
        after: int = Query(0, ge=0, le=2**53, description="compactions seen: leave out up to here"),
        since: float = Query(0.0, ge=0, le=1e12, description="history seen, seconds since 1970"),
    ) -> JsonResponse:
        """What the page draws. Lengths and counts only: no token, no text, no request id.

        For the operator: they are everybody's.
        """
        operator_only(service.tenant)
        snapshot = await watcher.look()
        return JsonResponse(
            {
                "server": server,
                "state": service.state,
                "failure": _first_line(service.failure),
                "num_restarts": service.num_restarts,
                "now_s": time.time(),
                "interval_s": watcher.interval_s,
                "engine": _engine(service),
                "fields": FIELDS,
                "history": watcher.history(since),
                "snapshot": None if snapshot is None else _newer(snapshot, after),
            },
            headers={"cache-control": "no-store"},
        )


def headers_of(page: str) -> dict[str, str]:
    """What the browser may do on the page: run the script that stands in it, and no other, even
    where somebody finds a way to write one into it, and ask its own server."""
    script, style = (_digest(page, tag) for tag in ("script", "style"))
    return {
        "content-security-policy": f"default-src 'none'; script-src {script}; style-src {style}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'",
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
    }


def _digest(page: str, tag: str) -> str:
    """The page's one element of that kind, as a content security policy names it."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _newer(snapshot: Snapshot, after: int) -> Snapshot:
    compactions = [each for each in snapshot.compactions if each.number > after]
    return msgspec.structs.replace(snapshot, compactions=compactions)


def _engine(service: Service) -> dict[str, Any] | None:
    if service.state != "ready":
        return None
    ready = service.ready
    return {
        "model": service.model_name,
        "backend": ready.backend,
        "architecture": ready.architecture,
        "max_model_len": ready.max_model_len,
    }


def _first_line(text: str | None) -> str | None:
    return None if text is None else text.splitlines()[0][:300] if text else ""
