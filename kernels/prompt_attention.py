"""Attention of prompts by FlashInfer's kernel for Hopper, where this card and its build have it.

Knows nothing of requests, of decodes, or of when another kernel is the faster one.
"""

import dataclasses
import logging

import torch
from torch import Tensor

from zipage_lang.kernels.flashinfer_build import BuildError
from zipage_lang.kernels.flashinfer_module import Heads, SequenceIndex
from zipage_lang.kernels.hopper.build import HOPPER
from zipage_lang.kernels.host_rows import HostRows
from zipage_lang.kernels.plan_buffers import TILE_BYTES, PlanBuffers
from zipage_lang.kernels.prompt_module import (
    FOR_HOPPER,
    HEAD_DIMS,
    ITEM_BYTES,
    PromptLaunch,
    PromptModule,
)

_LOG = logging.getLogger(__name__)

TILE_TOKENS = {64: 192, 128: 128}  # of a work item, by head size


@dataclasses.dataclass(frozen=True, slots=True)
class PromptPart:
    """One launch over consecutive tokens of the step."""

    num_tokens: int
    launch: PromptLaunch
    index: SequenceIndex  # on the device
    workspace: Tensor  # FlashInfer's index workspace


class PromptAttention:
    """Plans and runs, on one stream, for one dtype and head size."""

    def __init__(self, module: PromptModule, device: torch.device) -> None:
        self._module = module
        self._nothing = torch.empty(0, dtype=torch.uint8, device=device)

    @classmethod
    def load(
        cls, device: torch.device, dtype: torch.dtype, head_dim: int
    ) -> "PromptAttention | None":
        """None, with a warning, where it can't be built; None on other cards.

        Raises SetupError where FlashInfer itself is not to be had.
        """
        if torch.cuda.get_device_capability(device)[0] != HOPPER or head_dim not in HEAD_DIMS:
            return None
        try:
            FOR_HOPPER.build(dtype, head_dim)
        except BuildError as error:
            _LOG.warning("long prompts take longer (16k tokens some 15%%): %s", error)
            return None
        return cls(PromptModule(dtype, head_dim), device)

    def plan(self, rows: HostRows, heads: Heads, buffers: PlanBuffers) -> PromptPart:
        """Divide the work and send it to the card through `buffers`, without waiting for it."""
        num_tokens = int(rows.q_lens.sum())
        num_items = heads.num_q_heads * num_tiles(rows, heads.head_dim)
        num_entries = rows.num_index_entries(heads)
        num_places = -(-num_items * ITEM_BYTES // TILE_BYTES)
        host = buffers.next_host(num_entries, num_places, num_tokens)
        index, kv_lens = rows.write(host.entries, heads.block_size)
        launch = self._module.plan(
            (self._nothing, buffers.workspace, host.workspace), index, kv_lens, heads
        )
        buffers.send(host, num_entries)
        on_device = rows.views(buffers.entries, heads)
        return PromptPart(num_tokens, launch, on_device, buffers.workspace)

    def run(
        self,
        part: PromptPart,
        q: Tensor,
        layer_kv: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scale: float,
    ) -> None:
        """As `PromptModule.run`."""
        workspaces = self._nothing, part.workspace
        self._module.run(workspaces, part.launch, q, layer_kv, part.index, out, lse, scale)


def num_tiles(rows: HostRows, head_dim: int) -> int:
    """Work items for each query head."""
    return int((-(-rows.q_lens // TILE_TOKENS[head_dim])).sum())
