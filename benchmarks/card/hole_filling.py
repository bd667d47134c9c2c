"""Ablation: hole filling against copying all survivors to a new order, in bytes and microseconds.

    python benchmarks/card/hole_filling.py [--keep 2048 --evict 256]

The alternative is what a compaction without hole filling does: every kept slot's key and value is
gathered, in tail order, into the first `num_keep` slots of fresh blocks. It lives here only.
Knows nothing of scores or of the engine.
"""

import argparse
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))

from kernel_timing import Case, measure

from zipage_lang.kernels import compact

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 36, 8, 128, 16


class Tails:
    """One tail per layer on shuffled blocks, a random set of kept slots per head."""

    def __init__(self, num_layers: int, keep: int, evict: int, recent_share: float) -> None:
        tail = keep + evict
        blocks_each = -(-tail // BLOCK_SIZE)
        num_blocks = 2 * num_layers * blocks_each  # the second half is the copy's target
        self.kv = torch.randn(
            num_blocks, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda"
        )
        state = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS)
        self.score = torch.zeros(state, device="cuda")
        self.position = torch.zeros(state, dtype=torch.int32, device="cuda")
        order = torch.randperm(num_blocks, device="cuda").view(2, num_layers, blocks_each)
        offsets = torch.arange(BLOCK_SIZE, device="cuda")
        slots = (order[..., None] * BLOCK_SIZE + offsets).flatten(2)[..., :tail]
        self.slots, self.fresh = slots[0].contiguous(), slots[1].contiguous()
        shape = (num_layers, NUM_KV_HEADS, tail)
        chance = torch.rand(shape, device="cuda")
        chance[..., keep:] += recent_share  # the newer, the likelier to be kept
        self.keep = torch.zeros(shape, dtype=torch.bool, device="cuda")
        self.keep.scatter_(2, chance.topk(keep, dim=2).indices, True)
        self.num_keep = torch.full((num_layers,), keep, device="cuda")
        self.positions = torch.arange(tail, dtype=torch.int32, device="cuda").expand(shape)
        self.positions = self.positions.contiguous()

    @property
    def num_moved(self) -> int:
        return int(self.keep[..., int(self.num_keep[0]) :].sum())


@triton.jit
def _gather_kernel(
    kv, slots, fresh, order, tail, num_keep,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    runs = tl.cdiv(num_keep, PAIRS)
    program = tl.program_id(0) // runs
    row, head = program // HEADS, program % HEADS
    to = tl.program_id(0) % runs * PAIRS + tl.arange(0, PAIRS)
    there = to < num_keep
    place = tl.load(order + program * num_keep + to, mask=there, other=0)
    source = tl.load(slots + row * tail + place, mask=there, other=0)
    target = tl.load(fresh + row * tail + to, mask=there, other=0)
    source = ((source + source // BLOCK_SIZE * BLOCK_SIZE) * HEADS + head) * DIM
    target = ((target + target // BLOCK_SIZE * BLOCK_SIZE) * HEADS + head) * DIM
    dims = tl.arange(0, DIM)
    part = BLOCK_SIZE * HEADS * DIM
    read, write = kv + source[:, None] + dims[None, :], kv + target[:, None] + dims[None, :]
    keys = tl.load(read, mask=there[:, None], other=0.0)
    values = tl.load(read + part, mask=there[:, None], other=0.0)
    tl.store(write, keys, mask=there[:, None])
    tl.store(write + part, values, mask=there[:, None])


def copy_survivors(tails: Tails, order: Tensor) -> None:
    """order: int64 [num_rows, num_kv_heads, num_keep], tail indices of kept slots, ascending."""
    num_keep, pairs = order.shape[2], 32
    grid = (order.shape[0] * order.shape[1] * triton.cdiv(num_keep, pairs),)
    _gather_kernel[grid](
        tails.kv, tails.slots, tails.fresh, order, tails.slots.shape[1], num_keep,
        BLOCK_SIZE=BLOCK_SIZE, HEADS=NUM_KV_HEADS, DIM=HEAD_DIM, PAIRS=pairs, num_warps=4,
    )  # fmt: skip


def survivors(tails: Tails) -> Tensor:
    return tails.keep.nonzero()[:, 2].view(*tails.keep.shape[:2], -1).contiguous()


def rows_at(kv: Tensor, slots: Tensor) -> Tensor:
    """[num_rows, num_slots, 2, num_kv_heads, head_dim] at slots [num_rows, num_slots]."""
    return kv[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE]


def check(keep: int, evict: int) -> None:
    """Both end with the same keys and values per head, in some order; found by sorting."""
    tails = Tails(2, keep, evict, 0.3)
    order = survivors(tails)
    original = rows_at(tails.kv, tails.slots)  # [rows, tail, 2, heads, dim]
    index = order.permute(0, 2, 1)[:, :, None, :, None].expand(-1, -1, 2, -1, HEAD_DIM)
    wanted = original.gather(1, index)
    copy_survivors(tails, order)
    copied = rows_at(tails.kv, tails.fresh[:, :keep])
    assert torch.equal(copied, wanted), "the copy lost a survivor"
    compact.fill_holes(
        tails.kv, tails.score, tails.position, tails.slots, tails.keep, tails.num_keep,
        tails.positions, None,
    )  # fmt: skip
    filled = rows_at(tails.kv, tails.slots[:, :keep])
    position = tails.position.view(-1, NUM_KV_HEADS)[tails.slots[:, :keep]]  # [rows, keep, heads]
    by_age = position.argsort(1)[:, :, None, :, None].expand(-1, -1, 2, -1, HEAD_DIM)
    assert torch.equal(filled.gather(1, by_age), wanted), "hole filling lost a survivor"
    print(f"same survivors, keep {keep} evict {evict}")


def compare(keep: int, evict: int, recent_share: float) -> None:
    tails = Tails(NUM_LAYERS, keep, evict, recent_share)
    order = survivors(tails)
    line = 2 * 2 * HEAD_DIM * 2  # K and V, read and written, bytes
    num_kept = order.numel()
    print(f"keep {keep}, evict {evict}, newest likelier by {recent_share}: "
          f"{tails.num_moved / num_kept:.1%} of the survivors move")  # fmt: skip
    args = (tails.kv, tails.score, tails.position, tails.slots, tails.keep, tails.num_keep)
    state = num_kept * 12 + tails.keep.numel()
    measure(
        Case(
            "fill holes",
            lambda: compact.fill_holes(*args, tails.positions, None),
            tails.num_moved * line + state,
        )
    )
    measure(Case("copy all survivors", lambda: copy_survivors(tails, order), num_kept * line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=int, default=2048)
    parser.add_argument("--evict", type=int, default=256)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    check(100, 37)
    check(chosen.keep, chosen.evict)
    for recent_share in (0.0, 0.3, 1.0):
        compare(chosen.keep, chosen.evict, recent_share)


if __name__ == "__main__":
    main()
