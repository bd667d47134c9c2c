"""FlashInfer's paged attention below its wrappers: one compiled module, planned and run directly.

Knows nothing of requests, of batches, or of who owns a buffer.

FlashInfer's wrapper classes own their buffers, allocate in every plan, read device tensors back to
the host and, under CUDA graphs, always split and merge. The module they stand on does none of this.
Its calls are not a stable interface, so the version is checked. Its prefill kernel with query tiles
of 16 rows is also FlashInfer's tensor-core decode. It is compiled with a variant of our own, which
is how FlashInfer is meant to be extended; what the kernel computes is FlashInfer's.
"""

import enum
from typing import NamedTuple

import torch
from torch import Tensor

from zipage_lang.kernels.flashinfer_build import Libraries, Variant

DECODE_TILE_ROWS = 16  # query rows of the smallest tile; a row is one token and one query head
ELEMENT_BYTES = 2  # bfloat16 or float16

_NON_CAUSAL, _CAUSAL = 0, 1  # flashinfer MaskMode
_NHD = 0  # flashinfer TensorLayout
_NO_WINDOW = -1


class Heads(NamedTuple):
    """The shape of queries and pool, as `plan_attention` is told."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


class SequenceIndex(NamedTuple):
    """Where each sequence's queries and slots are; all int32, on the host or on the device."""

    q_starts: Tensor  # [num_seqs + 1]
    block_starts: Tensor  # [num_seqs + 1], into block_ids
    last_block_lens: Tensor  # [num_seqs], slots used in the last block, 1 to block_size
    block_ids: Tensor  # [block_starts[-1]]


class PlanInfo(NamedTuple):
    """FlashInfer's PrefillPlanInfo, in its order. Places are in bytes, 0 where nothing is read."""

    padded_batch_size: int  # work items
    total_num_rows: int
    total_num_rows_offset: int
    cta_tile_q: int
    request_indices_offset: int
    qo_tile_indices_offset: int
    kv_tile_indices_offset: int
    merge_indptr_offset: int
    o_indptr_offset: int
    kv_chunk_size_ptr_offset: int
    v_offset: int
    s_offset: int
    block_valid_mask_offset: int
    enable_cuda_graph: int
    split_kv: int


class Splits(enum.Enum):
    """When a sequence's slots are divided among multiprocessors, and the parts merged."""

    WHERE_IDLE = enum.auto()  # where rows alone don't fill the card
    ALWAYS = enum.auto()  # into a launch as large as any batch of as many rows may need
    NEVER = enum.auto()


class LaunchPlan(NamedTuple):
    """How a launch is divided; plain numbers, so that two plans can be compared."""

    info: PlanInfo  # what `plan` returned, passed back as it is
    is_causal: bool


def unsplit_launch(
    *,
    num_items: int,
    num_rows: int,
    item_entries: int,
    item_tiles: int,
    item_chunks: int,
    out_starts: int,
    chunk_len: int,
) -> LaunchPlan:
    """A launch over a list of work items that we wrote ourselves: small tiles, nothing split.

    The kernel runs once for each item and KV head, whatever the items say.

    Args:
        num_items, num_rows: work items, and rows of q.
        item_entries, item_tiles, item_chunks, out_starts, chunk_len: where these begin in the index
            workspace, in int32 numbers. item_*: [num_items]; out_starts: first output row of each
            sequence, which need not be its first row of q; chunk_len: one number, above any length.
    """
    info = PlanInfo(
        padded_batch_size=num_items,
        total_num_rows=num_rows,
        total_num_rows_offset=0,
        cta_tile_q=DECODE_TILE_ROWS,
        request_indices_offset=4 * item_entries,
        qo_tile_indices_offset=4 * item_tiles,
        kv_tile_indices_offset=4 * item_chunks,
        merge_indptr_offset=0,
        o_indptr_offset=4 * out_starts,
        kv_chunk_size_ptr_offset=4 * chunk_len,
        v_offset=0,
        s_offset=0,
        block_valid_mask_offset=0,
        enable_cuda_graph=0,
        split_kv=0,
    )
    return LaunchPlan(info, is_causal=False)


class PagedAttentionModule:
    """Plans and runs paged attention for one dtype and head size."""

    def __init__(self, dtype: torch.dtype, head_dim: int) -> None:
        """Raises as `Libraries.load`."""
        self._module = GENERAL.load(dtype, head_dim)

    def plan(
        self,
        workspaces: tuple[Tensor, Tensor, Tensor],
        index: SequenceIndex,
        kv_lens: Tensor,
        heads: Heads,
        *,
        is_causal: bool,
        splits: Splits,
    ) -> LaunchPlan:
        """Divide a batch among the multiprocessors; enqueues one copy on the current stream.

        Args:
            workspaces: uint8: float workspace (device), index workspace (device), and the pinned
                host memory the index workspace is copied from, which must stay as it is until then.
            index, kv_lens: int32 host tensors.
            is_causal: whether a sequence's tokens see different slots.
            splits: with NEVER, and with ALWAYS, a captured launch fits all batches of as many rows.
        """
        num_seqs = len(kv_lens)
        info = self._module.plan(
            *workspaces,
            index.q_starts,
            index.block_starts,
            kv_lens,
            int(index.q_starts[-1]),
            num_seqs,
            heads.num_q_heads,
            heads.num_kv_heads,
            heads.block_size,
            splits is Splits.ALWAYS,
            heads.head_dim,
            heads.head_dim,
            is_causal,
            _NO_WINDOW,
            -1,  # split size: FlashInfer's own choice
            splits is Splits.NEVER,
            0,  # no other kernel shares the card
        )
        return LaunchPlan(PlanInfo(*(int(number) for number in info)), is_causal)

    def run(
        self,
        workspaces: tuple[Tensor, Tensor],
        launch: LaunchPlan,
        q: Tensor,
        layer_kv: Tensor,
        index: SequenceIndex,
        out: Tensor,
        lse: Tensor | None,
        scale: float,
    ) -> None:
        """Attention of q into `out` and, when given, the base-2 log-sum-exp into `lse`.

        Args:
            workspaces: the float and the index workspace that `launch` was planned with.
            q: [num_tokens, num_q_heads, head_dim]; its last axis must be contiguous.
            layer_kv: [num_blocks, 2, block_size, num_kv_heads, head_dim].
            index: int32 device tensors.
            out: [num_tokens, num_q_heads, head_dim], contiguous; longer where the launch has more
                output rows than q has.
            lse: float32 [num_tokens, num_q_heads], contiguous; never longer, since FlashInfer
                compares it with q: a view, in memory that goes on behind it as `out` does.
        """
        keys, values = layer_kv.unbind(1)  # [num_blocks, block_size, num_kv_heads, head_dim] each
        self._module.paged_run(
            *workspaces,
            launch.info,
            q,
            keys,
            values,
            index.q_starts,
            index.block_starts,
            index.block_ids,
            index.last_block_lens,
            out,
            lse,
            _CAUSAL if launch.is_causal else _NON_CAUSAL,
            _NHD,
            _NO_WINDOW,
            True,  # may start while its predecessor drains; it waits before it reads q and the pool
            scale,
            int(releases_early(launch.info, layer_kv.shape[3])),
        )


# What differs from FlashInfer's own: asked to, a launch lets the kernel behind it start as soon as
# all of its CTAs have, on multiprocessors that they leave one by one; FlashInfer lets it when they
# end. The kernel behind must wait for this one before it reads anything but constants.
_SOURCE = """
#include <flashinfer/attention/variants.cuh>
struct ReleasingAttention : DefaultAttention<false, false, false, false> {
  template <typename Params>
  __device__ __host__ ReleasingAttention(const Params& params, uint32_t batch_idx,
                                         uint8_t* smem_ptr)
      : DefaultAttention<false, false, false, false>(params, batch_idx, smem_ptr) {
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 900)
    if (params.releases_early) asm volatile("griddepcontrol.launch_dependents;");
#endif
  }
};
"""
_SCALARS = {"sm_scale": "double", "releases_early": "int64_t"}
GENERAL = Libraries(
    "FlashInfer's attention",
    "zipage_attention",
    Variant("fa2", "ReleasingAttention", _SOURCE, _SCALARS),
    "about half a minute on 16 cores",
)
# (Row, KV head) pairs of decodes that are faster so: more than an H200 has multiprocessors, up to
# 192 rows of 8 heads. Within a step of 36 layers it saves 0.07 to 0.17 ms (64 to 160 rows; 192
# rows: none or 0.17); from 20 rows on `benchmarks/card/decode_ways.py` shows it.
RELEASING_PAIRS = range(133, 192 * 8 + 1)


def releases_early(info: PlanInfo, num_kv_heads: int) -> bool:
    """Not where it splits: FlashInfer's merge would wait on the card, and releases last itself."""
    is_whole_decode = info.cta_tile_q == DECODE_TILE_ROWS and not info.split_kv
    return is_whole_decode and info.total_num_rows * num_kv_heads in RELEASING_PAIRS
