"""Our Hopper products on a card against float64, in every cut, and in order behind other kernels.

Knows nothing of models beyond their shapes.
"""

import pytest
import torch

from zipage_lang.kernels.hopper.choose import MAX_ROWS, padded_rows, ranked_configs
from zipage_lang.kernels.hopper.library import clusters_held
from zipage_lang.kernels.hopper.linear import HopperLinear

pytestmark = pytest.mark.gpu
# name: out_size, in_size, is gated, has bias
PRODUCTS = {
    "0.6B qkv": (4096, 1024, False, False),
    "0.6B o": (1024, 2048, False, False),
    "0.6B gate_up": (6144, 1024, True, False),
    "0.6B down": (1024, 3072, False, False),
    "8B qkv": (6144, 4096, False, False),
    "8B o": (4096, 4096, False, False),
    "8B gate_up": (24576, 4096, True, False),
    "8B down": (4096, 12288, False, False),
    "14B qkv": (7168, 5120, False, False),
    "14B gate_up": (34816, 5120, True, False),
    "14B down": (5120, 17408, False, False),
    "32B down": (5120, 25600, False, False),
    "Llama-8B gate_up": (28672, 4096, True, False),
    "Llama-8B down": (4096, 14336, False, False),
    "Qwen2-0.5B qkv": (1152, 896, False, True),
    "Qwen2-7B qkv": (4608, 3584, False, True),
    "gated with bias": (6144, 1024, True, True),
    "one tile": (64, 64, False, True),
    "few tiles": (1088, 704, False, True),
    "few gated tiles": (320, 192, True, True),
}
ADDING = [name for name, (_, _, is_gated, _) in PRODUCTS.items() if not is_gated]
EPS = 1e-5
SMALL = ["0.6B o", "0.6B gate_up", "gated with bias", "one tile", "few tiles", "few gated tiles"]
COUNTS = (*range(1, MAX_ROWS, 2), MAX_ROWS)
SMALL_COUNTS = (1, 7, 31, 63, 95, 127, 159, 191, 223, 255)


@pytest.fixture(scope="module", autouse=True)
def card():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no Hopper card")
    return torch.device("cuda")


def drawn(*shape, seed, spread=1.0):
    """bfloat16, drawn on the card: weights are large."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    values = torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)
    return values * spread


def a_product(name, seed=1):
    """weight, bias as a model has them, whether it is gated, and float64 of an x."""
    out_size, in_size, is_gated, has_bias = PRODUCTS[name]
    weight = drawn(out_size, in_size, seed=seed, spread=in_size**-0.5)
    bias = drawn(out_size, seed=seed + 1) if has_bias else None

    def exact(x):
        out = x.double() @ weight.double().T
        if bias is not None:
            out += bias.double()
        if is_gated:
            gate, up = out.chunk(2, dim=1)
            out = gate * torch.sigmoid(gate) * up
        return out

    return weight, bias, is_gated, exact


def assert_right(found, exact, note):
    """Within one rounding to bfloat16, and what a sum in float32 may be off."""
    assert found.shape == exact.shape, note
    assert found.dtype == torch.bfloat16
    excess = (found.double() - exact).abs() - exact.abs() * (2**-8 + 1e-4)
    assert not excess.isnan().any(), f"{note}: NaN"
    assert excess.max() < 2e-4, f"{note}: {excess.max():.2e} too far"


def poison(like):
    """Leaves NaN in the memory that the next output of this size gets, while `like` lives on."""
    torch.full_like(like, float("nan"))


def rows_before_poison(xs, num_rows):
    """The first rows of xs, with NaN where the next row would be."""
    padded = torch.full((num_rows + 8, xs.shape[1]), float("nan"), device="cuda", dtype=xs.dtype)
    padded[:num_rows] = xs[:num_rows]
    return padded[:num_rows]


def normalised(x):
    """float64 x / rms(x)."""
    return x.double() * (x.double().square().mean(1, keepdim=True) + EPS).rsqrt()


def squares_of(x, num_parts=3):
    """float32 [num_parts, num_rows], as a product that adds leaves them."""
    parts = [part.double().square().sum(1) for part in x.tensor_split(num_parts, dim=1)]
    return torch.stack(parts).float()


def assert_squares(squares, total, note):
    exact = total.double().square().sum(1)
    error = ((squares.double().sum(0) - exact) / exact).abs().max()
    assert error < 1e-5, f"{note}: squares off by {error}"


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_many_row_counts_equal_float64_twice(name):
    weight, bias, is_gated, exact = a_product(name)
    product = HopperLinear.prepare(weight, bias, is_gated)
    xs = drawn(MAX_ROWS, weight.shape[1], seed=3, spread=2.0)
    wanted, wanted_normed = exact(xs), exact(normalised(xs))
    for num_rows in COUNTS:
        x, note = rows_before_poison(xs, num_rows), f"{name}, {num_rows} rows"
        first = product(x)
        poison(first)
        again = product(x)
        assert torch.equal(first, again), f"{note}: other bits the second time"
        assert_right(again, wanted[:num_rows], note)
        poison(again)
        normed = product.normed(x, squares_of(x), EPS)
        assert_right(normed, wanted_normed[:num_rows], f"{note}, normed")


@pytest.mark.parametrize("name", ADDING)
def test_sums_with_a_residual_and_their_squares_equal_float64_twice(name):
    weight, bias, _, exact = a_product(name)
    product = HopperLinear.prepare(weight, bias)
    xs = drawn(MAX_ROWS, weight.shape[1], seed=3)
    residuals = drawn(MAX_ROWS, len(weight), seed=5, spread=4.0)
    wanted = exact(xs) + residuals.double()
    for num_rows in COUNTS:
        x, note = rows_before_poison(xs, num_rows), f"{name}, {num_rows} rows"
        residual = rows_before_poison(residuals, num_rows)
        before = residual.clone()
        first, first_squares = product.add(x, residual)
        poison(first)
        poison(first_squares)
        again, squares = product.add(x, residual)
        assert torch.equal(first, again), f"{note}: other bits the second time"
        assert torch.equal(first_squares, squares), f"{note}: other squares the second time"
        assert torch.equal(residual, before)
        assert_right(again, wanted[:num_rows], note)
        assert_squares(squares, again, note)


def test_a_norm_in_the_weight_is_that_of_the_norm_and_the_weight():
    weight, bias, _, _ = a_product("few tiles")
    scale = drawn(weight.shape[1], seed=8)
    product = HopperLinear.prepare(weight, bias, norm_weight=scale)
    folded = (weight.double() * scale.double()).bfloat16()
    assert torch.equal(product.weight, folded)
    x = drawn(9, weight.shape[1], seed=9)
    wanted = normalised(x) @ folded.double().T + bias.double()
    assert_right(product.normed(x, squares_of(x), EPS), wanted, "folded")
    gate_up, bias, _, _ = a_product("few gated tiles")
    scale = drawn(gate_up.shape[1], seed=8)
    x = drawn(9, gate_up.shape[1], seed=9)
    product = HopperLinear.prepare(gate_up, bias, True, scale)
    folded = (gate_up.double() * scale.double()).bfloat16().double()
    gate, up = (normalised(x) @ folded.T + bias.double()).chunk(2, dim=1)
    wanted = gate * torch.sigmoid(gate) * up
    assert_right(product.normed(x, squares_of(x), EPS), wanted, "folded and gated")


@pytest.mark.parametrize("apart", [range(0), range(193)])
@pytest.mark.parametrize("num_rows", [5, 100, 192, 193, 256, 300])
def test_a_stream_through_every_kind_of_product_equals_float64(num_rows, apart, monkeypatch):
    """Ours, cuBLAS, and one after the other: a weight of 96 rows is none that ours takes."""
    from zipage_lang.kernels import products as card_products  # sets Triton up: not without a card
    from zipage_lang.kernels.residual_stream import ResidualStream

    monkeypatch.setattr(card_products, "ROWS_NORMED_APART", apart)
    products, hidden = card_products.CardProducts(torch.bfloat16), 1024
    scale, values = drawn(hidden, seed=1), drawn(num_rows, hidden, seed=2)
    stream, exact = ResidualStream(values, EPS), values.double()
    for seed, width in enumerate((512, 96, 512, 512, 96)):
        narrow = drawn(2 * width, hidden, seed=10 + seed, spread=hidden**-0.5)
        wide = drawn(hidden, width, seed=20 + seed, spread=width**-0.5)
        inner = products.normed_gated_linear(stream, products.prepare_gated(narrow, None, scale))
        products.add_linear(stream, inner, products.prepare(wide, None))
        gate, up = ((normalised(exact) * scale.double()) @ narrow.double().T).chunk(2, dim=1)
        exact = exact + (gate * torch.sigmoid(gate) * up) @ wide.double().T
    more = drawn(64, hidden, seed=30, spread=hidden**-0.5)
    found = products.normed_linear(stream, products.prepare(more, None, scale))
    wanted = (normalised(exact) * scale.double()) @ more.double().T
    for one, other in ((stream.values, exact), (found, wanted)):
        error = (one.double() - other).norm() / other.norm()
        assert error < 1e-2, error


@pytest.mark.parametrize("name", SMALL)
def test_every_cut_equals_float64(name):
    weight, bias, is_gated, exact = a_product(name, seed=11)
    product = HopperLinear.prepare(weight, bias, is_gated)
    xs = drawn(MAX_ROWS, weight.shape[1], seed=13, spread=2.0)
    wanted, wanted_normed = exact(xs), exact(normalised(xs))
    for num_rows in SMALL_COUNTS:
        x = rows_before_poison(xs, num_rows)
        out, squares = product(x), squares_of(x)
        for config in ranked_configs(num_rows, *weight.shape, clusters_held()):
            poison(out)
            out = product(x, config)
            note = f"{name}, {num_rows} rows padded to {padded_rows(num_rows)}, {config}"
            assert_right(out, wanted[:num_rows], note)
            poison(out)
            out = product.normed(x, squares, EPS, config)
            assert_right(out, wanted_normed[:num_rows], f"{note}, normed")


@pytest.mark.parametrize("name", [name for name in SMALL if name in ADDING])
def test_every_cut_of_a_sum_with_a_residual_equals_float64(name):
    weight, bias, _, exact = a_product(name, seed=11)
    product = HopperLinear.prepare(weight, bias)
    xs = drawn(MAX_ROWS, weight.shape[1], seed=13)
    residuals = drawn(MAX_ROWS, len(weight), seed=14, spread=4.0)
    wanted = exact(xs) + residuals.double()
    for num_rows in SMALL_COUNTS:
        x, residual = (rows_before_poison(one, num_rows) for one in (xs, residuals))
        out, squares = product.add(x, residual)
        for config in ranked_configs(num_rows, *weight.shape, clusters_held(), adds=True):
            poison(out)
            poison(squares)
            out, squares = product.add(x, residual, config)
            note = f"{name}, {num_rows} rows padded to {padded_rows(num_rows)}, {config}"
            assert_right(out, wanted[:num_rows], note)
            assert_squares(squares, out, note)


def test_rows_with_gaps_are_read_and_no_rows_give_none():
    weight, bias, _, exact = a_product("few tiles")
    product = HopperLinear.prepare(weight, bias)
    wide = drawn(40, weight.shape[1] + 8, seed=5)
    for x in (wide[:, : weight.shape[1]], wide[1::3, 8:]):
        assert_right(product(x), exact(x), f"strides {x.stride()}")
    assert product(wide[:0, 8:]).shape == (0, weight.shape[0])


def test_a_cut_without_a_kernel_is_refused_and_the_next_product_is_right():
    weight, bias, _, exact = a_product("few tiles")
    product = HopperLinear.prepare(weight, bias)
    x = drawn(192, weight.shape[1], seed=7)
    config = ranked_configs(192, *weight.shape, clusters_held())[0]
    for change in ({"groups": 4}, {"groups": 5}, {"splits": 9}, {"splits": 0}, {"sharers": 5}):
        with pytest.raises(RuntimeError, match="no kernel is built"):
            product(x, config._replace(**change))
    many = drawn(256, weight.shape[1], seed=7)
    uneven = config._replace(groups=3, sharers=1)
    assert_right(product(many, uneven._replace(splits=1)), exact(many), "without splits")
    with pytest.raises(RuntimeError, match="no kernel is built"):
        product(many, uneven._replace(splits=2))
    with pytest.raises(RuntimeError, match="no kernel is built"):
        product.add(many, drawn(256, len(weight), seed=8), uneven._replace(splits=1))
    with pytest.raises(ValueError, match="257 rows"):
        product(drawn(257, weight.shape[1], seed=7))
    assert_right(product(x), exact(x), "after refusals")


def recorded(work):
    """`work` as a CUDA graph, and the tensors it returns."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = work()
    return graph, outputs


@pytest.mark.parametrize("num_rows", [1, 33, 128, 191, 256])
@pytest.mark.parametrize("name", ["0.6B o", "8B qkv", "8B gate_up", "8B down"])
def test_a_product_in_a_graph_waits_for_the_kernel_that_writes_its_x(name, num_rows):
    weight, bias, is_gated, exact = a_product(name)
    product = HopperLinear.prepare(weight, bias, is_gated)
    source = torch.empty(num_rows, weight.shape[1], device="cuda", dtype=torch.bfloat16)
    x, slow = torch.empty_like(source), torch.zeros(2**27, device="cuda")

    def work():
        x.fill_(float("nan"))
        slow.add_(1.0)  # long enough that whoever did not wait would read NaN
        torch.mul(source, 1.0, out=x)  # a kernel, where a copy would be a node of another kind
        return product(x)

    graph, out = recorded(work)
    for seed in range(8):
        source.copy_(drawn(*source.shape, seed=100 + seed))
        graph.replay()
        assert_right(out, exact(source), f"{name}, {num_rows} rows, replay {seed}")


@pytest.mark.parametrize("num_rows", [7, 96, 192])
def test_layers_in_a_graph_equal_layers_with_waits_between_kernels(num_rows):
    """Products behind each other and behind Triton kernels that, too, start early: each must wait
    for all before it, also before it writes into memory that others may still read."""
    from zipage_lang.kernels import fused_ops

    hidden, inner, layers = 1024, 3072, []
    for layer in range(6):
        up = drawn(2 * inner, hidden, seed=20 + layer, spread=hidden**-0.5)
        down = drawn(hidden, inner, seed=40 + layer, spread=inner**-0.5)
        layers.append((HopperLinear.prepare(up, None, True), HopperLinear.prepare(down, None)))
    scale = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    source = torch.zeros(num_rows, hidden, device="cuda", dtype=torch.bfloat16)

    def work(between=lambda: None):
        normed = fused_ops.rms_norm(source, scale, 1e-6)
        residual = source
        for up, down in layers:
            between()
            fed = up(normed)
            between()
            fed = down(fed)
            between()
            normed, residual = fused_ops.add_rms_norm(fed, residual, scale, 1e-6)
        return residual

    graph, out = recorded(work)
    for seed in range(20):
        source.copy_(drawn(*source.shape, seed=200 + seed))
        graph.replay()
        assert torch.equal(out, work(torch.cuda.synchronize)), f"replay {seed}"
    assert not out.isnan().any()


@pytest.mark.parametrize("num_rows", [1, 7, 96, 128, 192, 250])
@pytest.mark.parametrize("sizes", [(1024, 3072), (4096, 6144)])
def test_layers_with_norms_inside_in_a_graph_equal_layers_with_waits(num_rows, sizes):
    """Each kernel reads the sums of the one before it and the residual of two before it, out of
    memory that is given to the next but one."""
    (hidden, inner), layers = sizes, []
    for layer in range(6):
        up = drawn(2 * inner, hidden, seed=20 + layer, spread=hidden**-0.5)
        down = drawn(hidden, inner, seed=40 + layer, spread=inner**-0.5)
        layers.append((HopperLinear.prepare(up, None, True), HopperLinear.prepare(down, None)))
    source = torch.zeros(num_rows, hidden, device="cuda", dtype=torch.bfloat16)

    def work(between=lambda: None):
        values, squares = source, source.float().square().sum(1)[None]
        for up, down in layers:
            between()
            fed = up.normed(values, squares, EPS)
            between()
            values, squares = down.add(fed, values)
        return values, squares

    graph, outputs = recorded(work)
    for seed in range(20):
        source.copy_(drawn(*source.shape, seed=200 + seed))
        graph.replay()
        for one, other in zip(outputs, work(torch.cuda.synchronize), strict=True):
            assert torch.equal(one, other), f"replay {seed}"
    assert not outputs[0].isnan().any()
