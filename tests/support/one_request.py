"""One request on a small paged cache: it grows by random tokens, is compacted, is read back.

Its true tokens are kept beside the cache in float64, per layer and KV head, in slot order.
Knows nothing of policies' scores.
"""

import dataclasses
import math
import random

import numpy as np
import torch

from zipage_lang.kernels.backend import Backend, Forecast, choose_backend
from zipage_lang.runtime.kv_cache import KVCache, KVShape
from zipage_lang.runtime.kv_compressor import KVCompressor
from zipage_lang.runtime.policies.policy import NOTHING_KNOWN, Calibration, Policy, QueryStats
from zipage_lang.runtime.step_plan import Compaction

NUM_LAYERS, NUM_KV_HEADS, GROUP, HEAD_DIM = 3, 2, 2, 8
WINDOW, BLOCK_SIZE, NUM_BLOCKS = 16, 4, 80


@dataclasses.dataclass
class Token:
    """One slot of one head."""

    position: int
    key: np.ndarray  # float64 [head_dim]
    value: np.ndarray  # float64 [head_dim]
    history: float | None = None  # None: never compacted


@dataclasses.dataclass
class Query:
    """One position's queries of the group that shares a KV head."""

    position: int
    vectors: list[np.ndarray]
    lse: list[float]  # base 2


@dataclasses.dataclass
class LayerTail:
    """What a policy sees of one layer: by KV head, tokens in slot order and queries by age."""

    layer: int
    tails: list[list[Token]]
    queries: list[list[Query]]
    num_keep: int
    logical_len: int
    is_first: bool
    seed: int


class OneRequest:
    """A request whose blocks are handed out once; compactions happen in place."""

    def __init__(
        self,
        seed: int,
        protected_len: int,
        dtype: torch.dtype = torch.float32,
        backend: Backend | None = None,
    ) -> None:
        """backend: where the cache is and compactions run; None: on the CPU."""
        self.backend = backend or choose_backend("cpu")
        self._rng, self._numpy = random.Random(seed), np.random.default_rng(seed)
        shape = KVShape(
            num_layers=NUM_LAYERS,
            num_q_heads=NUM_KV_HEADS * GROUP,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=dtype,
        )
        self.cache = KVCache(
            shape,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_query_slots=1,
            window=WINDOW,
            device=self.backend.device,
        )
        for pool in (self.cache.kv, self.cache.score, self.cache.queries, self.cache.query_lse):
            pool.fill_(math.nan)  # what is not written must not matter
        self.seed = seed * 2**33 + 5
        self.protected_len = protected_len
        self.blocks = self._rng.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)
        self.heads = [(la, he) for la in range(NUM_LAYERS) for he in range(NUM_KV_HEADS)]
        self.tails: dict[tuple[int, int], list[Token]] = {head: [] for head in self.heads}
        self.queries: dict[tuple[int, int], list[Query]] = {head: [] for head in self.heads}
        self.logical_len = self.stateful_len = 0
        self._protected: dict[tuple[int, int], list[Token]] = {head: [] for head in self.heads}
        self._grow(self._protected, protected_len)

    @property
    def tail_len(self) -> int:
        return len(self.tails[0, 0])

    @property
    def scale(self) -> float:
        return HEAD_DIM**-0.5

    def grow(self, num_new: int) -> None:
        """New tail tokens, and the queries of the newest positions."""
        self._grow(self.tails, num_new)
        newest = range(max(0, self.logical_len - WINDOW), self.logical_len)
        for layer, head in self.heads:
            readable = self._protected[layer, head] + self.tails[layer, head]
            found = [self._query(at, readable) for at in newest]
            self.queries[layer, head] = found
            lines = slice(head * GROUP, (head + 1) * GROUP)
            for query in found:
                entry = query.position % WINDOW
                vectors = torch.from_numpy(np.stack(query.vectors))
                self.cache.queries[layer, entry, lines] = vectors.to(self.cache.queries.dtype)
                self.cache.query_lse[layer, entry, lines] = torch.tensor(query.lse)

    def layer(self, layer: int, num_keep: int) -> LayerTail:
        heads = range(NUM_KV_HEADS)
        return LayerTail(
            layer=layer,
            tails=[self.tails[layer, head] for head in heads],
            queries=[self.queries[layer, head] for head in heads],
            num_keep=num_keep,
            logical_len=self.logical_len,
            is_first=self.stateful_len == 0,
            seed=self.seed,
        )

    def plan(self, asked: str, num_keep: int, needs_queries: bool) -> Compaction:
        before = self.blocks[: -(-(self.protected_len + self.tail_len) // BLOCK_SIZE)]
        after = self.blocks[: -(-(self.protected_len + num_keep) // BLOCK_SIZE)]
        return Compaction(
            ident=0,
            row=0,
            policy=asked,
            protected_len=self.protected_len,
            tail_len=self.tail_len,
            num_keep=num_keep,
            stateful_len=self.stateful_len,
            logical_len=self.logical_len,
            query_slot=0 if needs_queries else None,
            num_queries=min(WINDOW, self.logical_len) if needs_queries else 0,
            seed=self.seed,
            block_ids_before=tuple(before),
            block_ids=tuple(after),
            block_copies=(),
        )

    def compact(
        self, policy: Policy, num_keep: int, calibration: Calibration = NOTHING_KNOWN
    ) -> None:
        """Compact the cache, and take over what it then holds, in its slot order."""
        compressor = KVCompressor(
            self.cache, self.backend, {"it": policy}, calibration_of=lambda _: calibration
        )
        compressor.run((self.plan("it", num_keep, policy.num_queries > 0),))
        blocks, offsets = self.places(self.protected_len, self.protected_len + num_keep)
        for layer, head in self.heads:
            known = {token.position: token for token in self.tails[layer, head]}
            positions = self.cache.position[layer, blocks, offsets, head].tolist()
            history = self.cache.score[layer, blocks, offsets, head].tolist()
            self.tails[layer, head] = [
                dataclasses.replace(known[at], history=past)
                for at, past in zip(positions, history, strict=True)
            ]
        self.stateful_len = num_keep

    def places(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks and offsets of the resident slots [begin, end)."""
        slots = range(begin, end)
        blocks = [self.blocks[slot // BLOCK_SIZE] for slot in slots]
        offsets = [slot % BLOCK_SIZE for slot in slots]
        return torch.tensor(blocks, dtype=torch.long), torch.tensor(offsets, dtype=torch.long)

    def stored(self, layer: int, head: int) -> np.ndarray:
        """Keys and values that the cache holds of the tail, float64 [tail_len, 2, head_dim]."""
        begin = self.protected_len
        blocks, offsets = self.places(begin, begin + self.tail_len)
        return self.cache.kv[layer, blocks, :, offsets, head].double().cpu().numpy()

    def _grow(self, where: dict[tuple[int, int], list[Token]], num_new: int) -> None:
        first = self.protected_len if where is self.tails else 0
        first += len(where[0, 0])
        for layer, head in self.heads:
            tokens = where[layer, head]
            for index in range(num_new):
                token = self._token(self.logical_len + index, tokens)
                tokens.append(token)
                slot = first + index
                block, offset = self.blocks[slot // BLOCK_SIZE], slot % BLOCK_SIZE
                pair = torch.from_numpy(np.stack([token.key, token.value]))
                self.cache.kv[layer, block, :, offset, head] = pair.to(self.cache.kv.dtype)
        self.logical_len += num_new

    def _token(self, position: int, earlier: list[Token]) -> Token:
        """Now and then its key nearly repeats an earlier one."""
        key = self._vector()
        if earlier and self._rng.random() < 0.3:
            key = self._rng.choice(earlier).key + 0.1 * key
        return Token(position, self._rounded(key), self._vector())

    def _vector(self) -> np.ndarray:
        return self._rounded(self._numpy.standard_normal(HEAD_DIM) * 1.5)

    def _rounded(self, vector: np.ndarray) -> np.ndarray:
        return torch.from_numpy(vector).to(self.cache.kv.dtype).double().numpy()

    def _query(self, position: int, readable: list[Token]) -> Query:
        vectors = [self._vector() for _ in range(GROUP)]
        seen = np.stack([token.key for token in readable])
        factor = self.scale * math.log2(math.e)
        lse = [float(np.log2(np.exp2(seen @ q * factor).sum())) for q in vectors]
        return Query(position, vectors, [float(np.float32(number)) for number in lse])


def random_calibration(device: torch.device | str = "cpu") -> Calibration:
    """Some numbers for every layer and head, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    num_q_heads, num_pairs = NUM_KV_HEADS * GROUP, HEAD_DIM // 2
    frequencies = 1.0 / 10_000 ** (torch.arange(num_pairs) / num_pairs)  # [num_pairs]
    stats = QueryStats(
        torch.randn((NUM_LAYERS, num_q_heads, HEAD_DIM), generator=generator),
        torch.rand((NUM_LAYERS, num_q_heads, num_pairs), generator=generator) + 1,
        frequencies,
    )
    heads = (NUM_LAYERS, NUM_KV_HEADS)
    forecast = Forecast(
        torch.randn((*heads, HEAD_DIM), generator=generator),
        torch.randn((*heads, HEAD_DIM), generator=generator),
        torch.randn(heads, generator=generator),
        frequencies,
    )
    return Calibration(
        QueryStats(*(part.to(device) for part in stats)),
        Forecast(*(part.to(device) for part in forecast)),
    )
