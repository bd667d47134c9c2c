"""The Triton layout of tails against its twin: equal to the bit."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton kernels are tested where triton is installed")

from zipage_lang.kernels import tails
from zipage_lang.kernels.backend import TailRequests
from zipage_lang.kernels.reference import tails as reference

NUM_LAYERS, NUM_BLOCKS, WINDOW = 3, 90, 8


def requests(tail_lens, block_size, num_queries, device):
    """Tails that begin inside a block; the first was never compacted, the last wholly."""
    generator = torch.Generator().manual_seed(sum(tail_lens) + block_size)
    order = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    lines = []
    for row, tail_len in enumerate(tail_lens):
        offset = row % block_size
        stateful_len = tail_len * row // max(len(tail_lens) - 1, 1)
        facts = [offset, tail_len, tail_len, stateful_len, 1000 + tail_len, 2**62 + row, row]
        num_blocks = -(-(offset + tail_len) // block_size)
        blocks = [order.pop() for _ in range(num_blocks)]
        lines.append([*facts, min(num_queries, row + 1), *blocks])
    longest = max(map(len, lines))
    padded = [line + [-1] * (longest - len(line)) for line in lines]
    return TailRequests(torch.tensor(padded, device=device), max(tail_lens), num_queries, WINDOW)


@pytest.mark.parametrize(
    ("tail_lens", "block_size", "num_heads", "num_queries"),
    [((40,), 16, 1, 0), ((300, 17, 1), 64, 3, 5), ((64, 63), 16, 8, 8), ((33, 20), 1, 2, 1)],
)
def test_expand_tails_equals_its_twin(device, tail_lens, block_size, num_heads, num_queries):
    wanted = requests(tail_lens, block_size, num_queries, device)
    shape = (NUM_LAYERS, NUM_BLOCKS, block_size, num_heads)
    positions = torch.randint(1 << 20, shape, dtype=torch.int32).to(device)
    for first_layer, num_layers in ((0, NUM_LAYERS), (1, 1)):
        args = (wanted, positions, first_layer, num_layers, 4 * WINDOW)
        found, expected = tails.expand_tails(*args), reference.expand_tails(*args)
        for name, part, twin in zip(expected._fields, found, expected, strict=True):
            assert part.dtype == twin.dtype, name
            assert torch.equal(part, twin), name
