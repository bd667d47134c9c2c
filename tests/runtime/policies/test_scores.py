"""Every policy's keep-sets against plain loops in double precision, written from the formulas.

The loops know nothing of blocks, batches, tensors or the kernels under test.
"""

import math
import random

import numpy as np
import pytest
import torch
from test_support.one_request import GROUP, HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, OneRequest

from zipage_lang.kernels.backend import Forecast
from zipage_lang.runtime.policies.policy import Calibration, QueryStats
from zipage_lang.runtime.policies.registry import load_policies

MARGIN = 1e-5  # relative distance between numbers whose order decides; float32 is well inside it
CHOSEN = 1e30
FREQUENCIES = [1.0 / 10_000 ** (2 * f / HEAD_DIM) for f in range(HEAD_DIM // 2)]


class TooClose(Exception):
    """Two numbers whose order decides are too close for float32: draw again."""


def best_of(scores, tokens, count):
    """Indices of the `count` highest scores; of equal ones the newer token."""
    order = sorted(range(len(tokens)), key=lambda i: (scores[i], tokens[i].position), reverse=True)
    if 0 < count < len(order):
        last, first_out = scores[order[count - 1]], scores[order[count]]
        near = MARGIN * max(abs(last), abs(first_out), 1e-3)
        if last != first_out and last - first_out < near:
            raise TooClose
    return set(order[: max(count, 0)])


# --- parts of scores, one head at a time --------------------------------------------------------


def shares(token, query, scale):
    if token.position > query.position:
        return [0.0] * len(query.vectors)
    return [
        2.0 ** (float(vector @ token.key) * scale * math.log2(math.e) - lse)
        for vector, lse in zip(query.vectors, query.lse, strict=True)
    ]


def masses(policy, tail, queries):
    queries = queries[-policy.num_queries :]
    scale = HEAD_DIM**-0.5
    return [sum(max(shares(t, q, scale)) for q in queries) / len(queries) for t in tail]


def pooled_in_text(scores, tail, kernel):
    order = sorted(range(len(tail)), key=lambda i: tail[i].position)
    reach, out = kernel // 2, [0.0] * len(tail)
    for rank, i in enumerate(order):
        near = order[max(0, rank - reach) : rank + reach + 1]
        out[i] = max(scores[j] for j in near)
    return out


def similarities(tail, threshold, chunk=None):
    means = []
    for start in range(0, len(tail), chunk or len(tail)):
        part = tail[start : start + (chunk or len(tail))]
        unit = [token.key / np.linalg.norm(token.key) for token in part]
        cosine = [[float(a @ b) for b in unit] for a in unit]
        for j in range(len(part)):
            cosine[j][j] = 0.0
            if any(abs(cosine[i][j] - threshold) < MARGIN for i in range(len(part))):
                raise TooClose
            similar = [i for i in range(len(part)) if cosine[i][j] > threshold]
            if similar:
                cosine[max(similar, key=lambda i: part[i].position)][j] = 0.0
        means += [sum(line) / len(part) for line in cosine]
    return means


def softmax(numbers, temperature=1.0):
    weights = [math.exp(number / temperature) for number in numbers]
    return [weight / sum(weights) for weight in weights]


def is_old(policy, token, layer):
    return token.position < layer.logical_len - policy.num_recent


def over(scores, counted, total):
    return [s / total if c else 0.0 for s, c in zip(scores, counted, strict=True)]


def mixed_hash(state):
    state = (state + 0x9E3779B9) % 2**32
    state = ((state ^ (state >> 16)) * 0x7FEB352D) % 2**32
    state = ((state ^ (state >> 15)) * 0x846CA68B) % 2**32
    return state ^ (state >> 16)


def lot(seed, layer, head, position):
    state = mixed_hash(mixed_hash(seed % 2**32) ^ (seed >> 32))
    state = mixed_hash(mixed_hash(state ^ layer) ^ head)
    return (mixed_hash(state ^ position) >> 8) / 2**24


def histories(tail):
    return [token.history or 0.0 for token in tail]


# --- policies: layer -> (scores per head, histories per head or None) ---------------------------


def by_head(score_head):
    """A slow policy from a function (policy, layer, head, tail, queries) -> (scores, history)."""

    def score_layer(policy, layer):
        found = [
            score_head(policy, layer, head, tail, layer.queries[head])
            for head, tail in enumerate(layer.tails)
        ]
        past = None if found[0][1] is None else [history for _, history in found]
        return [scores for scores, _ in found], past

    return score_layer


def slow_zipage(policy, layer, head, tail, queries):
    past = zip(masses(policy, tail, queries), histories(tail), strict=True)
    remembered = [max(now, policy.history_decay * old) for now, old in past]
    importance = remembered
    if layer.is_first:
        importance = pooled_in_text(remembered, tail, policy.pool_kernel)
    chunk = None if policy.redundancy == "flash" else policy.redundancy_chunk
    redundancy = softmax(similarities(tail, policy.similarity_threshold, chunk), policy.temperature)
    w = policy.mass_weight
    scores = [w * i - (1 - w) * r for i, r in zip(importance, redundancy, strict=True)]
    return scores, remembered


def slow_rkv(policy, layer, head, tail, queries):
    mass = masses(policy, tail, queries)
    old = [is_old(policy, token, layer) for token in tail]
    total = sum(m for m, counted in zip(mass, old, strict=True) if counted) or 1.0
    importance = pooled_in_text(over(mass, old, total), tail, policy.pool_kernel)
    redundancy = softmax(similarities(tail, policy.similarity_threshold))
    w = policy.mass_weight
    return [w * i - (1 - w) * r for i, r in zip(importance, redundancy, strict=True)], None


def slow_gkv(policy, layer, head, tail, queries):
    mass = masses(policy, tail, queries)
    old = [is_old(policy, token, layer) for token in tail]
    highest = max([m for m, counted in zip(mass, old, strict=True) if counted], default=1.0)
    now = over(mass, old, highest)
    remembered = [
        max(s, policy.history_decay * f) for s, f in zip(now, histories(tail), strict=True)
    ]
    share = softmax(similarities(tail, policy.similarity_threshold))
    worst = max([s for s, counted in zip(share, old, strict=True) if counted], default=1.0)
    redundancy = over(share, old, worst)
    pooled = pooled_in_text(remembered, tail, policy.pool_kernel)
    w = policy.mass_weight
    scores = [w * g - (1 - w) * r for g, r in zip(pooled, redundancy, strict=True)]
    return scores, remembered


def slow_snapkv(policy, layer, head, tail, queries):
    return pooled_in_text(masses(policy, tail, queries), tail, policy.pool_kernel), None


def slow_streaming(policy, layer, head, tail, queries):
    return [float(token.position) for token in tail], None


def slow_h2o(policy, layer, head, tail, queries):
    mass = masses(policy, tail, queries)
    total = [policy.decay * f + s for f, s in zip(histories(tail), mass, strict=True)]
    newest = layer.logical_len - math.floor(policy.recent_share * layer.num_keep)
    scores = [CHOSEN if t.position >= newest else s for t, s in zip(tail, total, strict=True)]
    return scores, total


def slow_random(policy, layer, head, tail, queries):
    seed = layer.seed if policy.fresh else 0
    return [lot(seed, layer.layer, head, token.position) for token in tail], None


def slow_keydiff(policy, layer, head, tail, queries):
    unit = [token.key / np.linalg.norm(token.key) for token in tail]
    mean = sum(unit) / len(unit)
    return [-float(u @ mean) / float(np.linalg.norm(mean)) for u in unit], None


def slow_vase(policy, layer, head, tail, queries):
    ranges = [float(token.value.max() - token.value.min()) for token in tail]
    wide = best_of(ranges, tail, math.floor(policy.range_share * layer.num_keep))
    weight = pooled_in_text(masses(policy, tail, queries), tail, policy.pool_kernel)
    scores = []
    for i, token in enumerate(tail):
        score = math.log(max(weight[i], 1e-30))
        if policy.lottery:
            drawn = lot(layer.seed, layer.layer, head, token.position) + 2.0**-25
            score -= math.log(-math.log(drawn))
        scores.append(CHOSEN if i in wide else score)
    return scores, ranges


def slow_page(policy, layer):
    ratios = [
        [float(np.linalg.norm(t.value) / np.linalg.norm(t.key)) for t in tail]
        for tail in layer.tails
    ]
    size, scores = policy.page_len, []
    for index in range(len(layer.tails[0])):
        page = range(index // size * size, min((index // size + 1) * size, len(layer.tails[0])))
        newest = max(layer.tails[0][i].position for i in page)
        numbers = [line[i] for line in ratios for i in page]
        is_fresh = newest >= layer.logical_len - policy.num_fresh
        scores.append(CHOSEN if is_fresh else sum(numbers) / len(numbers))
    return [list(scores) for _ in layer.tails], ratios


def slow_kvcompress(policy, layer):
    metrics = []
    for tail, queries in zip(layer.tails, layer.queries, strict=True):
        newest = queries[-policy.num_queries :]
        scale = HEAD_DIM**-0.5
        metrics.append([sum(s * s for q in newest for s in shares(t, q, scale)) for t in tail])
    places = [
        (head, i)
        for head, tail in enumerate(layer.tails)
        for i, token in enumerate(tail)
        if is_old(policy, token, layer)
    ]
    places.sort(key=lambda at: metrics[at[0]][at[1]], reverse=True)
    free = max(layer.num_keep - policy.num_recent, 1) * len(layer.tails)
    if free < len(places):
        last, out = (metrics[head][i] for head, i in places[free - 1 : free + 1])
        if last - out < MARGIN * last:
            raise TooClose
    earned = set(places[:free])
    scores = [
        [
            metrics[head][i] if (head, i) in earned else -float(layer.logical_len - token.position)
            for i, token in enumerate(tail)
        ]
        for head, tail in enumerate(layer.tails)
    ]
    return scores, None


def slow_pyramidkv(policy, layer, head, tail, queries):
    pooled = pooled_in_text(masses(policy, tail, queries), tail, policy.pool_kernel)
    old = [i for i, token in enumerate(tail) if is_old(policy, token, layer)]
    share = 1 - (1 - 1 / policy.beta) * layer.layer / (NUM_LAYERS - 1)
    count = math.floor(max(layer.num_keep - policy.num_recent, 0) * share)
    found = best_of([pooled[i] for i in old], [tail[i] for i in old], count)
    chosen = {old[i] for i in found}
    return [CHOSEN if i in chosen else float(t.position) for i, t in enumerate(tail)], None


def slow_triattention(policy, layer, head, tail, queries):
    pairs = HEAD_DIM // 2
    per_q_head = []
    for member in range(GROUP):
        center, length = stats_of(layer.layer, head * GROUP + member)
        scores = []
        for token in tail:
            key = [complex(token.key[f], token.key[f + pairs]) for f in range(pairs)]
            score = 0.0
            for f in range(pairs):
                for power in range(17):
                    at = layer.logical_len - 1 + 2**power
                    turned = center[f] * np.exp(1j * at * FREQUENCIES[f])
                    score += (turned * key[f].conjugate()).real / 17
                score += (length[f] - abs(center[f])) * abs(key[f])
            scores.append(score)
        mean = sum(scores) / len(scores)
        deviation = math.sqrt(sum((s - mean) ** 2 for s in scores) / len(scores))
        per_q_head.append([(s - mean) / deviation if deviation else 0.0 for s in scores])
    return [max(column) for column in zip(*per_q_head, strict=True)], None


def slow_tiers(policy, layer, head, tail, queries):
    past = zip(masses(policy, tail, queries), histories(tail), strict=True)
    remembered = [max(now, policy.history_decay * old) for now, old in past]
    importance = remembered
    if layer.is_first:
        importance = pooled_in_text(remembered, tail, policy.pool_kernel)
    ranges = [float(token.value.max() - token.value.min()) for token in tail]
    novelty = ranges
    if policy.novelty_share:
        means = similarities(tail, policy.similarity_threshold, policy.redundancy_chunk)
        novelty = [-mean for mean in means]
    parts = [
        (importance, policy.mass_share),
        (ranges, policy.range_share),
        (novelty, policy.novelty_share),
    ]
    seed = layer.seed if policy.fresh else 0
    return in_tiers(policy.recent_share, parts, seed, policy, layer, head, tail), remembered


def in_tiers(recent_share, parts, seed, policy, layer, head, tail):
    """Scores whose best are the newest, then each part's share by its measure, then lots."""
    num_newest = max(policy.num_recent, whole_share(recent_share, layer.num_keep))
    left = max(layer.num_keep - num_newest, 0)
    chosen = {i for i, t in enumerate(tail) if t.position >= layer.logical_len - num_newest}
    for measure, share in parts:
        rest = [i for i in range(len(tail)) if i not in chosen]
        count = whole_share(share, left)
        best = best_of([measure[i] for i in rest], [tail[i] for i in rest], count)
        chosen |= {rest[i] for i in best}
    drawn = [lot(seed, layer.layer, head, token.position) for token in tail]
    return [CHOSEN if i in chosen else drawn[i] for i in range(len(tail))]


def slow_zipage2(policy, layer, head, tail, queries):
    weights = forecast_of(layer.layer, head)
    pairs = HEAD_DIM // 2
    forecasts, bases = [], []
    for token in tail:
        stored = np.array([complex(token.key[f], token.key[f + pairs]) for f in range(pairs)])
        unrotated = stored * np.exp(-1j * token.position * np.array(FREQUENCIES))
        base = float(weights["key"] @ np.concatenate([unrotated.real, unrotated.imag]))
        base += float(weights["value"] @ token.value)
        age = layer.logical_len - 1 - token.position
        forecasts.append(base + weights["age"] * math.log(1 + age))
        bases.append(base)
    parts = [(forecasts, 1 - policy.lot_share)]
    return in_tiers(policy.recent_share, parts, 0, policy, layer, head, tail), bases


def whole_share(share, count):
    return count * round(share * 2**16) // 2**16


SLOW = {
    "zipage": by_head(slow_zipage),
    "rkv": by_head(slow_rkv),
    "gkv": by_head(slow_gkv),
    "snapkv": by_head(slow_snapkv),
    "streaming": by_head(slow_streaming),
    "h2o": by_head(slow_h2o),
    "random": by_head(slow_random),
    "page": slow_page,
    "kvcompress": slow_kvcompress,
    "pyramidkv": by_head(slow_pyramidkv),
    "keydiff": by_head(slow_keydiff),
    "vase": by_head(slow_vase),
    "triattention": by_head(slow_triattention),
    "tiers": by_head(slow_tiers),
    "zipage2": by_head(slow_zipage2),
}

# Windows are small where tails are.
ASKED = [
    "zipage:num_recent=3:redundancy_chunk=16",
    "zipage:num_recent=3:redundancy=flash:history_decay=0.5",
    "rkv:num_recent=3",
    "rkv:num_recent=3:mass_weight=0.5:pool_kernel=1",
    "gkv:num_recent=3",
    "gkv:num_recent=5:pool_kernel=5:mass_weight=0.9",
    "snapkv:num_recent=3",
    "snapkv:num_recent=3:num_queries=5:pool_kernel=1",
    "streaming",
    "h2o:num_recent=0",
    "h2o:num_recent=2:recent_share=0.2:decay=0.7",
    "random:num_recent=3",
    "random:num_recent=0:fresh=false",
    "page:page_len=4:num_fresh=3",
    "page:page_len=5:num_fresh=0",
    "kvcompress:num_recent=3",
    "kvcompress:num_recent=0:num_queries=3",
    "pyramidkv:num_recent=3",
    "pyramidkv:num_recent=0:beta=2:pool_kernel=1",
    "keydiff:num_recent=3",
    "vase:num_recent=3:num_sinks=1",
    "vase:num_recent=0:num_sinks=0:lottery=false:range_share=0.5",
    "triattention:num_recent=3",
    "zipage2:num_recent=3",
    "zipage2:num_recent=0:recent_share=0.4:lot_share=0",
    "zipage2:num_recent=1:recent_share=0:lot_share=0.5",
    "tiers:num_recent=3",
    "tiers:num_recent=0:recent_share=0:pool_kernel=3:mass_share=0.5:range_share=0.25:novelty_share=0",
    "tiers:num_recent=1:novelty_share=0.4:redundancy_chunk=16:range_share=0.1:fresh=false",
    "tiers:num_recent=1:recent_share=0.3:mass_share=0.4:range_share=0:history_decay=0",
]


def stats_of(layer, q_head):
    """Mean query and mean length by frequency, some numbers that differ by layer and head."""
    rng = np.random.default_rng(100 * layer + q_head)
    pairs = HEAD_DIM // 2
    center = rng.standard_normal(pairs) + 1j * rng.standard_normal(pairs)
    return center, abs(center) + rng.random(pairs)


def query_stats():
    num_q_heads = NUM_KV_HEADS * GROUP
    found = [[stats_of(la, q) for q in range(num_q_heads)] for la in range(NUM_LAYERS)]
    center = np.array([[np.concatenate([c.real, c.imag]) for c, _ in line] for line in found])
    length = np.array([[long for _, long in line] for line in found])
    return QueryStats(
        torch.from_numpy(center).float(),
        torch.from_numpy(length).float(),
        torch.tensor(FREQUENCIES),
    )


def forecast_of(layer, head):
    rng = np.random.default_rng(1000 + 100 * layer + head)
    key, value = rng.standard_normal((2, HEAD_DIM))
    return {"key": key, "value": value, "age": rng.standard_normal()}


def forecast():
    heads = [[forecast_of(la, head) for head in range(NUM_KV_HEADS)] for la in range(NUM_LAYERS)]
    parts = (
        np.array([[w[name] for w in line] for line in heads]) for name in ("key", "value", "age")
    )
    return Forecast(*(torch.from_numpy(part).float() for part in parts), torch.tensor(FREQUENCIES))


def slow_keep(policy, layer):
    """Positions that stay and, where the policy keeps any, their histories: one dict per head."""
    scores, past = SLOW[policy.name](policy, layer)
    kept = []
    for head, tail in enumerate(layer.tails):
        sinks = sorted(token.position for token in tail)[: policy.num_sinks]
        for i, token in enumerate(tail):
            if not is_old(policy, token, layer) or token.position in sinks:
                scores[head][i] = math.inf
        stay = best_of(scores[head], tail, layer.num_keep)
        kept.append({tail[i].position: None if past is None else past[head][i] for i in stay})
    return kept


def check_rounds(policy, seed):
    rng = random.Random(seed)
    request = OneRequest(seed, protected_len=rng.choice([0, 1, 6]))
    for _ in range(3):
        request.grow(rng.randint(6, 24))
        num_keep = rng.randint(max(1, request.tail_len // 3), request.tail_len)
        expected = [
            slow_keep(policy, request.layer(layer, num_keep)) for layer in range(NUM_LAYERS)
        ]
        request.compact(policy, num_keep, Calibration(query_stats(), forecast()))
        for layer, head in request.heads:
            tail, wanted = request.tails[layer, head], expected[layer][head]
            assert {token.position for token in tail} == set(wanted), (layer, head)
            if wanted and next(iter(wanted.values())) is not None:
                found = [token.history for token in tail]
                assert found == pytest.approx([wanted[t.position] for t in tail], 1e-4, 1e-6)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("asked", ASKED)
def test_a_policy_keeps_what_its_formula_says(asked):
    policy = load_policies()[asked]
    num_checked = 0
    for seed in range(40):
        try:
            check_rounds(policy, seed)
        except TooClose:
            continue
        num_checked += 1
        if num_checked == 5:
            return
    pytest.fail(f"only {num_checked} worlds were clear enough")


def test_every_shipped_policy_is_checked_by_a_formula():
    assert set(load_policies()) == set(SLOW) | {"full"}
