"""The sampling twins against slow loops in Python, and against transformers' logit processors."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from zipage_lang.kernels.reference import sampling

WORD = 2**64


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def i64(*values):
    return torch.tensor(values, dtype=torch.int64)


def slow_uniform(seed, position):
    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % WORD
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    bits = mix((mix((seed + golden) % WORD) + (position + 1) * golden) % WORD)
    return (bits >> 11) / 2**53


def slow_kept(logits, temperature, top_k, top_p, min_p):
    """[(token, share)], likeliest first, that pass all filters; and how clear their edges are."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top_k]
    share = [math.exp((logits[i] - logits[order[0]]) / temperature) for i in order]
    kept, margin, before, total = [], math.inf, 0.0, sum(share)
    for token_id, part in zip(order, share, strict=True):
        if top_p < 1.0:
            margin = min(margin, abs(before / total - top_p))
        margin = min(margin, abs(part - min_p)) if min_p > 0 else margin
        if before / total < top_p and part >= min_p:
            kept.append((token_id, part))
        before += part
    return kept, margin


def slow_draw(kept, uniform):
    """The token whose stretch of the running sum holds `uniform`, and its distance to the next."""
    total, reach = sum(part for _, part in kept), 0.0
    for token_id, part in kept:
        if uniform < (reach + part) / total:
            return token_id, min(uniform - reach / total, (reach + part) / total - uniform)
        reach += part
    return kept[-1][0], 0.0


@st.composite
def draw_cases(draw):
    vocab_size = draw(st.integers(2, 40))
    step = draw(st.sampled_from([0.0, 0.5, 2.0]))  # coarse logits have ties
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.normal(size=vocab_size).astype(np.float32) * draw(st.sampled_from([0.1, 1.0, 6.0]))
    if step:
        logits = (np.round(logits / step) * step).astype(np.float32)
    return {
        "logits": logits,
        "temperature": draw(st.floats(0.05, 5.0)),
        "top_k": draw(st.integers(1, vocab_size)),
        "top_p": draw(st.one_of(st.just(1.0), st.floats(0.01, 1.0))),
        "min_p": draw(st.one_of(st.just(0.0), st.floats(0.001, 1.0))),
        "uniform": draw(st.floats(0.0, 1.0, exclude_max=True)),
    }


@settings(max_examples=300, deadline=None)
@given(draw_cases())
def test_filtered_draw_equals_a_slow_loop(case):
    logits, uniform = case.pop("logits"), case.pop("uniform")
    kept, margin = slow_kept(logits.tolist(), **case)
    expected, distance = slow_draw(kept, uniform)
    assume(margin > 1e-5 and distance > 1e-5)
    drawn = sampling.draw_filtered_tokens(
        torch.from_numpy(logits)[None],
        f64(case["temperature"]),
        i64(case["top_k"]),
        f64(case["top_p"]),
        f64(case["min_p"]),
        f64(uniform),
        case["top_k"],
    )
    assert drawn.tolist() == [expected]


@settings(max_examples=300, deadline=None)
@given(draw_cases())
def test_plain_draw_equals_a_slow_loop_in_vocabulary_order(case):
    logits = case["logits"]
    no_limit = (len(logits), 1.0)
    kept, margin = slow_kept(logits.tolist(), case["temperature"], *no_limit, case["min_p"])
    expected, distance = slow_draw(sorted(kept), case["uniform"])
    assume(margin > 1e-5 and distance > 1e-5)
    drawn = sampling.draw_tokens(
        torch.from_numpy(logits)[None],
        f64(case["temperature"]),
        f64(case["min_p"]),
        f64(case["uniform"]),
    )
    assert drawn.tolist() == [expected]


@settings(max_examples=200, deadline=None)
@given(draw_cases())
def test_kept_set_equals_transformers_warpers(case):
    logits = case["logits"]
    # transformers keeps every token that ties with the last, we keep the lower ids
    assume(len(set(logits.tolist())) == len(logits))
    filters = [case[name] for name in ("temperature", "top_k", "top_p")]
    _, margin = slow_kept(logits.tolist(), *filters, 0.0)
    assume(margin > 1e-4)
    scores = hf.TemperatureLogitsWarper(case["temperature"])(None, torch.from_numpy(logits)[None])
    scores = hf.TopKLogitsWarper(case["top_k"])(None, scores)
    scores = hf.TopPLogitsWarper(case["top_p"])(None, scores)
    min_p, shares = case["min_p"], torch.softmax(scores, -1)
    assume(((shares / shares.max() - min_p).abs() > 1e-4).all() or min_p == 0)
    if min_p:
        scores = hf.MinPLogitsWarper(min_p)(None, scores)
    allowed = set(torch.nonzero(scores[0] > -math.inf)[:, 0].tolist())

    num_draws = 400
    grid = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    every = [f64(case[name]).expand(num_draws) for name in ("temperature", "top_p", "min_p")]
    drawn = sampling.draw_filtered_tokens(
        torch.from_numpy(logits)[None].expand(num_draws, -1),
        every[0],
        i64(case["top_k"]).expand(num_draws),
        every[1],
        every[2],
        grid,
        case["top_k"],
    )
    likely = torch.softmax(scores[0].double(), -1) > 1.0 / num_draws  # the grid must hit these
    assert set(torch.nonzero(likely)[:, 0].tolist()) <= set(drawn.tolist()) <= allowed


def test_uniform_equals_a_slow_loop_on_python_integers():
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 123456789, -987654321]
    positions = [0, 1, 2, 1000, 2**40]
    pairs = list(itertools.product(seeds, positions))
    drawn = sampling.random_uniform(i64(*[s for s, _ in pairs]), i64(*[p for _, p in pairs]))
    assert drawn.tolist() == [slow_uniform(seed % WORD, position) for seed, position in pairs]


@pytest.mark.parametrize("walk", ["position", "seed", "golden seed"])
def test_uniform_is_flat_and_free_of_serial_correlation(walk):
    num, bins = 2**16, 64
    steps = torch.arange(num, dtype=torch.int64)
    fixed = torch.full_like(steps, 7)
    golden = fixed + steps * (0x9E3779B97F4A7C15 - WORD)  # seeds one splitmix step apart
    seeds = {"position": fixed, "seed": steps, "golden seed": golden}[walk]
    drawn = sampling.random_uniform(seeds, steps if walk == "position" else fixed)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert len(drawn.unique()) == num
    counts = torch.histc(drawn.float(), bins, 0.0, 1.0)
    chi_square = ((counts - num / bins) ** 2 / (num / bins)).sum()
    assert chi_square < (bins - 1) + 5 * math.sqrt(2 * (bins - 1))
    for lag in (1, 2, 3):
        correlation = torch.corrcoef(torch.stack((drawn[:-lag], drawn[lag:])))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(num)


def test_streams_of_neighbouring_seeds_are_not_shifted_copies():
    steps = torch.arange(2000)
    one, other = (sampling.random_uniform(torch.full_like(steps, s), steps) for s in (0, 1))
    golden = sampling.random_uniform(torch.full_like(steps, 0x9E3779B97F4A7C15 - WORD), steps)
    assert not set(one.tolist()) & set(other.tolist())
    assert not set(one.tolist()) & set(golden.tolist())


@pytest.mark.parametrize("filtered", [False, True])
def test_frequencies_follow_the_probabilities(filtered):
    num, logits = 40_000, torch.tensor([0.3, -1.0, 2.0, 1.2, -0.4, 0.9, 1.7, -2.0])
    temperature, top_k, top_p = 0.8, 6, 0.9
    lines = logits.expand(num, -1)
    uniform = sampling.random_uniform(torch.full((num,), 11), torch.arange(num))
    heat, low = f64(temperature).expand(num), f64(0.0).expand(num)
    if filtered:
        kept, _ = slow_kept(logits.tolist(), temperature, top_k, top_p, 0.0)
        k, p = i64(top_k).expand(num), f64(top_p).expand(num)
        drawn = sampling.draw_filtered_tokens(lines, heat, k, p, low, uniform, top_k)
    else:
        kept, _ = slow_kept(logits.tolist(), temperature, 8, 1.0, 0.0)
        drawn = sampling.draw_tokens(lines, heat, low, uniform)
    counts = torch.bincount(drawn, minlength=8).tolist()
    total = sum(part for _, part in kept)
    expected = {token_id: num * part / total for token_id, part in kept}
    assert {i for i, count in enumerate(counts) if count} == set(expected)
    chi_square = sum((counts[i] - want) ** 2 / want for i, want in expected.items())
    freedom = len(expected) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("live", [[0], [3], [7], [2, 5]])
def test_token_of_probability_zero_is_never_drawn(uniform, live):
    logits = torch.full((1, 8), -math.inf)
    logits[0, live] = 1.0
    low, one, u = f64(0.0), f64(1.0), f64(uniform)
    assert sampling.draw_tokens(logits, one, low, u).item() in live
    for top_k in (3, 8):
        drawn = sampling.draw_filtered_tokens(logits, one, i64(top_k), one, low, u, top_k)
        assert drawn.item() in live


@pytest.mark.parametrize("uniform", [0.0, 0.37, 1 - 2**-53])
def test_equal_logits_split_the_unit_interval_evenly(uniform):
    logits = torch.zeros(1, 4096)
    drawn = sampling.draw_tokens(logits, f64(1.0), f64(0.0), f64(uniform))
    assert drawn.item() == int(uniform * 4096)


@pytest.mark.parametrize("top_p", [1e-300, 1e-9, 0.01])
def test_tiny_top_p_keeps_the_likeliest_token(top_p):
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0]])
    for uniform in (0.0, 0.999):
        drawn = sampling.draw_filtered_tokens(
            logits, f64(1.0), i64(4), f64(top_p), f64(0.0), f64(uniform), 4
        )
        assert drawn.item() == 1


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-8])
def test_tiny_temperature_draws_the_likeliest_token(temperature):
    logits = torch.tensor([[0.0, 2.0, 1.999, -1.0]])
    for uniform in (0.0, 1 - 2**-53):
        drawn = sampling.draw_tokens(logits, f64(temperature), f64(0.0), f64(uniform))
        assert drawn.item() == 1


def test_result_is_the_same_however_much_of_the_vocabulary_is_sorted(monkeypatch):
    num, vocab_size = 64, 3000
    generator = torch.Generator().manual_seed(3)
    spread = torch.logspace(-2, 1, num)[:, None]  # from nearly flat to peaked
    logits = torch.randn(num, vocab_size, generator=generator) * spread
    top_k = torch.randint(1, vocab_size, (num,), generator=generator)
    top_k[::2] = vocab_size
    top_p = torch.rand(num, generator=generator, dtype=torch.float64) * 0.999 + 0.001
    top_p[::5] = 1.0
    rest = (f64(0.0).expand(num), torch.rand(num, generator=generator, dtype=torch.float64))
    heat = f64(0.9).expand(num)
    drawn = {}
    for width in (1, 16, 256, vocab_size):
        monkeypatch.setattr(sampling, "FIRST_WIDTH", width)
        drawn[width] = sampling.draw_filtered_tokens(logits, heat, top_k, top_p, *rest, vocab_size)
    assert all(torch.equal(drawn[width], drawn[vocab_size]) for width in drawn)

    # one line at a time, drawing the last token kept, which tells where the filters' edge is
    monkeypatch.setattr(sampling, "FIRST_WIDTH", 16)
    last = f64(1 - 2**-53)
    for line in range(num):
        part = [values[line : line + 1] for values in (logits, heat, top_k, top_p)]
        kept, margin = slow_kept(
            part[0][0].tolist(), 0.9, int(top_k[line]), top_p[line].item(), 0.0
        )
        token_id = sampling.draw_filtered_tokens(*part, f64(0.0), last, vocab_size).item()
        if margin > 1e-6:
            assert kept[-1][0] == token_id or kept[-1][1] < 1e-9


def test_draws_never_wait_for_a_device():
    def on_device(*shape, dtype=torch.float64):
        return torch.empty(shape, dtype=dtype, device="meta")  # reading a value of it raises

    uniform = sampling.random_uniform(
        on_device(3, dtype=torch.int64), on_device(3, dtype=torch.int64)
    )
    logits, top_k = on_device(3, 40, dtype=torch.float32), on_device(3, dtype=torch.int64)
    heat, top_p, min_p = on_device(3), on_device(3), on_device(3)
    assert sampling.draw_tokens(logits, heat, min_p, uniform).shape == (3,)
    drawn = sampling.draw_filtered_tokens(logits, heat, top_k, top_p, min_p, uniform, 40)
    assert drawn.shape == (3,)


@pytest.mark.parametrize("width", [1, 2, 5, 30, 50])
def test_likeliest_tokens_break_ties_by_the_lower_id(width):
    rng = np.random.default_rng(width)
    logits = rng.choice([-math.inf, -1.5, -0.0, 0.0, 1e-40, 2.25], size=(20, 50)).astype(np.float32)
    found = sampling.likeliest_tokens(torch.from_numpy(logits), width).tolist()
    for line, token_ids in zip(logits.tolist(), found, strict=True):
        assert token_ids == sorted(range(50), key=lambda i: (-line[i], i))[:width]


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 10.0])
def test_repetition_penalty_equals_transformers(penalty):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, 32, generator=generator) * 4
    seen = torch.randint(0, 32, (6, 20), generator=generator)
    expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(seen, logits)
    in_prompt = torch.zeros(6, 32, dtype=torch.bool)
    in_prompt.scatter_(1, seen[:, :12], True)
    output = torch.stack([torch.bincount(line, minlength=32) for line in seen[:, 12:]])
    none = torch.zeros(6)
    got = sampling.penalize(logits, in_prompt, output.int(), torch.full((6,), penalty), none, none)
    assert torch.equal(got, expected)


def test_penalties_equal_a_slow_loop():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(3, 12)).astype(np.float32)
    in_prompt = rng.random((3, 12)) < 0.3
    counts = rng.integers(0, 4, (3, 12)).astype(np.int32)
    repetition, presence, frequency = [1.0, 1.5, 0.8], [0.5, -0.5, 0.0], [0.0, 0.25, -1.0]
    got = sampling.penalize(
        *(torch.from_numpy(part) for part in (logits, in_prompt, counts)),
        f64(*repetition),
        f64(*presence),
        f64(*frequency),
    )
    for line, token_id in itertools.product(range(3), range(12)):
        want, count = float(logits[line, token_id]), int(counts[line, token_id])
        if in_prompt[line, token_id] or count:
            want = want * repetition[line] if want < 0 else want / repetition[line]
        want -= presence[line] * (count > 0) + frequency[line] * count
        assert got[line, token_id].item() == pytest.approx(want, abs=1e-6)


def test_scores_equal_a_slow_loop_with_ties():
    rng = np.random.default_rng(2)
    logits = np.round(rng.normal(size=(30, 25)) * 2).astype(np.float32) / 2
    token_ids = rng.integers(0, 25, 30)
    got = sampling.score_tokens(torch.from_numpy(logits), torch.from_numpy(token_ids), 4)
    logprobs, ranks, top_ids, top_logprobs = (part.tolist() for part in got)
    for line, token_id in enumerate(token_ids.tolist()):
        values = logits[line].tolist()
        lse = math.log(sum(math.exp(value) for value in values))
        order = sorted(range(25), key=lambda i: (-values[i], i))
        assert logprobs[line] == pytest.approx(values[token_id] - lse, abs=1e-5)
        assert ranks[line] == order.index(token_id) + 1
        assert top_ids[line] == order[:4]
        assert top_logprobs[line] == pytest.approx([values[i] - lse for i in order[:4]], abs=1e-5)


def test_score_of_an_impossible_token_is_finite():
    logits = torch.tensor([[0.0, -math.inf, 1.0]])
    logprobs, ranks, top_ids, top_logprobs = sampling.score_tokens(logits, i64(1), 3)
    assert torch.isfinite(logprobs).all()
    assert torch.isfinite(top_logprobs).all()
    assert (ranks.tolist(), top_ids.tolist()) == ([3], [[2, 0, 1]])


def test_scoring_no_top_tokens_gives_empty_columns():
    _, ranks, top_ids, top_logprobs = sampling.score_tokens(torch.zeros(2, 5), i64(0, 3), 0)
    assert ranks.tolist() == [1, 4]
    assert top_ids.shape == top_logprobs.shape == (2, 0)
