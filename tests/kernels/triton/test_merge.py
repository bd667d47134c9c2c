"""The Triton merge of own and shared attention against its twin, which is held against float64."""

import pytest
import torch

from zipage_lang.kernels import merge
from zipage_lang.kernels.reference import merge as reference


def make_parts(device, dtype, num_rows, num_heads, head_dim):
    """NaN in the shared half of the rows that have none; log-sum-exps far apart in places.

    The first row has a shared half, the last of several has none; the others draw.
    """
    generator = torch.Generator().manual_seed(num_rows * num_heads + head_dim)
    out = torch.randn(2 * num_rows, num_heads, head_dim, generator=generator).to(dtype)
    lse = torch.randn(2 * num_rows, num_heads, generator=generator) * 30
    lse[0], lse[num_rows] = 200.0, -200.0
    has_shared = (torch.rand(num_rows, generator=generator) < 0.6).int()
    has_shared[-1], has_shared[0] = 0, 1
    without = num_rows + (has_shared == 0).nonzero().flatten()
    out[without], lse[without] = torch.nan, torch.nan
    return out.to(device), lse.to(device), has_shared.to(device)


def exact(out, lse, has_shared):
    num_rows = len(has_shared)
    outs, lses = out[:num_rows].double(), lse[:num_rows].double()
    for row in has_shared.nonzero().flatten().tolist():
        parts = lse[[row, num_rows + row]].double()  # [2, num_heads]
        lses[row] = (parts * torch.log(torch.tensor(2.0).double())).logsumexp(0) / torch.log(
            torch.tensor(2.0).double()
        )
        weights = torch.exp2(parts - lses[row])
        outs[row] = (out[[row, num_rows + row]].double() * weights[..., None]).sum(0)
    return outs, lses


SHAPES = [(1, 1, 4), (5, 3, 6), (34, 32, 128), (7, 12, 64), (3, 9, 256)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_merge_parts_equals_its_twin_and_float64(device, dtype, shape):
    parts = make_parts(device, dtype, *shape)
    num_rows = shape[0]
    wanted = exact(*(part.cpu() for part in parts))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    for merge_parts in (merge.merge_parts, reference.merge_parts):
        out, lse = parts[0].clone(), torch.full_like(parts[1][:num_rows], torch.nan)
        merge_parts(out, parts[1], parts[2], lse)
        found = out[:num_rows].cpu(), lse.cpu()
        torch.testing.assert_close(found[0], wanted[0].to(dtype), **tolerance)
        torch.testing.assert_close(found[1], wanted[1].float(), rtol=1e-5, atol=1e-5)


def test_rows_without_a_shared_part_keep_every_bit(device):
    out, lse, has_shared = make_parts(device, torch.bfloat16, 9, 4, 16)
    before, merged_lse = out.clone(), torch.full_like(lse[:9], torch.nan)
    merge.merge_parts(out, lse, has_shared, merged_lse)
    kept = (has_shared == 0).nonzero().flatten()
    assert len(kept) > 0
    assert torch.equal(out[kept], before[kept])
    assert torch.equal(merged_lse[kept], lse[kept])
    assert torch.equal(out[9:].isnan(), before[9:].isnan())
