"""The cuda backend's products with a torch product in place of the Hopper kernel.

Here and not a folder above, since gated products behind cuBLAS end in a Triton kernel.
Knows nothing of how the Hopper kernel computes.
"""

import itertools

import pytest
import torch
from test_support.tensors import random_tensor

pytest.importorskip("triton", reason="Triton kernels are tested where triton is installed")

from zipage_lang.kernels import products
from zipage_lang.kernels.hopper.build import KernelsUnavailableError
from zipage_lang.kernels.hopper.choose import MAX_UNMEASURED_ROWS
from zipage_lang.kernels.hopper.linear import GATE_GROUP, HopperLinear
from zipage_lang.kernels.products import CardProducts
from zipage_lang.kernels.residual_stream import ResidualStream

IN_SIZE, SIZE = 64, 128  # of gate and of up
ROW_COUNTS = [0, 1, 5, 191, 192, 193]
EPS = 1e-3


class TorchLinear(HopperLinear):
    """Multiplies with the weight as the kernel finds it in memory; counts its calls."""

    def __init__(self, weight, bias, gated):
        self.weight, self.bias, self.gated = weight, bias, gated
        self.num_calls = 0

    def __call__(self, x):
        self.num_calls += 1
        return self._product(x.double()).to(x.dtype)

    def normed(self, x, squares, eps):
        self.num_calls += 1
        mean = squares.sum(0)[:, None] / x.shape[1]
        return self._product(x.double() * (mean.double() + eps).rsqrt()).to(x.dtype)

    def add(self, x, residual):
        self.num_calls += 1
        total = (self._product(x.double()) + residual.double()).to(x.dtype)
        parts = [part.float().square().sum(1) for part in total.chunk(2, dim=1)]
        return total, torch.stack(parts)

    def _product(self, x):
        out = x @ self.weight.double().T
        if self.bias is not None:
            out += self.bias.double()
        if self.gated:
            columns = torch.arange(out.shape[1]).view(-1, 2, GATE_GROUP)
            gate, up = out[:, columns[:, 0].flatten()], out[:, columns[:, 1].flatten()]
            out = gate * torch.sigmoid(gate) * up
        return out


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(products, "_can_load", lambda: True)
    monkeypatch.setattr(products, "HopperLinear", TorchLinear)
    return CardProducts(torch.bfloat16)


def a_weight(out_size, device, has_bias=True, dtype=torch.bfloat16, in_size=IN_SIZE):
    weight = random_tensor(
        out_size, in_size, seed=1, spread=in_size**-0.5, dtype=dtype, device=device
    )
    bias = random_tensor(out_size, seed=2, dtype=dtype, device=device) if has_bias else None
    return weight, bias


def plain(x, weight, bias):
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def gated(x, weight, bias):
    """The formula, from the weight as a model has it."""
    gate, up = plain(x, weight, bias).chunk(2, dim=1)
    return gate * torch.sigmoid(gate) * up


def normalised(values, norm_weight):
    values = values.double()
    scale = (values.square().mean(1, keepdim=True) + EPS).rsqrt()
    return values * scale * norm_weight.double()


def assert_near(found, exact):
    assert found.dtype == torch.bfloat16
    # gate and up are rounded before they meet; the interpreter truncates where a card rounds
    torch.testing.assert_close(found.double(), exact, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows_go_to_our_kernel_and_more_to_cublas(card, device, has_bias):
    weight, bias = a_weight(SIZE, device, has_bias)
    prepared = card.prepare(weight, bias)
    assert prepared.weight.data_ptr() == prepared.hopper.weight.data_ptr() == weight.data_ptr()
    num_ours = 0
    for num_rows in ROW_COUNTS:
        x = random_tensor(num_rows, IN_SIZE, seed=num_rows, dtype=weight.dtype, device=device)
        assert_near(card.linear(x, prepared), plain(x, weight, bias))
        num_ours += num_rows <= MAX_UNMEASURED_ROWS
        assert prepared.hopper.num_calls == num_ours, num_rows


@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_products_equal_the_formula_on_both_sides_of_the_limit(card, device, has_bias):
    weight, bias = a_weight(2 * SIZE, device, has_bias)
    norm = random_tensor(IN_SIZE, seed=3, dtype=weight.dtype, device=device)
    prepared = card.prepare_gated(weight, bias, norm)
    assert prepared.weight is prepared.hopper.weight
    num_ours = 0
    for num_rows in ROW_COUNTS:
        values = random_tensor(num_rows, IN_SIZE, seed=num_rows, dtype=weight.dtype, device=device)
        out = card.normed_gated_linear(ResidualStream(values, EPS), prepared)
        assert out.shape == (num_rows, SIZE)
        assert_near(out, gated(normalised(values, norm), weight, bias))
        num_ours += num_rows <= MAX_UNMEASURED_ROWS
        assert prepared.hopper.num_calls == num_ours, num_rows


@pytest.mark.parametrize(
    ("inner_size", "num_rows", "apart"),
    [
        *itertools.product([64], [0, 1, 33, 192], [range(0), range(20, 193)]),
        (64, 193, range(0)),  # for cuBLAS, whatever is apart
        *itertools.product([24], [0, 1, 33], [range(0)]),  # none for our kernel in any number
    ],
)
def test_a_stream_through_products_equals_the_formulas(
    card, device, num_rows, inner_size, apart, monkeypatch
):
    monkeypatch.setattr(products, "ROWS_NORMED_APART", apart)
    kinds = {"dtype": torch.bfloat16, "device": device}
    norm = random_tensor(IN_SIZE, seed=3, **kinds)
    values = random_tensor(num_rows, IN_SIZE, seed=4, **kinds)
    stream, exact = ResidualStream(values.clone(), EPS), values.double()
    num_ours = 0
    for seed in range(3):
        up = random_tensor(inner_size, IN_SIZE, seed=10 + seed, spread=IN_SIZE**-0.5, **kinds)
        down = random_tensor(IN_SIZE, inner_size, seed=20 + seed, spread=inner_size**-0.5, **kinds)
        into, back = card.prepare(up, None, norm), card.prepare(down, None)
        inner = card.normed_linear(stream, into)
        assert_near(inner, plain(normalised(exact, norm), up, None))
        card.add_linear(stream, inner, back)
        exact = exact + plain(inner, down, None)
        if inner_size % 64 == 0 and num_rows <= MAX_UNMEASURED_ROWS:
            num_ours += 1
            assert into.hopper.num_calls == back.hopper.num_calls == 1
            assert (stream.squares is not None) == (num_rows not in apart)
        else:
            assert stream.squares is None
    assert num_ours in (0, 3)
    assert_near(stream.normed(norm), normalised(exact, norm))
    assert_near(stream.values, exact)


def test_what_waits_to_be_added_is_never_lost(device):
    kinds = {"dtype": torch.float32, "device": device}
    first, second, third = (random_tensor(5, 64, seed=seed, **kinds) for seed in range(3))
    weight = random_tensor(64, seed=4, **kinds)
    before = first.clone()
    stream = ResidualStream(first, EPS)
    stream.add(second)
    stream.add(third)
    wanted = first + second + third
    normed = stream.normed(weight)
    torch.testing.assert_close(normed, normalised(wanted, weight).float())
    torch.testing.assert_close(stream.values, wanted)
    squares = wanted.square().sum(1)[None]
    stream.replace(wanted, squares)
    assert stream.squares is squares
    stream.add(second)
    assert stream.squares is None
    torch.testing.assert_close(stream.values, wanted + second)
    assert torch.equal(first, before), "the stream's first values are its caller's"


@pytest.mark.parametrize("prepare", ["prepare", "prepare_gated"])
def test_a_norm_goes_into_a_weight_of_our_kernel_rounded_once(card, prepare):
    weight, _ = a_weight(SIZE, "cpu")
    before = weight.clone()
    norm = random_tensor(IN_SIZE, seed=3, dtype=weight.dtype)
    prepared = getattr(card, prepare)(weight, None, norm)
    plain = getattr(card, prepare)(weight, None)
    wanted = (plain.weight.double() * norm.double()).bfloat16()
    assert torch.equal(prepared.weight, wanted)
    assert prepared.norm_weight is None
    assert torch.equal(weight, before)
    other = card.prepare(weight[:, :24].contiguous(), None, norm[:24])
    assert other.hopper is None
    assert other.norm_weight is not None


def test_a_gated_weight_has_groups_of_gate_and_up_rows_in_turn(card):
    weight = torch.arange(2.0 * SIZE).repeat(IN_SIZE, 1).T.bfloat16()  # each row its number
    bias = torch.arange(2.0 * SIZE).bfloat16()
    prepared = card.prepare_gated(weight, bias)
    rows = prepared.weight[:, 0].view(-1, 2, GATE_GROUP).int()
    assert rows[:, 0].flatten().tolist() == list(range(SIZE))
    assert rows[:, 1].flatten().tolist() == list(range(SIZE, 2 * SIZE))
    assert torch.equal(prepared.bias, prepared.weight[:, 0])
    assert torch.equal(weight[:, 0].int(), torch.arange(2 * SIZE).int())


def test_rows_that_do_not_start_at_16_bytes_go_to_cublas(card, device):
    weight, bias = a_weight(2 * SIZE, device)
    wide = random_tensor(8, IN_SIZE + 8, dtype=weight.dtype, device=device)
    uneven = random_tensor(8, IN_SIZE + 3, dtype=weight.dtype, device=device)
    turned = random_tensor(IN_SIZE, 8, dtype=weight.dtype, device=device).T
    for x, is_ours in (
        (wide[:, :IN_SIZE], True),
        (wide[:, 8:], True),
        (wide[::2, :IN_SIZE], True),
        (wide[:, 1 : IN_SIZE + 1], False),
        (uneven[:, :IN_SIZE], False),
        (turned, False),
    ):
        single, other = card.prepare(weight, bias), card.prepare(weight, bias)
        assert_near(card.linear(x, single), plain(x, weight, bias))
        residual = random_tensor(len(x), 2 * SIZE, seed=7, dtype=x.dtype, device=device)
        stream = ResidualStream(residual, EPS)
        card.add_linear(stream, x, other)
        assert_near(stream.values, plain(x, weight, bias) + residual.double())
        assert single.hopper.num_calls == other.hopper.num_calls == is_ours, x.stride()


@pytest.mark.parametrize(
    ("out_size", "in_size", "dtype"),
    [(96, 64, torch.bfloat16), (128, 40, torch.bfloat16), (128, 64, torch.float16)],
)
def test_weights_that_our_kernel_does_not_take_stay_as_they_are(
    card, device, out_size, in_size, dtype
):
    weight, _ = a_weight(out_size, device, dtype=dtype, in_size=in_size)
    prepared, pair = card.prepare(weight, None), card.prepare_gated(weight, None)
    assert prepared.hopper is None
    assert pair.hopper is None
    assert torch.equal(pair.weight, weight)
    norm = random_tensor(in_size, seed=3, dtype=dtype, device=device)
    pair = card.prepare_gated(weight, None, norm)
    values = random_tensor(3, in_size, dtype=dtype, device=device)
    exact = gated(normalised(values, norm), weight, None)
    found = card.normed_gated_linear(ResidualStream(values, EPS), pair)
    torch.testing.assert_close(found.double(), exact, rtol=3e-2, atol=3e-2)
    with pytest.raises(ValueError, match="multiples of 64"):
        HopperLinear.prepare(weight, None)


def test_other_dtypes_never_ask_for_the_library(monkeypatch):
    monkeypatch.setattr(products, "_can_load", lambda: pytest.fail("asked"))
    weight = torch.ones(64, 64)
    assert CardProducts(torch.float32).prepare(weight, None).hopper is None


@pytest.mark.parametrize(("capability", "num_loads"), [((9, 0), 1), ((8, 0), 0), ((10, 0), 0)])
def test_a_card_without_the_library_is_told_of_once_and_uses_cublas(
    monkeypatch, caplog, capability, num_loads
):
    tried = []

    def load():
        tried.append(1)
        raise KernelsUnavailableError("there is no nvcc")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(products, "load", load)
    card = CardProducts(torch.bfloat16)
    assert len(tried) == num_loads
    told = [message for message in caplog.messages if "there is no nvcc" in message]
    assert len(told) == num_loads
    assert card.prepare(torch.ones(64, 64, dtype=torch.bfloat16), None).hopper is None


@pytest.mark.parametrize("index", [[], [3], [4, 0]])
def test_rows_of_a_stream_hold_what_waits_to_be_added(device, index):
    kinds = {"dtype": torch.float32, "device": device}
    first, second, third = (random_tensor(5, 64, seed=seed, **kinds) for seed in range(3))
    weight = random_tensor(64, seed=4, **kinds)
    stream = ResidualStream(first, EPS)
    stream.replace(first, first.square().sum(1)[None])
    stream.add(second)
    chosen = torch.tensor(index, dtype=torch.int64, device=device)
    cut = stream.of_rows(chosen)
    assert cut.squares is None, "they would be of all rows"
    cut.add(third[chosen])
    torch.testing.assert_close(cut.values, (first + second + third)[chosen])
    torch.testing.assert_close(cut.normed(weight), normalised(cut.values, weight).float())
    torch.testing.assert_close(stream.values, first + second)
