"""Decode attention's own source run on a CPU, against float64: whole pairs, parts, padding, NaN.

The stand-in (`attention_stand_in`, on `product_stand_in`'s) runs all threads of several CTAs in
turn, in any order that barriers allow. It finds wrong indices, fragments, parities and missing
barriers, not what only the card can tell. Knows nothing of models.
"""

import ctypes
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from test_support.stand_in_build import build

from zipage_lang.kernels import hopper
from zipage_lang.kernels.decode_items import divide

SOURCES = Path(hopper.__file__).resolve().parent
STAND_INS = Path(__file__).resolve().parent
SCALE = 0.11
OWN_OF_A_CTA = {  # what the stand-in has one of for each CTA
    "extern __shared__ char": "extern char",
    "alignas(16) __shared__ StageNote notes[T::kStages];": (
        "static StageNote all_notes[kMaxCtas][T::kStages];"
        " StageNote* const notes = all_notes[own_cta()];"
    ),
    "__shared__ Meeting meeting;": (
        "static zl::Meeting all_meetings[kMaxCtas]; zl::Meeting& meeting = all_meetings[own_cta()];"
    ),
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """The C function of the stand-in."""
    folder = tmp_path_factory.mktemp("attention")
    for name in ("attention_params.cuh", "ring.cuh"):
        shutil.copy(SOURCES / name, folder)
    text = (SOURCES / "attention_kernel.cuh").read_text()
    for declared, own in OWN_OF_A_CTA.items():
        assert text.count(declared) == 1, declared
        text = text.replace(declared, own)
    (folder / "attention_kernel.cuh").write_text(text)
    for name in ("ptx.cuh", "cuda_bf16.h", "cluster.h"):
        shutil.copy(STAND_INS / "product_stand_in" / name, folder)
    for source in (STAND_INS / "attention_stand_in").iterdir():
        shutil.copy(source, folder)
    shutil.copy(STAND_INS / "slim_product.h", folder)
    return build(folder, "-include", "ptx.cuh").emulate


class Decodes:
    """Rows of these lengths in blocks all over a pool, NaN in every slot that is no row's."""

    def __init__(self, kv_lens, heads, group, dim, seed=0, num_padding=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.kv_lens = np.array(kv_lens, dtype=np.int32)
        self.heads, self.group, self.dim, self.num_padding = heads, group, dim, num_padding
        num_blocks = -(-self.kv_lens // 16)
        pool_blocks = 1 + int(num_blocks.sum()) + 3
        order = 1 + torch.randperm(pool_blocks - 1, generator=self.generator)
        self.block_ids = torch.cat([order[: num_blocks.sum()], torch.zeros(num_padding)]).int()
        self.pool = torch.full((pool_blocks, 2, 16, heads, dim), math.nan).bfloat16()
        self.pool[0] = 0.5
        self.tables = self.block_ids[: num_blocks.sum()].split(num_blocks.tolist())
        for table, length in zip(self.tables, kv_lens, strict=True):
            for index, block in enumerate(table.tolist()):
                there = min(16, length - 16 * index)
                self.pool[block, :, :there] = self.draw(2, there, heads, dim)
        num_rows = len(kv_lens) + num_padding
        self.q = torch.full((num_rows, heads * group * dim + 8), math.nan).bfloat16()
        self.q[:, :-8] = self.draw(num_rows, heads * group * dim) * 3

    def draw(self, *shape):
        return torch.randn(shape, generator=self.generator).bfloat16()

    def exact(self):
        """float64 [num_rows, heads * group, dim] and base-2 log-sum-exps."""
        outs, lses = [], []
        for row, (table, length) in enumerate(zip(self.tables, self.kv_lens, strict=True)):
            keys, values = (
                self.pool[table.long()].double().transpose(0, 1).flatten(1, 2)[:, :length]
            )
            q = self.q[row, :-8].double().view(self.heads, self.group, self.dim)
            scores = torch.einsum("hgd,shd->hgs", q, keys) * SCALE
            outs.append(torch.einsum("hgs,shd->hgd", scores.softmax(-1), values).flatten(0, 1))
            lses.append(scores.logsumexp(-1).flatten() / math.log(2))
        return torch.stack(outs), torch.stack(lses)

    def run(self, emulated, num_ctas, *, items_ctas=None, seed=0, lse=True):
        items = divide(self.kv_lens, self.heads, items_ctas or num_ctas, self.num_padding, 16)
        num_rows, query_heads = len(self.q), self.heads * self.group
        out = torch.full((num_rows + 1, query_heads, self.dim), math.nan).bfloat16()
        lses = torch.full((num_rows, query_heads), math.nan)
        queue = torch.zeros(2, dtype=torch.int32)
        parts = max(items.num_parts, 1)
        arrived = torch.zeros(parts, dtype=torch.int32)
        sums = torch.full((parts, self.group, self.dim), math.nan)
        stats = torch.full((parts, self.group, 2), math.nan)
        numbers = torch.full((len(items.numbers) + num_ctas, 8), -1, dtype=torch.int32)
        numbers[:-num_ctas] = torch.from_numpy(items.numbers)
        count = torch.tensor([len(items.numbers)], dtype=torch.int32)

        def at(tensor):
            return ctypes.c_void_p(tensor.data_ptr())

        code = emulated(
            *(at(self.pool), len(self.pool), at(self.q), self.q.stride(0), at(out)),
            *(at(lses) if lse else ctypes.c_void_p(None), at(count), at(numbers)),
            *(at(self.block_ids), at(queue), at(arrived), at(sums), at(stats)),
            *(self.heads, self.group, self.dim, ctypes.c_float(SCALE / math.log(2))),
            *(num_ctas, seed),
        )
        assert code == 0, "the kernel's threads wait for each other, or end with work left"
        assert not queue.any()
        assert not arrived.any()
        assert out[-1].isnan().all()
        return out[:-1], lses, items


def assert_right(decodes, out, lses):
    exact, exact_lses = decodes.exact()
    own = slice(0, len(exact))
    assert ((out[own].double() - exact).abs() <= exact.abs() * 2**-7 + 6e-3).all()
    assert ((lses[own].double() - exact_lses).abs() < 1e-4).all()
    assert out.isfinite().all()


CASES = [
    ([1], 1, 1, 64),
    ([16, 17, 63, 64, 65], 2, 4, 64),
    ([300], 1, 8, 128),
    ([5, 200, 129], 2, 3, 128),
    ([700, 30, 31, 32], 1, 2, 64),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_ctas", [1, 5, 8])
def test_decodes_equal_float64(emulated, case, num_ctas):
    decodes = Decodes(*case)
    out, lses, _ = decodes.run(emulated, num_ctas)
    assert_right(decodes, out, lses)


def test_parts_and_whole_pairs_lie_side_by_side(emulated):
    decodes = Decodes([620, 600, 580, 640, 610], 1, 4, 64)
    out, lses, items = decodes.run(emulated, 4)
    assert {1} < set(items.numbers[:, 7].tolist())
    assert_right(decodes, out, lses)


def test_padding_rows_change_no_bit_of_the_others_and_leave_no_nan(emulated):
    results = []
    for num_padding in (0, 3):
        decodes = Decodes([130, 64, 200], 2, 4, 64, num_padding=num_padding)
        decodes.q[:3, :-8] = Decodes([130, 64, 200], 2, 4, 64).q[:3, :-8]
        out, lses, _ = decodes.run(emulated, 6)
        assert_right(decodes, out, lses)
        results.append((out[:3], lses[:3]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_threads_and_no_number_of_ctas_changes_a_bit(emulated, seed):
    decodes = Decodes([330, 90, 200], 1, 4, 64)
    first = decodes.run(emulated, 8, items_ctas=8, seed=1000)
    for num_ctas in (2, 5, 8):
        other = decodes.run(emulated, num_ctas, items_ctas=8, seed=seed)
        assert torch.equal(first[0], other[0])
        assert torch.equal(first[1], other[1])


def test_log_sum_exps_are_left_out_where_nobody_wants_them(emulated):
    decodes = Decodes([100, 40], 2, 4, 64)
    with_lses, without = (decodes.run(emulated, 4, lse=lse) for lse in (True, False))
    assert torch.equal(with_lses[0], without[0])
    assert without[1].isnan().all()


def test_weights_far_apart_do_not_overflow(emulated):
    decodes = Decodes([200, 70], 1, 4, 64)
    decodes.q *= 40
    out, lses, _ = decodes.run(emulated, 4)
    exact, exact_lses = decodes.exact()
    assert out.isfinite().all()
    assert ((lses.double() - exact_lses).abs() <= exact_lses.abs() * 1e-4).all()
    assert (out.double() - exact).abs().max() < 0.05
