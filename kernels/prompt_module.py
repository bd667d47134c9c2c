"""FlashInfer's attention for Hopper below its wrappers: chunks of prompts, on wgmma.

Its kernel takes a tile of tokens and one query head at a time; `prompt_choice.py` says where that
is faster than the general one (`flashinfer_module.py`). Knows nothing of requests, of batches,
or of who owns a buffer.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from zipage_lang.kernels.flashinfer_build import Libraries, Variant
from zipage_lang.kernels.flashinfer_module import Heads, SequenceIndex

HEAD_DIMS = (64, 128)  # those that are tested
ITEM_BYTES = 7 * 4  # of the index workspace, for each work item

_CAUSAL = 1  # flashinfer MaskMode
_NHD = 0  # flashinfer TensorLayout
_NO_WINDOW = -1
_SOURCE = "#include <flashinfer/attention/hopper/variants.cuh>"
FOR_HOPPER = Libraries(
    "FlashInfer's attention of prompts",
    "zipage_prompts",
    Variant("fa3", "DefaultAttention<false>", _SOURCE, {"sm_scale": "double"}),
    "about a minute on 16 cores",
)


class PromptLaunch(NamedTuple):
    """How a launch is divided: what FlashInfer's plan returned, passed back as it is."""

    info: tuple[int, ...]


class PromptModule:
    """Plans and runs paged attention of several tokens a sequence for one dtype and head size."""

    def __init__(self, dtype: torch.dtype, head_dim: int) -> None:
        """Raises as `Libraries.load`."""
        self._module = FOR_HOPPER.load(dtype, head_dim)

    def plan(
        self,
        workspaces: tuple[Tensor, Tensor, Tensor],
        index: SequenceIndex,
        kv_lens: Tensor,
        heads: Heads,
    ) -> PromptLaunch:
        """Divide a batch among the multiprocessors; enqueues one copy on the current stream.

        Args:
            workspaces: uint8: float workspace (device; nothing is written there), index workspace
                (device), and the pinned host memory the index workspace is copied from, which must
                stay as it is until then.
            index, kv_lens: int32 host tensors.
        """
        info = self._module.plan(
            *workspaces,
            index.q_starts,
            index.block_starts,
            kv_lens,
            int(index.q_starts[-1]),
            len(kv_lens),
            heads.num_q_heads,
            heads.num_kv_heads,
            heads.block_size,
            False,  # not for a graph
            heads.head_dim,
            heads.head_dim,
            True,  # causal
            _NO_WINDOW,
        )
        return PromptLaunch(tuple(int(number) for number in info))

    def run(
        self,
        workspaces: tuple[Tensor, Tensor],
        launch: PromptLaunch,
        q: Tensor,
        layer_kv: Tensor,
        index: SequenceIndex,
        out: Tensor,
        lse: Tensor | None,
        scale: float,
    ) -> None:
        """Attention of q into `out` and, when given, the base-2 log-sum-exp into `lse`.

        Begins when the kernel ahead of it in the stream has ended; arguments as those of
        `PagedAttentionModule.run`, with as many rows of `out` as of q.
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
            _CAUSAL,
            _NHD,
            _NO_WINDOW,
            False,  # it has no way to begin while its predecessor drains
            scale,
        )
