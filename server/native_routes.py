"""Our own routes: generation as programs and SGLang's clients want it, states, the engine's cache.

Knows nothing of OpenAI's wire.
"""

import contextlib
import importlib.metadata
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.server.api_error import ApiError
from zipage_lang.server.bodies import Items
from zipage_lang.server.engine_errors import engine_errors
from zipage_lang.server.held_states import HeldStates
from zipage_lang.server.json_response import JsonResponse
from zipage_lang.server.native_wire import Delta, DeltaWriter, GenerateRequest, cumulative
from zipage_lang.server.openapi import EVENT_STREAM
from zipage_lang.server.service import Service
from zipage_lang.server.side_by_side import gathered, merged
from zipage_lang.server.sse import event_stream
from zipage_lang.server.tenants import operator_only

MAX_RELEASED = 2**16  # at once: the engine looks at each of them between two steps
ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One answer, or one for each prompt and sample; as events with `stream`.",
        "content": {
            "application/json": {"schema": {"type": ["object", "array"]}},
            **EVENT_STREAM,
        },
    }
}
OBJECT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}}, "description": "Done."}
}


class AbortRequest(BaseModel):
    """Which of the caller's requests end: one by its id, a group, or all.

    All means everybody's where the operator asks.
    """

    model_config = ConfigDict(strict=True)

    rid: str | None = None
    request_id: str | None = None
    group_id: str | None = None
    abort_all: bool = False


class ReleaseRequest(BaseModel):
    """Whose held states are let go."""

    model_config = ConfigDict(strict=True)

    request_ids: Items[str] = Field(max_length=MAX_RELEASED)


def make_router(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["native"])
    held = HeldStates(lambda request_ids: _release(service, request_ids))
    service.tables["held_leases"] = lambda: len(held)

    @router.post("/generate", responses=ANSWER)
    async def generate(request: Request, body: GenerateRequest) -> Response:
        """Generate from a text or from token ids."""
        generation = _Generation(service, held, body)
        if not body.stream:
            return JsonResponse(await generation.answer())
        if body.stream_format == "delta":
            return await event_stream(request, generation.deltas())
        return await event_stream(request, generation.snapshots())

    @router.post("/abort_request", responses=OBJECT)
    async def abort_request(body: AbortRequest) -> Response:
        """End requests; whoever reads them gets what there is, with finish reason "abort"."""
        service.abort({name for name in (body.rid, body.request_id, body.group_id) if name})
        if body.abort_all:
            service.abort_all()
        return JsonResponse({})

    @router.post("/release", responses=OBJECT)
    async def release(body: ReleaseRequest) -> Response:
        """Let go of held states."""
        held.forget(map(service.tenant.engine_id, body.request_ids))
        service.release(body.request_ids)
        return JsonResponse({})

    @router.post("/flush_cache", responses=OBJECT)
    async def flush_cache() -> Response:
        """Empty the prefix cache of all that no request uses; the engine's counters after it.

        For the operator.
        """
        operator_only(service.tenant)
        with engine_errors():
            return JsonResponse(await service.llm.flush_cache())

    @router.get("/get_model_info", responses=OBJECT)
    async def get_model_info() -> Response:
        """The model and its limits."""
        return JsonResponse(_model_info(service))

    @router.get("/server_info", responses=OBJECT)
    async def server_info() -> Response:
        """The engine's counters, the model and the server's settings, without its keys.

        For the operator.
        """
        operator_only(service.tenant)
        with engine_errors():
            stats = await service.llm.stats()
        return JsonResponse(
            {
                **stats,
                **_model_info(service),
                "version": importlib.metadata.version("zipage-lang"),
                "state": service.state,
                "num_restarts": service.num_restarts,
                **{f"table_{name}": size for name, size in service.table_sizes().items()},
                "server": service.config.told,
            }
        )

    return router


class _Generation:
    """One call of /generate: its prompts run side by side."""

    def __init__(self, service: Service, held: HeldStates, body: GenerateRequest) -> None:
        self._service, self._held, self._body = service, held, body
        self._tenant = service.tenant
        self._tenant.check_priority(body.priority)
        self._sampling = body.sampling()
        self._kv = body.kv_params()
        self._ids = body.ids()
        if body.is_batch:
            service.check_size(len(self._ids) * self._sampling.n)
        self._started = time.monotonic()
        self._ended: Counter[int] = Counter()  # samples that ran to their end, by prompt

    async def answer(self) -> Any:
        """All samples, prompt-major; a lone one stands for itself."""
        prompts = await self._encoded()
        with self._leased():
            results = await gathered(
                [
                    self._service.complete(ids, self._sampling, **self._options(place))
                    for place, ids in enumerate(prompts)
                ]
            )
            for place, outputs in enumerate(results):
                for output in outputs:
                    self._note_end(place, output)
        answers = [
            self._snapshot(output, place)
            for place, outputs in enumerate(results)
            for output in outputs
        ]
        is_lone = not self._body.is_batch and self._sampling.n == 1
        return answers[0] if is_lone else answers

    async def snapshots(self) -> AsyncGenerator[dict[str, Any], None]:
        """Samples as they stand, each time one has moved on."""
        streams = [
            self._service.generate(ids, self._sampling, **self._options(i))
            for i, ids in enumerate(await self._encoded())
        ]
        with self._leased():
            async with contextlib.aclosing(merged(streams)) as outputs:
                async for place, output in outputs:
                    self._note_end(place, output)
                    yield self._snapshot(output, place)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What is new of the one prompt's samples."""
        if self._body.is_batch:
            raise ApiError(400, 'stream_format="delta" takes one prompt', param="stream_format")
        (prompt,) = await self._encoded()
        writer = DeltaWriter(self._ids[0], has_thinking=self._sampling.think is not None)
        stream = self._service.generate(prompt, self._sampling, **self._options(0))
        with self._leased():
            async with contextlib.aclosing(stream) as outputs:
                async for output in outputs:
                    self._note_end(0, output)
                    yield writer.delta(output)

    async def _encoded(self) -> list[list[int]]:
        return [
            await self._service.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in self._body.prompts
        ]

    def _options(self, place: int) -> dict[str, Any]:
        body = self._body
        if body.parent_id is not None:
            self._held.renew(self._tenant.engine_id(body.parent_id))
        return {
            "request_id": self._ids[place],
            "kv": self._kv,
            "namespace": body.cache_salt,
            "priority": body.priority,
            "group_id": body.group_id or (body.rid or body.request_id or ""),
            "hold": body.hold,
            "parent_id": body.parent_id,
        }

    def _snapshot(self, output: RequestOutput, place: int) -> dict[str, Any]:
        index = place * self._sampling.n + output.sample_index
        seconds = time.monotonic() - self._started
        name = self._ids[place]
        return cumulative(output, name, index, self._body.logprob_start_len, seconds)

    def _note_end(self, place: int, output: RequestOutput) -> None:
        self._ended[place] += output.finish_reason not in (None, "abort")

    @contextlib.contextmanager
    def _leased(self) -> Iterator[None]:
        """What is held begins its lease at the end, even of who left right then; who left before
        the end has aborted, and nothing is held of that."""
        names = [self._tenant.engine_id(name) for name in self._ids] if self._body.hold else []
        new = self._held.expect(names)
        try:
            yield
        finally:
            num = self._sampling.n
            whole = {name for place, name in enumerate(names) if self._ended[place] == num}
            cut = [name for name in new if name not in whole]
            self._held.forget(cut)
            self._held.begin((*cut, *whole))


def _release(service: Service, request_ids: list[str]) -> None:
    """By the engine's own names."""
    with contextlib.suppress(ApiError), engine_errors():  # one that is gone holds nothing
        service.llm.release(request_ids)


def _model_info(service: Service) -> dict[str, Any]:
    ready = service.ready
    return {
        "model": service.model_name,
        "model_path": ready.model_path,
        "architecture": ready.architecture,
        "backend": ready.backend,
        "eos_token_ids": ready.eos_token_ids,
        "max_model_len": ready.max_model_len,
        "vocab_size": ready.vocab_size,
        "num_blocks": ready.num_blocks,
        "block_size": ready.block_size,
        "is_generation": True,
    }
