"""An EngineWorld over real tensors: the runner, cache, kernels, swaps and policies of the CPU.

Only the model is a stand-in (`hash_model`). What a draw has read is held against what the request's
own tokens and the recorded survivors of its compactions give, number for number.
Knows nothing of what is asked for, or when.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from test_support.engine_world import EngineSettings, EngineWorld, Key
from test_support.hash_model import SHAPE, HashModel, contents, expected_sums
from test_support.lone_run import EMPTY_HISTORY, extend_history, histories_of
from test_support.simulation import POLICY_QUERIES, WINDOW

from zipage_lang.kernels.backend import Forecast, choose_backend
from zipage_lang.radix_cache.block_table import BlockTable
from zipage_lang.runtime.compactor import Compactor
from zipage_lang.runtime.config import SchedulerConfig
from zipage_lang.runtime.host_swap import make_host_swap
from zipage_lang.runtime.intake import sample_seed
from zipage_lang.runtime.kv_cache import KVCache
from zipage_lang.runtime.kv_compressor import KVCompressor
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.model_runner import ModelRunner
from zipage_lang.runtime.models.registry import LoadedModel
from zipage_lang.runtime.out_of_memory import Retries
from zipage_lang.runtime.policies.gkv import GKV
from zipage_lang.runtime.policies.keydiff import KeyDiff
from zipage_lang.runtime.policies.page import Page
from zipage_lang.runtime.policies.policy import Calibration, Policy
from zipage_lang.runtime.policies.random import Random
from zipage_lang.runtime.policies.streaming import Streaming
from zipage_lang.runtime.policies.zipage import Zipage
from zipage_lang.runtime.policies.zipage2 import Zipage2
from zipage_lang.runtime.request import Request
from zipage_lang.runtime.row_tables import RowTables
from zipage_lang.runtime.sampler import Sampler
from zipage_lang.runtime.step_plan import Compaction, RowSetup, StepPlan, StepResult

Kept = dict[tuple[int, int], tuple[int, ...]]  # (layer, KV head) -> positions that survived
# The shipped policies, made as small as the worlds are.
POLICIES: dict[str, Policy] = {
    "zipage": Zipage(num_queries=4, num_recent=3),
    "gkv": GKV(num_queries=2, num_recent=2),
    "random": Random(num_recent=2),
    "streaming": Streaming(num_sinks=1),
    "page": Page(page_len=2, num_fresh=1),
    "keydiff": KeyDiff(num_recent=2),
    "zipage2": Zipage2(num_recent=2),
}
assert {name: policy.num_queries for name, policy in POLICIES.items()} == POLICY_QUERIES


def _calibration() -> Calibration:
    generator = torch.Generator().manual_seed(7)
    heads = (SHAPE.num_layers, SHAPE.num_kv_heads)
    return Calibration(
        forecast=Forecast(
            key=torch.randn(*heads, SHAPE.head_dim, generator=generator),
            value=torch.randn(*heads, SHAPE.head_dim, generator=generator),
            age=-torch.rand(*heads, generator=generator),
            frequencies=torch.rand(SHAPE.head_dim // 2, generator=generator),
        )
    )


class TensorRunner:
    """A ModelRunner over a HashModel, which it tells the history of every token."""

    def __init__(self, settings: EngineSettings) -> None:
        backend = choose_backend("cpu")
        self.cache = KVCache(
            SHAPE,
            num_blocks=settings.num_blocks + 1,
            block_size=settings.block_size,
            num_query_slots=settings.num_query_slots,
            window=WINDOW,
            device=backend.device,
        )
        self.model = HashModel(backend, settings.vocab_size)
        self._settings, self._backend = settings, backend
        self._runner = self._make_runner(settings)
        self._tokens: dict[int, list[int]] = {}  # by row, all that are known or drawn
        self._histories: dict[int, list[int]] = {}

    def _make_runner(self, settings: EngineSettings) -> ModelRunner:
        backend, cache, retries = self._backend, self.cache, Retries()
        max_rows = settings.scheduler.max_running
        calibration = _calibration()
        compressor = KVCompressor(
            cache, backend, POLICIES, calibration_of=lambda _: calibration, retries=retries
        )
        max_blocks = -(-settings.max_model_len // settings.block_size) + 1
        return ModelRunner(
            cast(LoadedModel, _Loaded(self.model)),
            cache,
            backend,
            compactor=Compactor(compressor, backend.device),
            sampler=self.make_sampler(max_rows),
            tables=RowTables(max_rows, max_blocks),
            host_swap=make_host_swap(cache, settings.num_host_blocks, backend),
            graphs=None,
            retries=retries,
        )

    def make_sampler(self, max_rows: int) -> Sampler:
        return Sampler(
            max_rows=max_rows,
            vocab_size=self._settings.vocab_size,
            eos_token_ids=self._settings.eos_token_ids,
            backend=self._backend,
            device=self._backend.device,
        )

    def run(self, plan: StepPlan) -> StepResult:
        for setup in plan.row_setups:
            self._tokens[setup.row] = list(setup.token_ids)
            self._histories[setup.row] = histories_of(setup.token_ids)
        self.model.histories_before = [
            self._history_before(chunk.row, position)
            for chunk in plan.chunks
            for position in range(chunk.position, chunk.position + chunk.num_tokens)
        ]
        result = self._runner.run(plan)
        for sample in result.samples:
            assert sample.error is None, sample.error
            tokens, histories = self._tokens[sample.row], self._histories[sample.row]
            tokens.append(sample.token_id)
            histories.append(extend_history(histories[-1], sample.token_id))
        return result

    def finish_compactions(self, idents: Iterable[int]) -> None:
        """On the CPU they were carried out in their step."""

    def _history_before(self, row: int, position: int) -> int:
        return self._histories[row][position - 1] if position else EMPTY_HISTORY

    def kept(self, block_ids: Sequence[int], begin: int, end: int) -> Kept:
        """The positions that the resident slots [begin, end) say they stand for."""
        slots = torch.arange(begin, end)
        size = self.cache.block_size
        blocks = torch.tensor(block_ids)[slots // size]  # [num_slots]
        positions = self.cache.position[:, blocks, slots % size]  # [num_layers, num_slots, heads]
        return {
            (layer, head): tuple(sorted(positions[layer, :, head].tolist()))
            for layer in range(SHAPE.num_layers)
            for head in range(SHAPE.num_kv_heads)
        }


@dataclasses.dataclass(frozen=True)
class _Loaded:
    """All that a runner asks of a LoadedModel."""

    model: HashModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSettings(EngineSettings):
    def make_runner(self) -> Any:
        return TensorRunner(self)


class TensorWorld(EngineWorld):
    """The laws of an EngineWorld; draws are checked against sums over slots."""

    runner: Any  # a TensorRunner

    def __init__(self, settings: EngineSettings) -> None:
        fields = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
        super().__init__(TensorSettings(**fields))
        self._read: dict[Key, list[np.ndarray]] = collections.defaultdict(list)  # one per draw
        # what compactions kept, by namespace, signature and the tokens there were
        self._survivors: dict[tuple[Any, ...], list[Kept]] = collections.defaultdict(list)

    # laws

    def _check_draws(self, plan: StepPlan, result: StepResult) -> None:
        builder = self.scheduler._in_flight[plan.step]
        for planned in builder.compactions:
            self._record(planned.request, planned.compaction)
        drawn = {sample.row: sample.token_id for sample in result.samples}
        planned_of = {planned.chunk.row: planned for planned in builder.chunks}
        end = 0
        for chunk in plan.chunks:
            end += chunk.num_tokens
            got = self.runner.model.hidden[end - 1].numpy() if chunk.sample_rows else None
            for request, row in zip(
                planned_of[chunk.row].sampling_requests, chunk.sample_rows, strict=True
            ):
                self._check_read(request, got, drawn[row])

    def _check_read(self, request: Request, got: np.ndarray, token_id: int) -> None:
        key = (request.request_id, request.sample_index)
        tokens = self._tokens.setdefault(key, list(request.token_ids))
        num_known = len(request.token_ids) + request.num_pending - 1
        assert len(tokens) == num_known, f"{key}: {len(tokens)} tokens are drawn, {num_known} known"
        held = contents(histories_of(tokens), range(num_known))
        wanted = expected_sums(held, self._resident(request, tokens))
        wrong = np.flatnonzero(got != wanted)
        assert not len(wrong), f"{key}: sums {wrong} are {got[wrong]}, alone {wanted[wrong]}"
        self._read[key].append(wanted)
        tokens.append(token_id)

    def _resident(self, request: Request, tokens: list[int]) -> dict[tuple[int, int], list[int]]:
        """Positions that the request's next token may be drawn from, by layer and head."""
        table = request.table
        assert table is not None
        heads = [(la, he) for la in range(SHAPE.num_layers) for he in range(SHAPE.num_kv_heads)]
        if not table.is_compacted:
            self.situations.count("drew from a plain state")
            return {head: list(range(len(tokens))) for head in heads}
        self.situations.count("drew from a compacted state")
        protected_len, since = request.kv.protected_len, _compacted_at(table)
        kept = self.runner.kept(table.block_ids, protected_len, table.compacted_len)
        known = self._survivors[self._state_key(request, tokens[:since])]
        assert kept in known, f"{request.request_id}: {kept} survived, recorded is {known}"
        newest = range(since, len(tokens))
        return {head: [*range(protected_len), *kept[head], *newest] for head in heads}

    def _record(self, request: Request, act: Compaction) -> None:
        """A compaction has run: what it kept, it had; and it kept as many as it should."""
        key = (request.request_id, request.sample_index)
        tokens = self._tokens.get(key, request.token_ids)
        end = act.protected_len + act.num_keep
        kept = self.runner.kept(act.block_ids, act.protected_len, end)
        since, earlier = act.protected_len, [dict.fromkeys(kept, ())]
        if act.stateful_len:
            assert request.table is not None
            since = _compacted_at(request.table)
            earlier = self._survivors[self._state_key(request, tokens[:since])]
        newest = set(range(since, act.logical_len))
        assert any(_could_keep(kept, before, newest) for before in earlier), f"{key}: kept {kept}"
        assert all(len(set(positions)) == act.num_keep for positions in kept.values()), f"{kept}"
        known = self._survivors[self._state_key(request, tokens[: act.logical_len])]
        if kept not in known:
            known.append(kept)

    def _state_key(self, request: Request, tokens: Sequence[int]) -> tuple[Any, ...]:
        return (request.namespace, request.signature, tuple(tokens))

    def check_outputs(self) -> None:
        """What was told is what was drawn, and a sampler of its own draws the same from what was
        read; one of those that can't be compacted is also played alone."""
        for key, transcript in self.transcripts.items():
            request, told = transcript.request, transcript.token_ids
            drawn = self._tokens.get(key, request.token_ids)[len(request.token_ids) :]
            assert told == drawn[: len(told)], f"{key}: told {told}, drawn {drawn}"
            assert drawn == self._drawn_alone(key, request), f"{key}: drawn {drawn}"
        exact = [
            key
            for key, transcript in self.transcripts.items()
            if self.is_exact(transcript.request) and len(transcript.token_ids) > 2
        ]
        if exact and self.world.scheduler != SchedulerConfig():
            self._play_alone(exact[0])

    def _drawn_alone(self, key: Key, request: AddRequest) -> list[int]:
        if not self._read[key]:
            return []
        sampler, num_tokens = self.runner.make_sampler(1), len(request.token_ids)
        seed = sample_seed(request.sampling.seed or 0, key[1])
        setup = RowSetup(0, tuple(request.token_ids), num_tokens, request.sampling, seed)
        sampler.set_up_row(setup)
        read = torch.from_numpy(np.stack(self._read[key]))  # [num_draws, num_sums]
        lines = self.runner.model.logits(read).split(1)  # each [1, vocab_size]
        return [int(sampler.draw(line, [0]).token_ids) for line in lines]

    def _play_alone(self, key: Key) -> None:
        """The request in a roomy engine of its own says the same."""
        roomy = dataclasses.replace(
            self.world, num_blocks=400, num_query_slots=8, num_ahead=0, scheduler=SchedulerConfig()
        )
        alone = TensorWorld(roomy)
        transcript = self.transcripts[key]
        alone.send(transcript.request)
        alone.drain()
        told = alone.transcripts[key].token_ids
        crowded = transcript.token_ids
        assert told[: len(crowded)] == crowded, f"{key}: {crowded}, alone it says {told}"


def _compacted_at(table: BlockTable) -> int:
    """Tokens there were when the state was last compacted, by whoever did it."""
    return table.logical_len - (table.resident_len - table.compacted_len)


def _could_keep(kept: Kept, before: Kept, newest: set[int]) -> bool:
    return all(set(kept[head]) <= newest.union(before[head]) for head in kept)
