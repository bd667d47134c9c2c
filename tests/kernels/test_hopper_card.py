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
SMALL = ["0.6B o", "0.6B gate_up", "gated with bias", "one tile", "few tiles", "few gated tiles"]
ODD_COUNTS = range(1, 201, 2)


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


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_odd_row_counts_equal_float64_twice(name):
    from zipage_lang.kernels.products import (
        CardProducts,
    )  # Triton must not be set up without a card

    weight, bias, is_gated, exact = a_product(name)
    products = CardProducts(torch.bfloat16)
    prepare = products.prepare_gated if is_gated else products.prepare
    multiply = products.gated_linear if is_gated else products.linear
    prepared = prepare(weight, bias)
    assert prepared.hopper is not None, "the library did not load"
    xs = drawn(max(ODD_COUNTS), weight.shape[1], seed=3)
    wanted = exact(xs)
    for num_rows in ODD_COUNTS:
        x, note = rows_before_poison(xs, num_rows), f"{name}, {num_rows} rows"
        first = multiply(x, prepared)
        poison(first)
        again = multiply(x, prepared)
        assert torch.equal(first, again), f"{note}: other bits the second time"
        if num_rows <= MAX_ROWS:
            assert_right(again, wanted[:num_rows], note)
        else:  # cuBLAS on the same weight, rounded before the gate
            error = (again.double() - wanted[:num_rows]).norm() / wanted[:num_rows].norm()
            assert error < 1e-2, f"{note}: {error}"


@pytest.mark.parametrize("name", SMALL)
def test_every_cut_equals_float64(name):
    weight, bias, is_gated, exact = a_product(name, seed=11)
    product = HopperLinear.prepare(weight, bias, is_gated)
    xs = drawn(MAX_ROWS, weight.shape[1], seed=13)
    wanted = exact(xs)
    for num_rows in (1, 7, 31, 63, 95, 127, 159, 191):
        x = rows_before_poison(xs, num_rows)
        out = product(x)
        for config in ranked_configs(num_rows, *weight.shape, clusters_held()):
            poison(out)
            out = product.run(x, config)
            note = f"{name}, {num_rows} rows padded to {padded_rows(num_rows)}, {config}"
            assert_right(out, wanted[:num_rows], note)


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
            product.run(x, config._replace(**change))
    with pytest.raises(ValueError, match="193 rows"):
        product(drawn(193, weight.shape[1], seed=7))
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


@pytest.mark.parametrize("num_rows", [1, 33, 128, 191])
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
