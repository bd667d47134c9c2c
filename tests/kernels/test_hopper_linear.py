"""The Hopper product's own source run on a CPU, against float64: norms, residuals, splits, sharers.

The stand-in (`product_stand_in`) runs all threads of a cluster in turn, in any order that barriers
allow; copies and matrix instructions are functions there. It finds wrong indices, fragments,
parities and missing barriers, not what only the card can tell. Knows nothing of models.
"""

import ctypes
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_support.stand_in_build import build

from zipage_lang.kernels import hopper
from zipage_lang.kernels.hopper.choose import HopperConfig

SOURCES = Path(hopper.__file__).resolve().parent
STAND_INS = Path(__file__).resolve().parent
EPS = 1e-3


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """The C function of the stand-in, called with tensors."""
    folder = tmp_path_factory.mktemp("product")
    for name in ("params", "epilogue", "ring", "linear"):
        text = (SOURCES / f"{name}.cuh").read_text()
        # A CTA's own memory is one array of the stand-in, and is not declared twice.
        (folder / f"{name}.cuh").write_text(text.replace("extern __shared__", "extern"))
    for source in (STAND_INS / "product_stand_in").iterdir():
        shutil.copy(source, folder)
    shutil.copy(STAND_INS / "hopper_stand_in" / "wgmma.cuh", folder)
    return build(folder, "-include", "ptx.cuh").emulate


class Product:
    """A weight, an x with NaN around it, and outputs of NaN."""

    def __init__(self, out_size, in_size, num_rows, *, gated=False, has_bias=False):
        self.generator = torch.Generator().manual_seed(out_size + num_rows)
        self.weight = self.draw(out_size, in_size) * in_size**-0.5
        self.bias = self.draw(out_size) if has_bias else None
        self.gated, self.num_rows = gated, num_rows
        self.x = self.draw_padded(num_rows, in_size)
        width = out_size // 2 if gated else out_size
        self.out = torch.full((num_rows + 1, width), math.nan).bfloat16()
        self.residual = self.in_squares = self.out_squares = None

    def draw(self, *shape):
        return torch.randn(shape, generator=self.generator).bfloat16()

    def draw_padded(self, num_rows, size):
        padded = torch.full((num_rows + 1, size + 8), math.nan).bfloat16()
        padded[:num_rows, :size] = self.draw(num_rows, size)
        return padded[:num_rows, :size]

    def exact(self):
        """float64."""
        x = self.x.double()
        if self.in_squares is not None:
            mean = self.in_squares.double().sum(0)[:, None] / x.shape[1]
            x = x * (mean + EPS).rsqrt()
        out = x @ self.weight.double().T
        if self.bias is not None:
            out += self.bias.double()
        if self.gated:
            gate, up = out.unflatten(1, (-1, 2, 8)).unbind(2)
            out = (F.silu(gate) * up).flatten(1)
        return out if self.residual is None else out + self.residual.double()

    def run(self, emulated, config, padded_rows, *, max_clusters=2, stages=3, seed=0):
        def at(tensor):
            return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())

        def stride(tensor):
            return 0 if tensor is None else tensor.stride(0)

        parts = 0 if self.in_squares is None else len(self.in_squares)
        code = emulated(
            *(at(self.weight), *self.weight.shape, at(self.x), stride(self.x)),
            *(at(self.out), stride(self.out), at(self.bias)),
            *(at(self.residual), stride(self.residual), at(self.out_squares)),
            *(at(self.in_squares), parts, ctypes.c_float(EPS), self.num_rows, int(self.gated)),
            *(*config, padded_rows, max_clusters, stages, seed),
        )
        assert code == 0, "the kernel's threads wait for each other, or end with work left"
        assert self.out[-1].isnan().all(), "wrote behind the last row"
        return self.out[:-1]


def assert_right(found, exact):
    excess = (found.double() - exact).abs() - exact.abs() * (2**-8 + 1e-4)
    assert not excess.isnan().any()
    assert excess.max() < 2e-4, f"{excess.max():.2e} too far"


# groups, splits, sharers; rows of x, padded to
CUTS = [
    (HopperConfig(1, 1, 1), 9, 16),
    (HopperConfig(1, 3, 2), 16, 16),
    (HopperConfig(2, 2, 1), 30, 32),
    (HopperConfig(2, 1, 4), 25, 32),
    (HopperConfig(3, 3, 1), 61, 64),
    (HopperConfig(3, 1, 2), 64, 64),
    (HopperConfig(4, 2, 2), 11, 16),
]
WHOLE = [
    (HopperConfig(3, 1, 1), 211, 224),
    (HopperConfig(3, 1, 2), 224, 224),
    (HopperConfig(3, 1, 1), 201, 208),
]
LARGE = [(HopperConfig(2, 2, 1), 217, 224), (HopperConfig(1, 2, 2), 137, 144)]


@pytest.mark.parametrize(("config", "num_rows", "padded_rows"), [*CUTS, *LARGE, *WHOLE])
@pytest.mark.parametrize("gated", [False, True])
def test_normalised_rows_times_a_weight_equal_float64(
    emulated, config, num_rows, padded_rows, gated
):
    product = Product(320, 192, num_rows, gated=gated, has_bias=num_rows % 2 == 1)
    product.in_squares = torch.rand(19, num_rows, generator=product.generator) * 40
    assert_right(product.run(emulated, config, padded_rows), product.exact())


@pytest.mark.parametrize(("config", "num_rows", "padded_rows"), [*CUTS, *LARGE])
def test_sums_with_a_residual_and_their_squares_equal_float64(
    emulated, config, num_rows, padded_rows
):
    product = Product(320, 192, num_rows, has_bias=num_rows % 2 == 1)
    product.residual = product.draw_padded(num_rows, 320) * 4
    tile_rows = 64 * config.groups
    product.out_squares = torch.full((-(-320 // tile_rows) + 1, num_rows), math.nan)
    found = product.run(emulated, config, padded_rows)
    assert_right(found, product.exact())
    tiles = found.double().square().split(tile_rows, dim=1)
    exact = torch.stack([tile.sum(1) for tile in tiles])
    torch.testing.assert_close(product.out_squares[:-1].double(), exact, rtol=1e-5, atol=0)
    assert product.out_squares[-1].isnan().all(), "wrote behind the last tile"


@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_threads_changes_a_bit(emulated, seed):
    results = []
    for order in (1000, seed):
        product = Product(256, 192, 30)
        product.residual = product.draw_padded(30, 256)
        product.out_squares = torch.full((2, 30), math.nan)
        out = product.run(emulated, HopperConfig(2, 2, 2), 32, stages=2, seed=order)
        results.append((out, product.out_squares))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_plain_products_are_as_they_were(emulated):
    for config, num_rows, padded_rows in CUTS:
        product = Product(320, 192, num_rows)
        assert_right(product.run(emulated, config, padded_rows), product.exact())
