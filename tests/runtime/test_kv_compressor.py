"""The compressor against a slow reference: plain loops in double precision, one head at a time.

The reference knows nothing of blocks, batches or the kernels under test.
"""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch

from zipage_lang.kernels.backend import choose_backend
from zipage_lang.runtime.kv_cache import KVCache, KVShape
from zipage_lang.runtime.kv_compressor import KVCompressor
from zipage_lang.runtime.policies.full import Full
from zipage_lang.runtime.policies.policy import Scores
from zipage_lang.runtime.policies.random import Random
from zipage_lang.runtime.policies.streaming import Streaming
from zipage_lang.runtime.policies.zipage import Zipage
from zipage_lang.runtime.step_plan import BlockCopy, Compaction

NUM_CASES, NUM_BATCHES = 200, 8
MARGIN = 1e-6  # smallest distance between numbers whose order decides; float32 is well inside it
GARBAGE = 123_456


class TooClose(Exception):
    """Two numbers whose order decides differ by less than MARGIN: draw again."""


# --- the slow reference -------------------------------------------------------------------------


@dataclasses.dataclass
class Token:
    """One slot of one head."""

    position: int
    key: np.ndarray  # float64 [head_dim]
    value: np.ndarray  # float64 [head_dim]
    history: float | None = None  # global score F


@dataclasses.dataclass
class Query:
    position: int
    vectors: list[np.ndarray]  # one per query head of the group
    lse: list[float]  # base 2


def slow_mass(tail, queries, scale):
    mass = []
    for token in tail:
        shares = []
        for query in queries:
            heads = [
                2.0 ** (float(q @ token.key) * scale * math.log2(math.e) - lse)
                for q, lse in zip(query.vectors, query.lse, strict=True)
            ]
            shares.append(max(heads) if token.position <= query.position else 0.0)
        mass.append(sum(shares) / len(queries))
    return mass


def slow_row_means(tail, threshold):
    keys = np.stack([token.key / np.linalg.norm(token.key) for token in tail])
    cosine = (keys @ keys.T).tolist()
    size = len(tail)
    for j in range(size):
        cosine[j][j] = 0.0
        newest = None
        for i in range(size):
            if i != j and abs(cosine[i][j] - threshold) < MARGIN:
                raise TooClose
            is_newer = newest is None or tail[i].position > tail[newest].position
            if i != j and cosine[i][j] > threshold and is_newer:
                newest = i
        if newest is not None:
            cosine[newest][j] = 0.0
    return [sum(row) / size for row in cosine]


def slow_zipage(policy, tail, queries, scale, is_first, **_):
    mass = slow_mass(tail, queries, scale)
    for i, token in enumerate(tail):
        if token.history is not None:
            mass[i] = max(mass[i], policy.history_decay * token.history)
    pooled = list(mass)
    if is_first:
        reach = policy.pool_kernel // 2
        pooled = [max(mass[max(0, i - reach) : i + reach + 1]) for i in range(len(tail))]
    chunk = len(tail) if policy.redundancy == "flash" else policy.redundancy_chunk
    means = []
    for start in range(0, len(tail), chunk):
        means += slow_row_means(tail[start : start + chunk], policy.similarity_threshold)
    weights = [math.exp(mean / policy.temperature) for mean in means]
    shares = [weight / sum(weights) for weight in weights]
    weight = policy.mass_weight
    return [weight * p - (1 - weight) * r for p, r in zip(pooled, shares, strict=True)], mass


def slow_streaming(policy, tail, **_):
    return [float(token.position) for token in tail], None


def slow_hash(state):
    state = (state + 0x9E3779B9) % 2**32
    state = ((state ^ (state >> 16)) * 0x7FEB352D) % 2**32
    state = ((state ^ (state >> 15)) * 0x846CA68B) % 2**32
    return state ^ (state >> 16)


def slow_random(policy, tail, seed, layer, head, **_):
    state = slow_hash(slow_hash(seed % 2**32) ^ (seed >> 32))
    state = slow_hash(slow_hash(state ^ layer) ^ head)
    return [(slow_hash(state ^ token.position) >> 8) / 2**24 for token in tail], None


SLOW_SCORES = {"zipage": slow_zipage, "streaming": slow_streaming, "random": slow_random}


def slow_compact(policy, tail, num_keep, logical_len, **facts):
    """The tail after compaction, in slot order."""
    score, history = SLOW_SCORES[policy.name](policy, tail, **facts)
    sinks = sorted(token.position for token in tail)[: policy.num_sinks]
    for i, token in enumerate(tail):
        if token.position >= logical_len - policy.num_recent or token.position in sinks:
            score[i] = math.inf
    order = sorted(range(len(tail)), key=lambda i: (score[i], tail[i].position), reverse=True)
    if num_keep < len(tail) and policy.name == "zipage":
        last, first_out = score[order[num_keep - 1]], score[order[num_keep]]
        if last != first_out and last - first_out < MARGIN:
            raise TooClose
    kept = set(order[:num_keep])
    movers = iter(i for i in range(num_keep, len(tail)) if i in kept)
    layout = [i if i in kept else next(movers) for i in range(num_keep)]
    return [
        dataclasses.replace(tail[i], history=None if history is None else history[i])
        for i in layout
    ]


def slow_attention(query, tokens, scale):
    logits = np.array([float(query @ token.key) * scale for token in tokens])
    weights = np.exp(logits - logits.max())
    return (weights / weights.sum()) @ np.stack([token.value for token in tokens])


# --- a world of requests on a paged cache -------------------------------------------------------


@dataclasses.dataclass
class World:
    cache: KVCache
    rng: random.Random
    numpy_rng: np.random.Generator
    free_blocks: list[int]

    @property
    def heads(self):
        shape = self.cache.shape
        return [(la, he) for la in range(shape.num_layers) for he in range(shape.num_kv_heads)]

    @property
    def group(self):
        return self.cache.shape.num_q_heads // self.cache.shape.num_kv_heads

    @property
    def scale(self):
        return self.cache.shape.head_dim**-0.5

    def draw_vector(self):
        drawn = self.numpy_rng.standard_normal(self.cache.shape.head_dim) * 1.5
        return drawn.astype(np.float32).astype(np.float64)

    def draw_token(self, position, earlier):
        """A new token; now and then its key nearly repeats an earlier one."""
        key = self.draw_vector()
        if earlier and self.rng.random() < 0.3:
            key = self.rng.choice(earlier).key + 0.1 * key
        return Token(position, key.astype(np.float32).astype(np.float64), self.draw_vector())

    def take_blocks(self, count):
        taken = [self.free_blocks.pop() for _ in range(count)]
        return tuple(taken)


@dataclasses.dataclass
class Request:
    """A request's true state, per (layer, head), beside its block table."""

    row: int
    policy: object
    protected: dict
    tails: dict
    table: tuple[int, ...]
    logical_len: int
    stateful_len: int = 0
    query_slot: int | None = None
    queries: dict | None = None

    @property
    def protected_len(self):
        return len(next(iter(self.protected.values())))

    @property
    def tail_len(self):
        return len(next(iter(self.tails.values())))


def make_world(seed, *, block_size=None, num_layers=2, dtype=torch.float32, window=None):
    rng = random.Random(seed)
    num_kv_heads = rng.choice([1, 2, 3])
    shape = KVShape(
        num_layers=num_layers,
        num_q_heads=num_kv_heads * rng.choice([1, 2, 3]),
        num_kv_heads=num_kv_heads,
        head_dim=rng.choice([4, 8]),
        dtype=dtype,
    )
    block_size = block_size or rng.choice([1, 2, 16, 64])
    num_blocks = 1 + 40 + 600 // block_size
    cache = KVCache(
        shape,
        num_blocks=num_blocks,
        block_size=block_size,
        num_query_slots=4,
        window=window or rng.choice([4, 16]),
        device=torch.device("cpu"),
    )
    for pool in (cache.kv, cache.score, cache.queries, cache.query_lse):
        pool.fill_(math.nan)
    cache.position.fill_(GARBAGE)
    free = list(range(1, num_blocks))
    rng.shuffle(free)
    return World(cache, rng, np.random.default_rng(seed), free)


def make_policy(name, world):
    window, rng = world.cache.window, world.rng
    if name == "streaming":
        return Streaming(num_sinks=rng.choice([0, 4]))
    if name == "random":
        return Random(num_recent=rng.choice([0, 3, 64]))
    return Zipage(
        num_queries=rng.choice([2, window]),
        num_recent=window,
        redundancy_chunk=rng.choice([5, 16, 256]),
        redundancy="flash" if name == "zipage-flash" else "lightning",
    )


def make_request(world, row, policy):
    protected_len = world.rng.choice([0, 0, 1, 5, 17])
    protected = {
        head: [world.draw_token(position, []) for position in range(protected_len)]
        for head in world.heads
    }
    query_slot = row if policy.num_queries else None
    tails = {head: [] for head in world.heads}
    return Request(row, policy, protected, tails, (), protected_len, query_slot=query_slot)


def draw_round(world, request, num_new, num_keep, num_queries):
    """New tokens and queries whose outcome no rounding can change. Returns (grown, kept tails)."""
    while True:
        grown = grow(world, request, num_new, num_queries)
        try:
            return grown, {head: keep_slowly(world, grown, head, num_keep) for head in world.heads}
        except TooClose:
            continue


def grow(world, request, num_new, num_queries):
    logical_len = request.logical_len + num_new
    tails, queries = {}, {}
    for head in world.heads:
        tails[head] = list(request.tails[head])
        for position in range(request.logical_len, logical_len):
            tails[head].append(world.draw_token(position, tails[head]))
        readable = request.protected[head] + tails[head]
        newest = range(max(0, logical_len - num_queries), logical_len)
        queries[head] = [draw_query(world, at, readable) for at in newest]
    return dataclasses.replace(request, tails=tails, queries=queries, logical_len=logical_len)


def draw_query(world, position, readable):
    vectors = [world.draw_vector() for _ in range(world.group)]
    seen = [token.key for token in readable if token.position <= position]
    if not seen:  # all that it attended to was dropped since
        return Query(position, vectors, [0.0] * len(vectors))
    seen = np.stack(seen)
    lse = [
        float(np.float32(np.log2(np.exp2(seen @ q * world.scale * math.log2(math.e)).sum())))
        for q in vectors
    ]
    return Query(position, vectors, lse)


def keep_slowly(world, request, head, num_keep):
    return slow_compact(
        request.policy,
        request.tails[head],
        num_keep,
        request.logical_len,
        queries=request.queries[head][-request.policy.num_queries :],
        scale=world.scale,
        is_first=request.stateful_len == 0,
        seed=seed_of(request),
        layer=head[0],
        head=head[1],
    )


def seed_of(request):
    return 2**40 * (request.row + 1) + 77


def place(world, request):
    """Write what is new into the cache: blocks, keys, values, queries. Never slot state."""
    cache, block_size = world.cache, world.cache.block_size
    resident_len = request.protected_len + request.tail_len
    request.table += world.take_blocks(-(-resident_len // block_size) - len(request.table))
    first_new = 0 if request.stateful_len == 0 else request.protected_len + request.stateful_len
    for layer, head in world.heads:
        tokens = request.protected[layer, head] + request.tails[layer, head]
        for slot in range(first_new, resident_len):
            kv = cache.kv[layer, request.table[slot // block_size], :, slot % block_size, head]
            kv[0] = torch.from_numpy(tokens[slot].key)
            kv[1] = torch.from_numpy(tokens[slot].value)
        if request.query_slot is not None:
            place_queries(world, request, layer, head)


def place_queries(world, request, layer, head):
    cache, heads = world.cache, slice(head * world.group, (head + 1) * world.group)
    for query in request.queries[layer, head]:
        entry = request.query_slot * cache.window + query.position % cache.window
        cache.queries[layer, entry, heads] = torch.from_numpy(np.stack(query.vectors)).float()
        cache.query_lse[layer, entry, heads] = torch.tensor(query.lse)


def plan(world, request, num_keep, num_queries):
    """The compaction item; in some cases front blocks are shared and must be copied."""
    block_size, before = world.cache.block_size, request.table
    num_after = -(-(request.protected_len + num_keep) // block_size)
    after = list(before[:num_after])
    copies = []
    if world.rng.random() < 0.5:
        for index in range(request.protected_len // block_size, num_after):
            if world.rng.random() < 0.7:
                after[index] = world.take_blocks(1)[0]
                copies.append(BlockCopy(before[index], after[index]))
    return Compaction(
        ident=0,
        row=request.row,
        policy=request.policy.name,
        protected_len=request.protected_len,
        tail_len=request.tail_len,
        num_keep=num_keep,
        stateful_len=request.stateful_len,
        logical_len=request.logical_len,
        query_slot=request.query_slot,
        num_queries=num_queries,
        seed=seed_of(request),
        block_ids_before=before,
        block_ids=tuple(after),
        block_copies=tuple(copies),
    )


def read_slots(world, table, begin, end):
    block_size = world.cache.block_size
    blocks = torch.tensor([table[slot // block_size] for slot in range(begin, end)])
    offsets = torch.tensor([slot % block_size for slot in range(begin, end)])
    return blocks, offsets


def check_kept(world, request, kept, item):
    """Exactly the reference's tokens in the reference's slots: position, K, V and history."""
    begin, end = item.protected_len, item.protected_len + item.num_keep
    blocks, offsets = read_slots(world, item.block_ids, begin, end)
    for layer, head in world.heads:
        expected = kept[layer, head]
        positions = world.cache.position[layer, blocks, offsets, head].tolist()
        assert positions == [token.position for token in expected]
        kv = world.cache.kv[layer, blocks, :, offsets, head].double().numpy()
        assert np.array_equal(kv[:, 0], np.stack([token.key for token in expected]))
        assert np.array_equal(kv[:, 1], np.stack([token.value for token in expected]))
        if request.policy.name == "zipage":
            history = world.cache.score[layer, blocks, offsets, head].double().numpy()
            assert np.allclose(history, [token.history for token in expected], atol=1e-6, rtol=1e-5)


def check_attention(world, request, kept, item):
    """Attention over the resident slots of the new table is attention over the kept set."""
    blocks, offsets = read_slots(world, item.block_ids, 0, item.protected_len + item.num_keep)
    for layer, head in world.heads:
        query = world.draw_vector()
        kv = world.cache.kv[layer, blocks, :, offsets, head].double()
        weights = (kv[:, 0] @ torch.from_numpy(query) * world.scale).softmax(0)
        tokens = request.protected[layer, head] + kept[layer, head]
        by_position = sorted(tokens, key=lambda token: token.position)
        expected = slow_attention(query, by_position, world.scale)
        assert np.abs((weights @ kv[:, 1]).numpy() - expected).max() < 1e-5


def check_untouched(world, before, items):
    """Nothing outside the new block tables was written."""
    owned = {block for item in items for block in item.block_ids}
    others = [block for block in range(world.cache.num_blocks) if block not in owned]
    for pool, old in zip(world.cache.block_pools, before, strict=True):
        assert torch.equal(pool[:, others].view(torch.int32), old[:, others].view(torch.int32))


def run_round(world, compressor, requests, check):
    """Every request grows and is compacted once, all in one call."""
    grown_requests, kept_tails, items = [], [], []
    for request in requests:
        num_new = world.rng.randint(1, 24)
        num_keep = world.rng.randint(1, request.tail_len + num_new)
        stored = world.rng.randint(1, world.cache.window)
        num_queries = (
            min(stored, request.logical_len + num_new) if request.policy.num_queries else 0
        )
        grown, kept = draw_round(world, request, num_new, num_keep, num_queries)
        place(world, grown)
        grown_requests.append(grown)
        kept_tails.append(kept)
        items.append(plan(world, grown, num_keep, num_queries))
    before = [pool.clone() for pool in world.cache.block_pools]
    compressor.run(tuple(items))
    check_untouched(world, before, items)
    for request, kept, item in zip(grown_requests, kept_tails, items, strict=True):
        check(world, request, kept, item)
    return [
        dataclasses.replace(
            request, tails=kept, table=item.block_ids, stateful_len=item.num_keep, queries=None
        )
        for request, kept, item in zip(grown_requests, kept_tails, items, strict=True)
    ]


def run_case(seed, policy_names, check):
    world = make_world(seed)
    policies = [make_policy(name, world) for name in policy_names]
    by_name = {policy.name: policy for policy in policies}
    compressor = KVCompressor(
        world.cache, choose_backend("cpu"), by_name, world.rng.choice([1, 50, 10_000])
    )
    requests = [
        make_request(world, row, world.rng.choice(list(by_name.values())))
        for row in range(world.rng.randint(1, 3))
    ]
    for _ in range(world.rng.randint(1, 3)):
        requests = run_round(world, compressor, requests, check)


# --- tests --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "batch",
    [*range(4), *[pytest.param(batch, marks=pytest.mark.slow) for batch in range(4, NUM_BATCHES)]],
)
@pytest.mark.parametrize("name", ["zipage", "zipage-flash", "streaming", "random"])
def test_compaction_keeps_exactly_what_the_slow_reference_keeps(name, batch):
    for seed in range(batch, NUM_CASES, NUM_BATCHES):
        run_case(seed, [name], check_kept)


@pytest.mark.parametrize("name", ["zipage", "streaming", "random"])
def test_attention_after_hole_filling_is_attention_over_the_kept_set(name):
    for seed in range(1000, 1040):
        run_case(seed, [name], check_attention)


def test_requests_of_different_policies_compact_in_one_call():
    for seed in range(2000, 2025):
        run_case(seed, ["zipage", "streaming", "random"], check_kept)


def start(seed, policy, num_new, **world_options):
    """A world with one request that has just grown by `num_new` tokens, and its compressor."""
    world = make_world(seed, **world_options)
    compressor = KVCompressor(world.cache, choose_backend("cpu"), {policy.name: policy})
    request = grow(world, make_request(world, 0, policy), num_new, world.cache.window)
    place(world, request)
    return world, compressor, request


def kept_positions(world, item):
    blocks, offsets = read_slots(
        world, item.block_ids, item.protected_len, item.protected_len + item.num_keep
    )
    return world.cache.position[:, blocks, offsets]  # [num_layers, num_keep, num_kv_heads]


def test_budget_below_the_window_keeps_the_newest_tokens():
    world, compressor, request = start(3, Zipage(), 40, window=16)
    item = plan(world, request, 7, 16)
    compressor.run((item,))
    newest = torch.arange(request.logical_len - 7, request.logical_len, dtype=torch.int32)
    assert torch.equal(
        kept_positions(world, item).sort(1).values,
        newest[None, :, None].expand_as(kept_positions(world, item)),
    )


def test_keeping_every_slot_moves_nothing():
    world, compressor, request = start(4, Zipage(), 30, window=16)
    before = world.cache.kv.clone()
    compressor.run(
        (
            dataclasses.replace(
                plan(world, request, 30, 16), block_copies=(), block_ids=request.table
            ),
        )
    )
    assert torch.equal(
        world.cache.kv[:, list(request.table)].nan_to_num(),
        before[:, list(request.table)].nan_to_num(),
    )


def test_bfloat16_cache_moves_bits_unchanged():
    world, compressor, request = start(5, Zipage(), 50, dtype=torch.bfloat16, window=16)
    before = world.cache.kv.clone()
    item = plan(world, request, 20, 16)
    compressor.run((item,))
    blocks, offsets = read_slots(world, item.block_ids, item.protected_len, item.protected_len + 20)
    old_blocks, old_offsets = read_slots(world, item.block_ids_before, 0, request.logical_len)
    positions = kept_positions(world, item).long()
    for layer, head in world.heads:
        source = positions[layer, :, head]  # a first compaction: position is the resident slot
        old = before[layer, old_blocks[source], :, old_offsets[source], head]
        assert torch.equal(world.cache.kv[layer, blocks, :, offsets, head], old)


def test_same_plan_on_the_same_cache_gives_the_same_bits():
    outcomes = []
    for _ in range(2):
        world, compressor, request = start(6, Random(num_recent=4), 60)
        item = plan(world, request, 25, 0)
        compressor.run((item,))
        outcomes.append((kept_positions(world, item), world.cache.kv.nan_to_num()))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])


@dataclasses.dataclass(frozen=True)
class StepByStep(Zipage):
    """The same score, finished by the policy itself, as a policy of one's own would."""

    def score(self, view):
        blend = super().score(view)
        keep, history = view.backend.combine_scores(
            blend.mass,
            blend.similarity,
            view.history(),
            view.lens,
            view.is_first,
            decay=blend.decay,
            pool_kernel=blend.pool_kernel,
            temperature=blend.temperature,
            mass_weight=blend.mass_weight,
        )
        return Scores(keep=keep, history=history)


def test_blended_score_leaves_the_same_bits_as_the_same_score_step_by_step():
    pools = []
    for policy in (Zipage(), StepByStep()):
        world, compressor, request = start(14, policy, 80, window=16)
        first = plan(world, request, 50, 16)
        compressor.run((first,))
        again = dataclasses.replace(
            first,
            tail_len=50,
            num_keep=30,
            stateful_len=50,
            block_ids_before=first.block_ids,
            block_copies=(),
        )
        compressor.run((again,))
        pools.append([pool.view(torch.int32).clone() for pool in world.cache.block_pools])
    for blended, stepwise in zip(*pools, strict=True):
        assert torch.equal(blended, stepwise)


def test_random_draws_differ_between_layers_heads_and_seeds():
    world, compressor, request = start(7, Random(num_recent=0), 60, num_layers=4)
    item = plan(world, request, 20, 0)
    compressor.run((item,))
    kept = kept_positions(world, item).sort(1).values
    assert len({tuple(kept[layer, :, 0].tolist()) for layer in range(4)}) == 4
    again, compressor, request = start(7, Random(num_recent=0), 60, num_layers=4)
    other = dataclasses.replace(plan(again, request, 20, 0), seed=item.seed + 1)
    compressor.run((other,))
    assert not torch.equal(kept_positions(again, other).sort(1).values, kept)


def test_no_compactions_is_no_work():
    world, compressor, _ = start(8, Streaming(), 5)
    before = world.cache.kv.clone()
    compressor.run(())
    assert torch.equal(world.cache.kv.nan_to_num(), before.nan_to_num())


def test_policy_that_wants_more_queries_than_the_ring_holds_is_refused():
    world = make_world(9, window=4)
    with pytest.raises(ValueError, match="scores with 16 queries but the query rings hold 4"):
        KVCompressor(world.cache, choose_backend("cpu"), {"zipage": Zipage()})


def test_compacting_under_full_is_an_error():
    world, compressor, request = start(10, Full(), 20)
    with pytest.raises(AssertionError, match="full"):
        compressor.run((plan(world, request, 5, 0),))


def test_missing_query_slot_is_an_error():
    world, compressor, request = start(11, Zipage(), 20, window=16)
    item = dataclasses.replace(plan(world, request, 5, 16), query_slot=None)
    with pytest.raises(AssertionError, match="needs a query slot"):
        compressor.run((item,))


def test_block_that_changes_without_a_copy_is_an_error():
    world, compressor, request = start(12, Streaming(), 40, block_size=2)
    item = plan(world, request, 5, 0)
    stray = dataclasses.replace(
        item, block_ids=(*item.block_ids[:-1], *world.take_blocks(1)), block_copies=()
    )
    with pytest.raises(AssertionError, match="differ without a copy"):
        compressor.run((stray,))


def test_copy_over_a_block_that_another_row_reads_is_an_error():
    world, compressor, request = start(13, Streaming(), 40, block_size=2)
    item = dataclasses.replace(plan(world, request, 5, 0), row=1)
    target = item.block_ids_before[-1]
    other = dataclasses.replace(
        item,
        block_ids_before=(99,),
        block_ids=(target,),
        protected_len=0,
        tail_len=2,
        num_keep=1,
        block_copies=(BlockCopy(99, target),),
    )
    with pytest.raises(AssertionError, match="still reads"):
        compressor.run((item, other))
