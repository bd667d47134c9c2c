"""The one door from the routes to the engine: who is let in, what errors become, who is told.

Knows nothing of HTTP's bytes or of any wire format.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from zipage_lang.frontend.async_llm import AsyncLLM
from zipage_lang.frontend.errors import ZipageError
from zipage_lang.frontend.input_checks import check_text_len
from zipage_lang.frontend.outputs import FINISH_ABORT, RequestOutput
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import Ready
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.server.api_error import ApiError
from zipage_lang.server.config import ServerConfig
from zipage_lang.server.engine_errors import busy, engine_errors, not_ready, too_many
from zipage_lang.server.keys import read_keys
from zipage_lang.server.request_record import Observer, RecordClock, RequestRecord
from zipage_lang.server.request_scope import current_scope
from zipage_lang.server.supervisor import LLMFactory, Supervisor
from zipage_lang.server.tenants import Tenant, Tenants, current_tenant

ABORT_GRACE_S = 5.0  # for aborted requests to tell their clients so
LONG_TEXT = 20_000  # characters or tokens; longer texts are worked on in a thread

T = TypeVar("T")

log = logging.getLogger("zipage.server")


async def beside_streams(size: int, work: Callable[..., T], *arguments: Any) -> T:
    """`work(*arguments)`, on so many characters or tokens: streams go on beside it if it is long,
    and else behind it, however many pieces of work a call consists of."""
    if size >= LONG_TEXT:
        return await asyncio.to_thread(work, *arguments)
    done = work(*arguments)
    await asyncio.sleep(0)
    return done


class Service:
    """The engine as the routes see it. One per app; belongs to the event loop that starts it.

    Whatever a caller names (requests, groups, parents) are the names of the tenant whose call is
    being served; the engine knows them under the tenant's prefix.
    `num_rows`: samples the engine runs at once (SchedulerConfig.max_running).
    Raises ValueError for files of keys that can't be read.
    """

    def __init__(
        self, config: ServerConfig, llm_factory: LLMFactory, *, num_rows: int = 64
    ) -> None:
        self.config = config
        self.tenants = Tenants(read_keys(config), share_prefixes=config.share_prefixes)
        self.observers: list[Observer] = []
        self._supervisor = Supervisor(llm_factory)
        self._max_samples = num_rows + config.max_waiting
        self._max_of_tenant = config.max_samples_per_key
        if self._max_of_tenant is None and self.tenants.num_tenants > 1:
            self._max_of_tenant = max(1, self._max_samples // 2)
        self._num_of_tenant: Counter[str] = Counter()
        self._num_samples = 0
        self._records: set[RequestRecord] = set()
        # Sizes of tables that grow with requests and must shrink again; routes add theirs.
        self.tables: dict[str, Callable[[], int]] = {
            "records": lambda: len(self._records),
            "busy_tenants": lambda: len(self._num_of_tenant),
        }
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._draining: asyncio.Task[None] | None = None

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Wait until the engine takes requests. May be called again.

        Raises ValueError or EngineStartError where it does not come up.
        """
        await self._supervisor.start()

    async def drain(self) -> None:
        """Let nobody in, give those who run `drain_timeout`, abort the rest, end the engine.

        May be called again; all wait for the same end.
        """
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(), name="zipage-drain")
        await asyncio.shield(self._draining)

    @property
    def state(self) -> str:
        """starting, ready, draining or dead."""
        return self._supervisor.state if self._draining is None else "draining"

    @property
    def is_answering(self) -> bool:
        """Ready, and the engine gave a sign of life not long ago."""
        llm = self._supervisor.llm
        longest = self.config.engine_timeout / 4
        return self.state == "ready" and llm is not None and llm.silent_s < longest

    @property
    def failure(self) -> str | None:
        """Why the engine last died or did not start."""
        return self._supervisor.failure

    @property
    def num_restarts(self) -> int:
        """How often a new engine took the place of one that died."""
        return self._supervisor.num_restarts

    @property
    def records(self) -> frozenset[RequestRecord]:
        """The requests that run or wait now."""
        return frozenset(self._records)

    def table_sizes(self) -> dict[str, int]:
        """Entries of the server's tables by name, its link to the engine included."""
        llm = self._supervisor.llm
        sizes = {name: size() for name, size in self.tables.items()}
        return sizes if llm is None else {**sizes, **llm.table_sizes}

    # -- the engine ------------------------------------------------------------------------------

    @property
    def llm(self) -> AsyncLLM:
        """Raises ApiError 503 unless the service is ready."""
        llm, state = self._supervisor.llm, self.state
        if state != "ready" or llm is None:
            raise not_ready(state)
        return llm

    @property
    def ready(self) -> Ready:
        """What the engine said of itself. Raises as `llm`."""
        return self.llm.ready

    @property
    def model_name(self) -> str:
        """The model as clients know it. Raises as `llm` where only the engine knows."""
        return self.config.served_model_name or self.ready.model

    @property
    def tenant(self) -> Tenant:
        """Whose call is being served."""
        tenant = current_tenant() or self.tenants.anybody
        assert tenant is not None, "keys are needed, but no tenant was found for this call"
        return tenant

    def abort(self, names: Iterable[str]) -> None:
        """End the caller's requests and groups of these names. Raises as `llm`."""
        ids = [self.tenant.engine_id(name) for name in names]
        with engine_errors():
            self.llm.abort(ids, ids)

    def abort_all(self) -> None:
        """End all requests: the caller's own, or everybody's for the operator. Raises as `llm`."""
        tenant = self.tenant
        ids = [
            record.request_id
            for record in self._records
            if tenant.is_operator or record.tenant == tenant.name
        ]
        with engine_errors():
            self.llm.abort(ids)

    def release(self, names: Iterable[str]) -> None:
        """Let go of the caller's held states of these names. Raises as `llm`."""
        with engine_errors():
            self.llm.release([self.tenant.engine_id(name) for name in names])

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; a long one does not hold up the streams meanwhile.

        Raises ApiError 400 for what is no text, or too long a one to fit into the context.
        """
        tokenizer, max_len = self.llm.tokenizer, self.llm.ready.max_model_len
        with engine_errors():
            if len(text) >= LONG_TEXT:
                check_text_len(text, tokenizer.longest_token_len, max_len)
            return await beside_streams(len(text), tokenizer.encode, text, add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids; many do not hold up the streams meanwhile."""
        decode = self.llm.tokenizer.decode
        return await beside_streams(len(token_ids), decode, token_ids, skip_special_tokens)

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        kv: KVParams | None = None,
        namespace: str = "",
        priority: int = 0,
        group_id: str = "",
        hold: bool = False,
        parent_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream a request as AsyncLLM.generate does; all errors are ApiErrors, when iterated.

        Closing the iterator early aborts the request. Outputs have the engine's name of it.
        """
        tenant = self.tenant
        llm = self._admit(token_ids, sampling, tenant)
        name = tenant.engine_id(request_id)
        with self._recorded(name, len(token_ids), sampling.n, tenant) as record, engine_errors():
            outputs = llm.generate(
                list(token_ids),
                sampling,
                kv=kv,
                priority=priority,
                hold=hold,
                request_id=name,
                **tenant.engine_fields(namespace=namespace, group_id=group_id, parent_id=parent_id),
            )
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    self._note(record, output)
                    yield output

    async def complete(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        kv: KVParams | None = None,
        namespace: str = "",
        priority: int = 0,
        group_id: str = "",
        hold: bool = False,
        parent_id: str | None = None,
    ) -> list[RequestOutput]:
        """The final outputs of a request, by sample. Errors as `generate`; cancelling aborts it."""
        tenant = self.tenant
        llm = self._admit(token_ids, sampling, tenant)
        name = tenant.engine_id(request_id)
        with self._recorded(name, len(token_ids), sampling.n, tenant) as record, engine_errors():
            outputs = await llm.complete(
                list(token_ids),
                sampling,
                progress=RecordClock(record),
                kv=kv,
                priority=priority,
                hold=hold,
                request_id=name,
                **tenant.engine_fields(namespace=namespace, group_id=group_id, parent_id=parent_id),
            )
            for output in outputs:
                self._note(record, output)
            return outputs

    # -- one request -----------------------------------------------------------------------------

    def _admit(
        self, token_ids: Sequence[int], sampling: SamplingParams, tenant: Tenant
    ) -> AsyncLLM:
        llm = self.llm
        max_len = llm.ready.max_model_len
        if len(token_ids) >= max_len:
            raise ApiError(
                400,
                f"the prompt has {len(token_ids)} tokens, but prompt and output together may have "
                f"{max_len}; shorten the prompt",
                code="context_length_exceeded",
            )
        self._check_share(tenant, sampling.n)
        if self._num_samples >= self._max_samples:
            raise busy(f"{self._num_samples} samples run or wait already; try again later")
        return llm

    def check_size(self, num_samples: int) -> None:
        """Raise ApiError 400 for a call of more samples than its tenant may ever have at once."""
        most = self._max_of_tenant or self._max_samples
        if num_samples > most:
            raise ApiError(
                400,
                f"the call asks for {num_samples} samples at once, and this server takes {most}; "
                "split it",
                code="too_many_samples",
            )

    def _check_share(self, tenant: Tenant, num_samples: int) -> None:
        """A tenant that fills its share waits for its own requests, not others for it."""
        num_there, most = self._num_of_tenant[tenant.name], self._max_of_tenant
        if most is not None and num_there and num_there + num_samples > most:
            raise too_many(num_there, most)

    @contextlib.contextmanager
    def _recorded(
        self, request_id: str, num_prompt_tokens: int, num_samples: int, tenant: Tenant
    ) -> Iterator[RequestRecord]:
        record = _new_record(request_id, num_prompt_tokens, num_samples, tenant)
        self._enter(record)
        try:
            yield record
        except ApiError as error:
            record.error = error.message = tenant.own_words(error.message)
            raise
        except (GeneratorExit, asyncio.CancelledError):  # the reader left
            record.finish = FINISH_ABORT
            raise
        except Exception as error:
            record.error = repr(error)
            raise
        finally:
            self._leave(record)

    def _enter(self, record: RequestRecord) -> None:
        self._records.add(record)
        self._all_ended.clear()
        self._num_samples += record.num_samples
        self._num_of_tenant[record.tenant] += record.num_samples
        for observer in self.observers:
            observer.on_start(record)

    def _leave(self, record: RequestRecord) -> None:
        record.ended_at = time.monotonic()
        self._num_samples -= record.num_samples
        self._num_of_tenant[record.tenant] -= record.num_samples
        self._records.discard(record)
        if not self._records:
            self._all_ended.set()
        for observer in self.observers:
            observer.on_end(record)

    def _note(self, record: RequestRecord, output: RequestOutput) -> None:
        record.outputs[output.sample_index] = output
        now = time.monotonic()
        if record.first_token_at is None and output.token_ids:
            record.first_token_at = now
        record.last_output_at = now
        if output.finish_reason is not None:
            record.finish = output.finish_reason
        for observer in self.observers:
            observer.on_output(record, output)

    async def _drain(self) -> None:
        llm = self._supervisor.llm
        log.info("draining: %d requests run", len(self._records))
        if not await self._wait_for_end(self.config.drain_timeout) and llm is not None:
            log.warning("%d requests did not finish in time and are aborted", len(self._records))
            with contextlib.suppress(ZipageError):  # an engine that is gone needs no telling
                llm.abort([record.request_id for record in self._records])
            await self._wait_for_end(ABORT_GRACE_S)
        await self._supervisor.close()

    async def _wait_for_end(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._all_ended.wait(), seconds)
        except TimeoutError:
            return False
        return True


def _new_record(
    request_id: str, num_prompt_tokens: int, num_samples: int, tenant: Tenant
) -> RequestRecord:
    scope = current_scope()
    return RequestRecord(
        request_id=request_id,
        tenant=tenant.name,
        http_request_id=scope.request_id if scope else "",
        route=scope.route if scope else "",
        client=scope.client if scope else "",
        num_prompt_tokens=num_prompt_tokens,
        num_samples=num_samples,
        created=time.monotonic(),
    )
