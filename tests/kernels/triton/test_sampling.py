"""The Triton sampling kernels against their twins, which draw the same token or a near tie."""

import itertools

import pytest
import torch

from zipage_lang.kernels import sampling
from zipage_lang.kernels.reference import sampling as reference

MARGIN = 1e-5  # of the total weight: what the rounding of exp may move an edge by


def random(*shape, device, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * spread).to(device)


def f64(*values, device):
    return torch.tensor(values, dtype=torch.float64, device=device)


def i64(*values, device):
    return torch.tensor(values, dtype=torch.int64, device=device)


def uniforms(num_lines, device, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_lines, generator=generator, dtype=torch.float64).to(device)


def assert_draws_agree(drawn, twin, logits, uniform):
    """Equal to what the twin draws with this number, or with one that is MARGIN away."""
    got = drawn(logits, uniform)
    assert got.dtype == torch.int64
    near = [twin(logits.float(), (uniform + d).clamp(0, 1 - 2**-53)) for d in (0, -MARGIN, MARGIN)]
    agrees = torch.stack([got == want for want in near])
    assert agrees.any(0).all(), (got.tolist(), near[0].tolist())
    assert agrees[0].float().mean() > 0.9, (got.tolist(), near[0].tolist())


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, device):
    """Several tiles in a small vocabulary, so that the interpreter sees every seam."""
    if device.type == "cpu":
        monkeypatch.setattr(sampling, "TILE", 64)
        monkeypatch.setattr(sampling, "SEARCH_TILE", 64)


@pytest.fixture
def vocab_size(device):
    return 531 if device.type == "cpu" else 151_936


def test_random_uniform_equals_its_twin_to_the_bit(device):
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 123456789, -987654321]
    pairs = list(itertools.product(seeds, [0, 1, 2, 1000, 2**40, -1]))
    lines = [i64(*part, device=device) for part in zip(*pairs, strict=True)]
    assert torch.equal(sampling.random_uniform(*lines), reference.random_uniform(*lines))


@pytest.mark.parametrize("kind", ["all", "neutral"])
def test_penalize_equals_its_twin(device, vocab_size, kind):
    logits = random(4, vocab_size, device=device)
    in_prompt = random(4, vocab_size, device=device, seed=1) > 2
    counts = random(4, vocab_size, device=device, seed=2).clamp(min=0).to(torch.int32)
    settings = [(1.5, 0.8, 1.0, 3.0), (0.5, -0.5, 0.0, 1.0), (0.25, 0.0, -1.0, 2.0)]
    if kind == "neutral":
        settings = [(1.0,) * 4, (0.0,) * 4, (0.0,) * 4]
    settings = [f64(*setting, device=device) for setting in settings]
    got = sampling.penalize(logits, in_prompt, counts, *settings)
    want = reference.penalize(logits, in_prompt, counts, *settings)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    if kind == "neutral":
        assert torch.equal(got, logits)


@pytest.mark.parametrize("spread", [0.0, 0.3, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_plain_draw_equals_its_twin(device, vocab_size, spread, dtype, min_p):
    logits = random(12, vocab_size, device=device, spread=spread).to(dtype)
    heat = torch.linspace(0.1, 2.0, 12, dtype=torch.float64, device=device)
    floor = torch.full_like(heat, min_p)

    def drawn(x, u):
        return sampling.draw_tokens(x, heat, floor, u)

    def twin(x, u):
        return reference.draw_tokens(x, heat, floor, u)

    assert_draws_agree(drawn, twin, logits, uniforms(12, device))


@pytest.mark.parametrize("top_k", [1, 7, 64, 300, 10**6])
@pytest.mark.parametrize("top_p", [1e-9, 0.4, 0.95, 1.0])
@pytest.mark.parametrize("is_coarse", [False, True])
def test_filtered_draw_equals_its_twin(device, vocab_size, top_k, top_p, is_coarse):
    logits = random(8, vocab_size, device=device)
    if is_coarse:
        logits = (logits * 2).round() / 2  # many ties, both zeros among them
    heat = torch.tensor([0.2, 0.7, 1.0, 1.5] * 2, dtype=torch.float64, device=device)
    k = torch.full((8,), min(top_k, vocab_size), device=device)
    p = torch.full_like(heat, top_p)
    floor = f64(*[0.0] * 4, *[0.1] * 4, device=device)

    def drawn(x, u):
        return sampling.draw_filtered_tokens(x, heat, k, p, floor, u, int(k[0]))

    def twin(x, u):
        return reference.draw_filtered_tokens(x, heat, k, p, floor, u, int(k[0]))

    assert_draws_agree(drawn, twin, logits, uniforms(8, device))


@pytest.mark.parametrize("top_k", [1, 5, 20, 10**6])
def test_filtered_draw_at_the_ends_of_the_unit_interval_gives_first_and_last(device, top_k):
    logits = random(3, 90, device=device, spread=1.0)
    k = torch.full((3,), min(top_k, 90), device=device)
    one, none = f64(1.0, 1.0, 1.0, device=device), f64(0.0, 0.0, 0.0, device=device)
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    first = sampling.draw_filtered_tokens(logits, one, k, one, none, none, 90)
    last = sampling.draw_filtered_tokens(logits, one, k, one, none, one - 2**-53, 90)
    assert torch.equal(first, order[:, 0])
    assert torch.equal(last, order[:, min(top_k, 90) - 1])


def test_ties_at_the_edge_of_top_k_go_to_the_lower_ids(device):
    logits = torch.zeros(1, 200, device=device)
    logits[0, 150] = 1.0
    one, none, k = f64(1.0, device=device), f64(0.0, device=device), i64(4, device=device)
    grid = [sampling.draw_filtered_tokens(logits, one, k, one, none, none + u, 4).item()
            for u in (0.0, 0.5, 0.7, 0.99)]  # fmt: skip
    assert grid == [150, 0, 1, 2]


@pytest.mark.parametrize("heat", [1e-300, 1e-30, 1e-8])
@pytest.mark.parametrize("size", [1.0, 5000.0])
def test_tiny_temperature_draws_the_likeliest_token(device, heat, size):
    logits = torch.tensor([[0.0, 2.0, 1.999, -1.0]], device=device) * size
    one, low, k = f64(1.0, device=device), f64(0.0, device=device), i64(3, device=device)
    for u in (0.0, 1 - 2**-53):
        assert sampling.draw_tokens(logits, one * heat, low, low + u).item() == 1
        drawn = sampling.draw_filtered_tokens(logits, one * heat, k, one, low, low + u, 3)
        assert drawn.item() == 1


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("live", [[0], [70], [199], [2, 130]])
def test_token_of_probability_zero_is_never_drawn(device, uniform, live):
    logits = torch.full((1, 200), -torch.inf, device=device)
    logits[0, live] = 1.0
    low, one, u = (f64(value, device=device) for value in (0.0, 1.0, uniform))
    assert sampling.draw_tokens(logits, one, low, u).item() in live
    for top_k in (3, 200):
        k = i64(top_k, device=device)
        drawn = sampling.draw_filtered_tokens(logits, one, k, one, low, u, top_k)
        assert drawn.item() in live


def row_settings(num_rows, vocab_size, device):
    """Greedy, plain, top-k, top-p and all-filter rows in turn."""
    kinds = torch.arange(num_rows, device=device) % 5
    heat = torch.where(kinds == 0, 0.0, 0.5 + 0.1 * kinds).double()
    top_k = torch.where((kinds == 2) | (kinds == 4), 11 + kinds, vocab_size)
    top_p = torch.where(kinds >= 3, 0.8, 1.0).double()
    min_p = torch.where((kinds == 4) | (kinds == 1), 0.02, 0.0).double()
    seeds = torch.arange(num_rows, device=device) * 2**40 - 77
    return reference.RowSettings(seeds, kinds * 100, heat, top_k, top_p, min_p)


def test_draw_rows_equals_its_twin_and_skips_padding(device, vocab_size):
    settings = row_settings(30, vocab_size, device)
    rows = torch.randperm(30, generator=torch.Generator().manual_seed(0))[:20].to(device)
    logits = random(20, vocab_size, device=device)
    want, want_best = reference.draw_rows(logits, rows, settings, vocab_size)
    padded = torch.cat([rows, i64(-1, -1, device=device)])
    poison = torch.full((2, vocab_size), torch.nan, device=device)
    got, best = sampling.draw_rows(torch.cat([logits, poison]), padded, settings, vocab_size)
    assert (got[:20] == want).float().mean() >= 0.95
    assert torch.equal(best[:20], want_best)
    is_greedy = settings.temperature[rows] == 0
    assert torch.equal(got[:20][is_greedy], logits.argmax(-1)[is_greedy])
    assert ((got >= 0) & (got < vocab_size)).all()


def test_draw_rows_without_filters_equals_with(device, vocab_size):
    settings = row_settings(10, vocab_size, device)
    rows = i64(0, 1, 5, 6, device=device)
    logits = random(4, vocab_size, device=device)
    with_filters, _ = sampling.draw_rows(logits, rows, settings, vocab_size)
    assert torch.equal(sampling.draw_rows(logits, rows, settings, 0)[0], with_filters)


def test_draw_of_a_line_does_not_depend_on_the_lines_beside_it(device, vocab_size):
    settings = row_settings(20, vocab_size, device)
    rows = torch.arange(20, device=device)
    logits = random(20, vocab_size, device=device)
    together, _ = sampling.draw_rows(logits, rows, settings, vocab_size)
    for line in range(20):
        part = slice(line, line + 1)
        alone, _ = sampling.draw_rows(logits[part], rows[part], settings, vocab_size)
        assert torch.equal(alone, together[part])


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_broken_logits_show_in_best_and_still_give_a_token(device, vocab_size, broken):
    settings = row_settings(5, vocab_size, device)
    logits = random(5, vocab_size, device=device)
    logits[:, 100] = broken
    if broken == float("-inf"):
        logits[:] = broken
    rows = torch.arange(5, device=device)
    token_ids, best = sampling.draw_rows(logits, rows, settings, vocab_size)
    assert not best.isfinite().any()
    assert ((token_ids >= 0) & (token_ids < vocab_size)).all()


def test_greedy_ties_go_to_the_lowest_id(device):
    logits = torch.zeros(2, 200, device=device)
    logits[0, [199, 65, 130]] = 1.0
    none = f64(0.0, 0.0, device=device)
    assert sampling.draw_tokens(logits, none, none, none).tolist() == [65, 0]


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("is_coarse", [False, True])
def test_scores_equal_their_twin(device, vocab_size, num_top, is_coarse):
    logits = random(6, vocab_size, device=device)
    if is_coarse:
        logits = logits.round()
        logits[:, 7:70] = -torch.inf
    token_ids = i64(0, 8, 64, 500, vocab_size - 1, 3, device=device)
    got = sampling.score_tokens(logits, token_ids, num_top)
    want = reference.score_tokens(logits, token_ids, num_top)
    for part, twin in zip(got, want, strict=True):
        assert part.dtype == twin.dtype
        torch.testing.assert_close(part, twin, rtol=1e-6, atol=1e-5)


def test_no_lines_give_no_tokens(device, vocab_size):
    logits = torch.empty(0, vocab_size, device=device)
    none, rows = f64(device=device), i64(device=device)
    assert sampling.draw_tokens(logits, none, none, none).shape == (0,)
    assert sampling.draw_filtered_tokens(logits, none, rows, none, none, none, 5).shape == (0,)
    assert sampling.random_uniform(rows, rows).shape == (0,)
    settings = row_settings(3, vocab_size, device)
    assert sampling.draw_rows(logits, rows, settings, 5)[0].shape == (0,)
