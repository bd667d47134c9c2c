"""Writes keys, values and log-sum-exps into their slots, and copies whole blocks: Triton.

Same acts as `reference/kv_store.py`. Negative slots write nothing, so the padded batches of CUDA
graphs need no other kernel. No launch waits for the device or allocates by what the data says.
Knows nothing of who owns a block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zipage_lang.kernels.dependent_launch import (
    launch_options,
    release_successor,
    wait_for_predecessor,
)
from zipage_lang.kernels.reference import kv_store as reference

TILE_ELEMENTS = 16384  # of copy_blocks: 64 elements a thread at 8 warps
LAYERS_PER_PROGRAM = 8  # of store_lse: 256 numbers at 32 query heads
TILE_COPIES = (16, 128, 1024)  # the last leaves 16 columns a tile, one 32-byte sector of bf16


def store_kv(layer_kv: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write this step's keys and values into one layer's pool, in place; slots below 0 are dropped.

    Moves 4 * num_kv_heads * head_dim elements a token: K and V, each read and written once.

    Args:
        layer_kv: [num_blocks, 2, block_size, num_kv_heads, head_dim], contiguous.
        slots: int64 [num_tokens], block_id * block_size + offset, or negative.
        k, v: [num_tokens, num_kv_heads, head_dim]; each token's heads lie side by side.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    row_size = num_kv_heads * head_dim
    assert k.shape == v.shape, (k.shape, v.shape, slots.shape)
    assert slots.shape == (num_tokens,), (k.shape, v.shape, slots.shape)
    assert k.dtype == v.dtype == layer_kv.dtype, (k.dtype, v.dtype, layer_kv.dtype)
    assert slots.dtype == torch.int64, (slots.dtype, slots.stride())
    assert slots.is_contiguous(), (slots.dtype, slots.stride())
    _check_pool(layer_kv, num_kv_heads, head_dim)
    _check_rows(k)
    _check_rows(v)
    if num_tokens == 0:
        return
    _store_kv_kernel[(num_tokens,)](
        layer_kv,
        slots,
        k,
        v,
        k.stride(0),
        v.stride(0),
        BLOCK_SIZE=layer_kv.shape[2],
        ROW=row_size,
        BLOCK=triton.next_power_of_2(row_size),
        num_warps=_num_warps(row_size),
    )


def store_lse(ring_lse: Tensor, ring_slots: Tensor, lse: Tensor) -> None:
    """Keep the log-sum-exps of the step's kept queries, of all layers in one launch, in place.

    Moves 8 * num_layers * num_q_heads bytes a kept token.

    Args:
        ring_lse: float32 [num_layers, num_entries, num_q_heads], base 2, contiguous.
        ring_slots: int64 [num_tokens], distinct entries, or negative: that token is dropped.
        lse: float32 [num_layers, num_tokens, num_q_heads], base 2, contiguous.
    """
    num_layers, num_tokens, num_q_heads = lse.shape
    assert (len(ring_lse), ring_lse.shape[2]) == (num_layers, num_q_heads), (
        ring_lse.shape,
        lse.shape,
    )
    assert lse.dtype == ring_lse.dtype == torch.float32, (lse.dtype, ring_lse.dtype)
    assert ring_slots.shape == (num_tokens,), (ring_slots.shape, lse.shape)
    assert ring_slots.dtype == torch.int64, ring_slots.dtype
    for tensor in (ring_lse, ring_slots, lse):
        assert tensor.is_contiguous(), (tensor.shape, tensor.stride())
    if num_tokens == 0:
        return
    _store_lse_kernel[(num_tokens, triton.cdiv(num_layers, LAYERS_PER_PROGRAM))](
        ring_lse,
        ring_slots,
        lse,
        ring_lse.stride(0),
        lse.stride(0),
        num_layers,
        NUM_HEADS=num_q_heads,
        LAYERS=LAYERS_PER_PROGRAM,
        BLOCK_HEADS=triton.next_power_of_2(num_q_heads),
        num_warps=2,
        **launch_options(lse.device),
    )


def copy_blocks(pools: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy whole blocks within each pool, for all layers, in place: one launch a pool.

    A program owns some columns of one layer in every copied block. It reads them from all of src
    before it writes any of dst, so chains (a block both read and written) come out as in the twin.
    Tiles are made for few numbers of copies, so that few kernels are compiled; above the largest
    the blocks go through a buffer, layer by layer.

    Args:
        pools: tensors [num_layers, num_blocks, ...], contiguous from the third axis on.
        src, dst: int64 [num_copies]; dst distinct.
    """
    num_copies = len(src)
    assert src.shape == dst.shape, (src.shape, dst.shape)
    assert src.dtype == dst.dtype == torch.int64, (src.shape, dst.shape)
    assert src.is_contiguous(), (src.stride(), dst.stride())
    assert dst.is_contiguous(), (src.stride(), dst.stride())
    if num_copies == 0:
        return
    for pool in pools:
        if num_copies <= TILE_COPIES[-1]:
            _copy_pool(pool, src, dst)
        else:
            for layer in pool.split(1):
                reference.copy_blocks([layer], src, dst)


def _copy_pool(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    assert pool[0, 0].is_contiguous(), (pool.shape, pool.stride())
    num_copies, row_size = len(src), pool[0, 0].numel()
    copies = next(size for size in TILE_COPIES if size >= num_copies)
    columns = min(TILE_ELEMENTS // copies, 2048, triton.next_power_of_2(row_size))
    _copy_blocks_kernel[(triton.cdiv(row_size, columns), len(pool))](
        pool,
        src,
        dst,
        num_copies,
        row_size,
        pool.stride(0),
        pool.stride(1),
        COPIES=copies,
        COLUMNS=columns,
        num_warps=8 if copies * columns >= 4096 else 4,
    )


def _check_pool(layer_kv: Tensor, num_kv_heads: int, head_dim: int) -> None:
    assert layer_kv.shape[1] == 2, layer_kv.shape
    assert layer_kv.shape[3:] == (num_kv_heads, head_dim), (layer_kv.shape, num_kv_heads, head_dim)
    assert layer_kv.is_contiguous(), layer_kv.stride()


def _check_rows(heads: Tensor) -> None:
    assert heads.stride(2) == 1, heads.stride()
    assert heads.stride(1) == heads.shape[2], heads.stride()


def _num_warps(row_size: int) -> int:
    """8 bf16 elements (16 bytes) a thread, between 1 and 8 warps."""
    return min(8, max(1, triton.next_power_of_2(row_size) // 256))


@triton.jit
def _store_kv_kernel(
    pool,
    slots,
    k,
    v,
    k_stride,
    v_stride,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        columns = tl.arange(0, BLOCK)
        in_row = columns < ROW
        key = tl.load(k + token * k_stride + columns, mask=in_row)
        value = tl.load(v + token * v_stride + columns, mask=in_row)
        # a block holds BLOCK_SIZE rows of keys, then as many of values
        key_row = slot + (slot // BLOCK_SIZE) * BLOCK_SIZE
        tl.store(pool + key_row * ROW + columns, key, mask=in_row)
        tl.store(pool + (key_row + BLOCK_SIZE) * ROW + columns, value, mask=in_row)


@triton.jit
def _store_lse_kernel(
    ring_lse,
    ring_slots,
    lse,
    ring_stride,
    lse_stride,
    num_layers,
    NUM_HEADS: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    release_successor(PDL)
    wait_for_predecessor(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(ring_slots + token)
    if slot >= 0:
        layers = tl.program_id(1).to(tl.int64) * LAYERS + tl.arange(0, LAYERS)
        heads = tl.arange(0, BLOCK_HEADS)
        mask = (layers < num_layers)[:, None] & (heads < NUM_HEADS)[None, :]
        source = lse + layers[:, None] * lse_stride + token * NUM_HEADS + heads[None, :]
        target = ring_lse + layers[:, None] * ring_stride + slot * NUM_HEADS + heads[None, :]
        tl.store(target, tl.load(source, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["num_copies"], do_not_specialize_on_alignment=["src", "dst"])
def _copy_blocks_kernel(
    pool,
    src,
    dst,
    num_copies,
    row_size,
    layer_stride,
    block_stride,
    COPIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    copies = tl.arange(0, COPIES)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    layer = pool + tl.program_id(1).to(tl.int64) * layer_stride
    is_copy = copies < num_copies
    sources = tl.load(src + copies, mask=is_copy, other=0).to(tl.int64)
    targets = tl.load(dst + copies, mask=is_copy, other=0).to(tl.int64)
    mask = is_copy[:, None] & (columns < row_size)[None, :]
    tile = tl.load(layer + sources[:, None] * block_stride + columns[None, :], mask=mask)
    tl.debug_barrier()  # every thread has read before any writes
    tl.store(layer + targets[:, None] * block_stride + columns[None, :], tile, mask=mask)
