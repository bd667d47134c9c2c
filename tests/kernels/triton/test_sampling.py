"""The Triton sampling kernels against their twins, which draw the same token or a near tie."""

import itertools

import pytest
import torch
from test_support.tensors import random_tensor

pytest.importorskip("triton", reason="Triton kernels are tested where triton is installed")

from zipage_lang.kernels import sampling
from zipage_lang.kernels.backend import RowSettings
from zipage_lang.kernels.reference import sampling as reference

MARGIN = 1e-5  # of the total weight: what the rounding of exp may move an edge by


def random(*shape, device, seed=0, spread=3.0):
    return random_tensor(*shape, device=device, seed=seed, spread=spread)


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


# The interpreter takes about a second for a filtered line, hence few and short lines on the CPU.
@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles in a small vocabulary, so that every seam is crossed."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(sampling, "TILE", 64)
        monkeypatch.setattr(sampling, "GROUP", 16)
        monkeypatch.setattr(sampling, "SEARCH_BLOCK", 64)
        monkeypatch.setattr(sampling, "SWEEP_BLOCK", 128)
        monkeypatch.setattr(sampling, "COLLECT_BLOCK", 128)
        monkeypatch.setattr(sampling, "SEARCH_LANES", 4)


@pytest.fixture
def vocab_size():
    return 151_936 if torch.cuda.is_available() else 203


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


@pytest.mark.parametrize(
    ("spread", "dtype", "min_p"),
    [
        (0.0, torch.float32, 0.0),
        (0.3, torch.bfloat16, 0.0),
        (4.0, torch.float32, 0.05),
        (4.0, torch.bfloat16, 1.0),
        (90.0, torch.bfloat16, 0.0),
        (90.0, torch.float32, 0.05),
    ],
)
def test_plain_draw_equals_its_twin(device, vocab_size, spread, dtype, min_p):
    num_lines = 4 if device.type == "cpu" else 128
    logits = random(num_lines, vocab_size, device=device, spread=spread).to(dtype)
    heat = torch.linspace(0.1, 2.0, num_lines, dtype=torch.float64, device=device)
    floor = torch.full_like(heat, min_p)

    uniform = uniforms(num_lines, device)
    got = sampling.draw_tokens(logits, heat, floor, uniform)
    shifted = [(uniform + d).clamp(0, 1 - 2**-53) for d in (-MARGIN, 0, MARGIN)]
    low, want, high = (reference.draw_tokens(logits.float(), heat, floor, u) for u in shifted)
    assert ((low <= got) & (got <= high)).all(), (got.tolist(), want.tolist())
    assert (got == want).float().mean() > 0.9, (got.tolist(), want.tolist())


@pytest.mark.parametrize("hidden", ["none", "most", "first tiles"])
def test_plain_draw_inverts_the_distribution_of_float64(device, vocab_size, hidden):
    """A number in [0, 1) draws the token on whose stretch of the running sum it falls."""
    num_draws = 9 if device.type == "cpu" else 500
    line = random(1, vocab_size, device=device, seed=8)
    if hidden == "most":
        line = torch.where(random(1, vocab_size, device=device, seed=9) > 4, line, -torch.inf)
    if hidden == "first tiles":
        line[:, : vocab_size // 2] = -torch.inf
    heat = torch.full((num_draws,), 0.7, dtype=torch.float64, device=device)
    uniform = torch.linspace(0, 1 - 2**-53, num_draws, dtype=torch.float64, device=device)
    lines = line.expand(num_draws, -1)
    drawn = sampling.draw_tokens(lines, heat, torch.zeros_like(heat), uniform)
    reach = torch.softmax(line[0].double() / 0.7, 0).cumsum(0)
    assert line[0, drawn].isfinite().all()
    assert (reach[drawn] > uniform - MARGIN).all()
    before = torch.where(drawn > 0, reach[drawn - 1], 0.0)
    assert (before < uniform + MARGIN).all()


def filter_cases(device, vocab_size):
    """top_k, top_p, min_p and temperature of each line: a sample on the CPU, all on a card."""
    top_ks, top_ps = (1, 7, 64, vocab_size - 1, vocab_size), (1e-9, 0.4, 0.95, 1.0)
    cases = list(itertools.product(top_ks, top_ps, (0.0, 0.1), (0.3, 0.7, 1.5)))
    if device.type == "cpu":
        cases = cases[7::23]
    columns = [f64(*column, device=device) for column in zip(*cases, strict=True)]
    return columns[0].long(), *columns[1:]


@pytest.mark.parametrize("is_coarse", [False, True])
def test_filtered_draw_equals_its_twin(device, vocab_size, is_coarse):
    k, p, floor, heat = filter_cases(device, vocab_size)
    logits = random(len(k), vocab_size, device=device)
    if is_coarse:
        logits = (logits * 2).round() / 2  # many ties, both zeros among them

    def drawn(x, u):
        return sampling.draw_filtered_tokens(x, heat, k, p, floor, u, vocab_size)

    def twin(x, u):
        return reference.draw_filtered_tokens(x, heat, k, p, floor, u, vocab_size)

    assert_draws_agree(drawn, twin, logits, uniforms(len(k), device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_filtered_draw_from_halves_equals_its_twin(device, vocab_size, dtype, spread):
    """Flat lines, where more tokens pass than a list holds, and peaked ones."""
    k, p = i64(vocab_size, vocab_size * 3 // 4, device=device), f64(0.9, 0.99, device=device)
    floor, heat = f64(0.0, 0.3, device=device), f64(1.0, 0.7, device=device)
    logits = random(2, vocab_size, device=device, seed=3, spread=spread).to(dtype)

    def drawn(x, u):
        return sampling.draw_filtered_tokens(x, heat, k, p, floor, u, vocab_size)

    def twin(x, u):
        return reference.draw_filtered_tokens(x, heat, k, p, floor, u, vocab_size)

    assert_draws_agree(drawn, twin, logits, uniforms(2, device))


@pytest.mark.parametrize("top_k", [5, 90])
def test_filtered_draw_at_the_ends_of_the_unit_interval_gives_first_and_last(device, top_k):
    logits = random(1, 90, device=device, spread=1.0).expand(2, -1).contiguous()
    k, one, none = (
        i64(top_k, top_k, device=device),
        f64(1, 1, device=device),
        f64(0, 0, device=device),
    )
    ends = f64(0.0, 1 - 2**-53, device=device)
    order = torch.sort(logits[0], descending=True, stable=True).indices
    drawn = sampling.draw_filtered_tokens(logits, one, k, one, none, ends, 90)
    assert torch.equal(drawn, order[[0, top_k - 1]])


def test_ties_at_the_edge_of_top_k_go_to_the_lower_ids(device):
    logits = torch.zeros(3, 200, device=device)
    logits[:, 150] = 1.0
    k, one, none = (torch.full((3,), value, device=device) for value in (4, 1.0, 0.0))
    uniform = f64(0.0, 0.7, 0.99, device=device)
    drawn = sampling.draw_filtered_tokens(logits, one, k, one, none, uniform, 4)
    assert drawn.tolist() == [150, 1, 2]


@pytest.mark.parametrize("heat", [1e-300, 1e-8])
def test_tiny_temperature_draws_the_likeliest_token(device, heat):
    logits = torch.tensor([[0.0, 2.0, 1.999, -1.0]], device=device).repeat(2, 1)
    logits[1] *= 5000  # the smallest scale is lost in the rounding of these
    one, none, k = f64(1, 1, device=device), f64(0, 0, device=device), i64(3, 3, device=device)
    for u in (none, one - 2**-53):
        assert sampling.draw_tokens(logits, one * heat, none, u).tolist() == [1, 1]
        drawn = sampling.draw_filtered_tokens(logits, one * heat, k, one, none, u, 3)
        assert drawn.tolist() == [1, 1]


@pytest.mark.parametrize("live", [[70], [2, 130]])
def test_token_of_probability_zero_is_never_drawn(device, live):
    logits = torch.full((2, 140), -torch.inf, device=device)
    logits[:, live] = 1.0
    none, one, uniform = (
        f64(0, 0, device=device),
        f64(1, 1, device=device),
        f64(0, 1 - 2**-53, device=device),
    )
    assert sampling.draw_tokens(logits, one, none, uniform).tolist() == [live[0], live[-1]]
    k = i64(3, 3, device=device)
    drawn = sampling.draw_filtered_tokens(logits, one, k, one, none, uniform, 3)
    assert drawn.tolist() == [live[0], live[-1]]


def row_settings(num_rows, vocab_size, device):
    """Greedy, plain, top-k, top-p and all-filter rows in turn."""
    kinds = torch.arange(num_rows, device=device) % 5
    heat = torch.where(kinds == 0, 0.0, 0.5 + 0.1 * kinds).double()
    top_k = torch.where((kinds == 2) | (kinds == 4), 11 + kinds, vocab_size)
    top_p = torch.where(kinds >= 3, 0.8, 1.0).double()
    min_p = torch.where((kinds == 4) | (kinds == 1), 0.02, 0.0).double()
    seeds = torch.arange(num_rows, device=device) * 2**40 - 77
    return RowSettings(seeds, kinds * 100, heat, top_k, top_p, min_p, -1 - kinds)


def copy_of(settings):
    return RowSettings(*(setting.clone() for setting in settings))


def test_draw_rows_equals_its_twin_and_skips_padding(device, vocab_size):
    num_lines = 7 if device.type == "cpu" else 120
    settings = row_settings(2 * num_lines, vocab_size, device)
    order = torch.randperm(2 * num_lines, generator=torch.Generator().manual_seed(0))
    rows = order[:num_lines].to(device)
    logits = random(num_lines, vocab_size, device=device)
    twins = copy_of(settings)
    want, none_broken = reference.draw_rows(logits, rows, twins, vocab_size)
    padded = torch.cat([rows, i64(-1, -1, device=device)])
    poison = torch.full((2, vocab_size), torch.nan, device=device)
    got, is_broken = sampling.draw_rows(torch.cat([logits, poison]), padded, settings, vocab_size)
    assert (got[:num_lines] == want).float().mean() >= 0.95
    assert none_broken.tolist() == [0] * num_lines
    assert is_broken.tolist() == [*none_broken.tolist(), 1, 1]
    is_greedy = settings.temperature[rows] == 0
    assert torch.equal(got[:num_lines][is_greedy], logits.argmax(-1)[is_greedy])
    assert ((got >= 0) & (got < vocab_size)).all()
    assert torch.equal(settings.last_token_ids[rows], got[:num_lines])
    is_idle = torch.ones(2 * num_lines, dtype=torch.bool, device=device).index_fill(0, rows, False)
    assert torch.equal(settings.last_token_ids[is_idle], twins.last_token_ids[is_idle])
    assert torch.equal(settings.num_generated, twins.num_generated)


@pytest.mark.parametrize("max_top_k", [0, 5])
def test_each_draw_of_a_row_takes_the_next_number_of_its_stream(device, max_top_k):
    """Equal logits: the token tells the number. Row 2 is drawn from by line 0, and so on."""
    settings = row_settings(3, 256, device)._replace(
        temperature=f64(1, 1, 1, device=device),
        top_k=i64(256, 256, 256, device=device),
        top_p=f64(1, 1, 1 - 1e-9 if max_top_k else 1, device=device),
        min_p=f64(0, 0.5, 0, device=device),
    )
    rows, logits = i64(2, 0, 1, device=device), torch.zeros(3, 256, device=device)
    first = settings.num_generated.clone()
    for step in range(3):
        token_ids, _ = sampling.draw_rows(logits, rows, settings, max_top_k)
        uniform = reference.random_uniform(settings.seeds, first + step)
        assert torch.equal(token_ids, (uniform * 256).long()[rows])
        assert torch.equal(settings.last_token_ids[rows], token_ids)
        assert torch.equal(settings.num_generated, first + step + 1)


def test_draw_rows_without_filters_equals_with(device, vocab_size):
    settings = row_settings(10, vocab_size, device)
    rows = i64(0, 1, 6, device=device)
    logits = random(3, vocab_size, device=device)
    with_filters, _ = sampling.draw_rows(logits, rows, copy_of(settings), vocab_size)
    assert torch.equal(sampling.draw_rows(logits, rows, settings, 0)[0], with_filters)


def test_draw_of_a_line_does_not_depend_on_the_lines_beside_it(device, vocab_size):
    settings = row_settings(5, vocab_size, device)
    rows = i64(0, 4, 1, device=device)
    logits = random(3, vocab_size, device=device)
    together, _ = sampling.draw_rows(logits, rows, copy_of(settings), vocab_size)
    for line in range(3):
        part = slice(line, line + 1)
        alone, _ = sampling.draw_rows(logits[part], rows[part], copy_of(settings), vocab_size)
        assert torch.equal(alone, together[part])


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_broken_logits_are_told_and_still_give_a_token(device, vocab_size, broken):
    settings = row_settings(5, vocab_size, device)
    logits = random(3, vocab_size, device=device)
    logits[:, 100] = broken
    if broken == float("-inf"):
        logits[:] = broken
    rows = i64(0, 1, 4, device=device)
    twin, told = reference.draw_rows(logits, rows, copy_of(settings), vocab_size)
    token_ids, is_broken = sampling.draw_rows(logits, rows, settings, vocab_size)
    assert is_broken.tolist() == told.tolist() == [1, 1, 1]
    assert ((twin >= 0) & (twin < vocab_size)).all()
    assert ((token_ids >= 0) & (token_ids < vocab_size)).all()


def test_greedy_ties_go_to_the_lowest_id(device):
    logits = torch.zeros(2, 200, device=device)
    logits[0, [199, 65, 130]] = 1.0
    none = f64(0.0, 0.0, device=device)
    assert sampling.draw_tokens(logits, none, none, none).tolist() == [65, 0]


@pytest.mark.parametrize(
    ("num_top", "dtype"), [(0, torch.float32), (1, torch.bfloat16), (5, torch.float32)]
)
@pytest.mark.parametrize("is_coarse", [False, True])
def test_scores_equal_their_twin(device, vocab_size, num_top, dtype, is_coarse):
    logits = random(6, vocab_size, device=device).to(dtype)
    if is_coarse:
        logits = logits.round()
        logits[:, 7:70] = -torch.inf
    token_ids = i64(0, 8, 64, 150, vocab_size - 1, 3, device=device)
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
    assert sampling.draw_rows(logits, rows, settings, 5).shape == (2, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("max_top_k", [0, 1])
def test_draw_rows_replays_from_a_cuda_graph_on_new_logits_and_moves_rows_on(vocab_size, max_top_k):
    device = torch.device("cuda")
    settings, rows = row_settings(20, vocab_size, device), torch.arange(20, device=device)
    if max_top_k == 0:
        settings.top_k.fill_(vocab_size)
        settings.top_p.fill_(1.0)
    beside = copy_of(settings)
    logits = random(20, vocab_size, device=device)
    sampling.draw_rows(logits, rows, copy_of(settings), max_top_k)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = sampling.draw_rows(logits, rows, settings, max_top_k)
    for seed in range(3):
        logits.copy_(random(20, vocab_size, device=device, seed=seed + 10))
        graph.replay()
        want = sampling.draw_rows(logits, rows, beside, max_top_k)
        assert torch.equal(drawn, want)
        assert torch.equal(settings.last_token_ids, want[0])
        assert torch.equal(settings.num_generated, beside.num_generated)
