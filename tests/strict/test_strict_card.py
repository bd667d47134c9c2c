"""Strict mode's Triton kernels, interpreted without a card, compiled with one; engines on a card.

Bit by bit: each row alone against the same row in batches of every kind.
"""

import json

import pytest
import torch

pytest.importorskip("triton", reason="Triton kernels are tested where triton is installed")

from test_support.strict_steps import HEADS, check_attention, drawn, steps

from zipage_lang.kernels.strict_attention import StrictCardAttention
from zipage_lang.kernels.strict_products import ROWS, row_product, tile_columns

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_size", "out_size"), [(72, 216), (150, 72), (33, 7)])
def test_a_row_of_a_product_is_the_same_in_any_batch(device, dtype, in_size, out_size):
    weight = drawn(out_size, in_size, dtype=dtype).to(device)
    bias = drawn(out_size, seed=1, dtype=dtype).to(device)
    x = drawn(150, in_size, seed=2, dtype=dtype).to(device)
    whole = row_product(x, weight, bias)
    near = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(whole.double(), near, atol=0.3, rtol=3e-2)
    for start, end in ((0, 1), (3, 5), (17, 40), (60, 70), (64, 128), (100, 150), (149, 150)):
        assert torch.equal(row_product(x[start:end], weight, bias), whole[start:end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "block_size"), [*zip(HEADS, (16, 1, 64, 4), strict=True)])
def test_a_token_attends_alike_alone_and_in_any_chunk(device, dtype, heads, block_size):
    q, layer_kv, batch = steps(dtype, heads, block_size)
    kernels = StrictCardAttention(device)
    check_attention(kernels, q.to(device), layer_kv.to(device), batch, heads, block_size, every=60)


def test_a_tile_is_chosen_by_the_weight_alone():
    """`row_product` knows no other choice, and a wide weight gets wide tiles."""
    assert ROWS == 64
    assert [tile_columns(size) for size in (8, 4096, 8192, 151_936)] == [32, 32, 64, 128]


@pytest.mark.gpu
@pytest.mark.parametrize(("in_size", "out_size"), [(4096, 6144), (12_288, 4096), (4096, 151_936)])
def test_every_batch_size_agrees_at_real_sizes(in_size, out_size):
    weight = drawn(out_size, in_size, dtype=torch.bfloat16).cuda()
    x = drawn(700, in_size, seed=2, dtype=torch.bfloat16).cuda()
    whole = row_product(x, weight, None)
    for num_rows in (1, 2, 7, 16, 64, 65, 128, 200, 512):
        for start in (0, 13, 700 - num_rows):
            end = start + num_rows
            if end <= 700:
                assert torch.equal(row_product(x[start:end], weight, None), whole[start:end])


CROWD_OPTIONS = [
    {},
    {"cuda_graphs": False},
    {"overlap": False},
    {"max_chunk_len": 5, "max_step_tokens": 48},
    {"num_blocks": 40, "swap_space": 0},
    {"num_blocks": 40, "swap_space": 0.01, "turn_len": 4},
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", CROWD_OPTIONS, ids=str)
def test_company_changes_no_bit_on_a_card(make_lab, crowd, dtype, options):
    """Alone without graphs and cache, and in company under every option, it says the same."""
    shared = {"backend": "cuda", "dtype": dtype, "block_size": 4, "max_running": 16}
    lone_lab = make_lab(**shared, prefix_caching=False, cuda_graphs=False, overlap=False)
    alone = {}
    for request in crowd:
        alone |= lone_lab.say([request])
    lab = make_lab(**{**shared, **options})
    assert lab.say(crowd[:4], late=crowd[4:]) == alone
    assert lab.engine.stats()["num_compactions"] > 0


@pytest.mark.gpu
def test_without_the_mode_company_shows_on_a_card(make_lab, small_model, crowd, tmp_path):
    """On heads that FlashInfer attends to, which strict mode does without."""
    shape = json.loads((small_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shape | {"head_dim": 64}))
    usual = {"model": str(tmp_path), "deterministic": False, "prefix_caching": False}
    lab = make_lab(backend="cuda", dtype="bfloat16", **usual)
    together = lab.say(crowd)
    apart = {}
    for request in crowd:
        apart |= lab.say([request])
    assert together != apart
