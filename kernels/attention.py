"""Paged attention on the card: eager steps, and what all launches share.

Our own kernel attends to decodes where it is made for their shape, FlashInfer to all else, with its
kernel for Hopper where that is the faster one.
Knows nothing of requests, policies or how the blocks were filled.

A step's sequences run as two launches: the leading run of decodes (queries in tiles of 16 rows,
bound by how fast keys and values are read), then the rest (tiles of 64 or 128 rows, causal). In one
launch FlashInfer picks the tile from the mean query length, so that a single long chunk beside a
hundred decodes would make each decode compute on tiles of mostly padding.

Plan and run belong on the same stream, in turn: a plan's copies queue up behind the kernels of the
step before, so planning step t+1 while step t runs is safe. The host side of a plan alternates
between two pinned buffers, each guarded by an event of its last copy.
"""

import dataclasses

import torch
from torch import Tensor

from zipage_lang.kernels.backend import AttentionBatch
from zipage_lang.kernels.flashinfer_module import (
    DECODE_TILE_ROWS,
    Heads,
    LaunchPlan,
    PagedAttentionModule,
    SequenceIndex,
    Splits,
)
from zipage_lang.kernels.hopper.attention import DecodePart, HopperDecodes
from zipage_lang.kernels.host_rows import HostRows
from zipage_lang.kernels.merge import merge_parts
from zipage_lang.kernels.plan_buffers import PlanBuffers
from zipage_lang.kernels.prompt_attention import TILE_TOKENS, PromptAttention, PromptPart
from zipage_lang.kernels.prompt_choice import is_for_hopper

_MAX_TILE_ROWS = 128  # query rows of FlashInfer's largest tile
CTAS_PER_SM = 2  # what FlashInfer's plan fills the card with


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPart:
    """One launch over consecutive tokens of the step."""

    num_tokens: int
    launch: LaunchPlan
    index: SequenceIndex  # on the device
    workspace: Tensor  # FlashInfer's index workspace


Part = AttentionPart | DecodePart | PromptPart


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The launches of one step, in the order of its tokens; valid until the next plan."""

    parts: tuple[Part, ...]
    # Grouped: int32 [num_tokens] on the device, 1 where the one launch attends to a token's shared
    # prefix apart from its own slots. None: every part attends to all slots of its tokens.
    has_shared: Tensor | None = None
    is_second: bool = False  # for captures of a bucket's second launch


class FlashInferAttention:
    """Attention for one dtype; owns the workspaces, which all plans share."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: bfloat16 or float16, of queries and pool."""
        assert dtype in (torch.bfloat16, torch.float16), f"FlashInfer does not attend in {dtype}"
        self.device, self._dtype = device, dtype
        self._modules: dict[int, PagedAttentionModule] = {}  # head_dim -> module
        self._partials = torch.empty(0, dtype=torch.uint8, device=device)
        self._decode_buffers = PlanBuffers(device)
        self._rest_buffers = PlanBuffers(device)
        self._hopper: HopperDecodes | None = None
        self._prompts: dict[int, PromptAttention | None] = {}  # by head_dim

    def plan_attention(
        self,
        batch: AttentionBatch,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
    ) -> AttentionPlan:
        """Divide a step's work and send its indices to the card, without waiting for it.

        Args:
            batch: int32 host tensors; see AttentionBatch. Every sequence has kv_len >= q_len >= 1.
            num_q_heads, num_kv_heads, head_dim, block_size: the shape of queries and pool.
        """
        heads = Heads(num_q_heads, num_kv_heads, head_dim, block_size)
        rows = HostRows.of(batch)
        num_decodes = rows.num_leading_decodes
        parts: list[Part] = []
        if num_decodes > 0:
            decodes = rows.sliced(0, num_decodes)
            hopper = self.hopper_for(heads)
            if hopper is None:
                parts.append(self.plan_part(decodes, heads, self._decode_buffers))
            else:
                parts.append(hopper.plan(decodes, heads, self._decode_buffers))
        if num_decodes < rows.num_seqs:
            parts.append(self._plan_rest(rows.sliced(num_decodes, rows.num_seqs), heads))
        return AttentionPlan(tuple(parts))

    def attention(
        self,
        q: Tensor,
        layer_kv: Tensor,
        plan: AttentionPlan,
        scale: float,
        need_lse: bool,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of this step's queries over the resident slots of their sequences.

        Args:
            q: [num_tokens, num_q_heads, head_dim], after RoPE, unscaled.
            layer_kv: [num_blocks, 2, block_size, num_kv_heads, head_dim], this step's K and V
                included.
            plan: from `plan_attention`.
            scale: factor on q.k.
            need_lse: whether the log-sum-exp is wanted.
            lse_out: where it goes, float32 [num_tokens, num_q_heads], contiguous; None: new memory.

        Returns:
            out: [num_tokens, num_q_heads, head_dim], dtype of q.
            lse: float32 [num_tokens, num_q_heads], log2 of the sum of exp(scale * q.k), when asked.
        """
        if plan.has_shared is not None:
            (part,) = plan.parts
            assert isinstance(part, AttentionPart)
            out, merged_lse = self._attend_in_groups(
                q, layer_kv, part, plan.has_shared, scale, lse_out
            )
            return out, merged_lse if need_lse else None
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = lse_out
        if need_lse and lse is None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        start = 0
        for part in plan.parts:
            tokens = slice(start, start + part.num_tokens)
            own_lse = None if lse is None else lse[tokens]
            self._run_part(part, q[tokens], layer_kv, out[tokens], own_lse, scale)
            start += part.num_tokens
        assert start == len(q), f"the plan is for {start} tokens, q has {len(q)}"
        return out, lse

    def _run_part(
        self,
        part: Part,
        q: Tensor,
        layer_kv: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scale: float,
    ) -> None:
        if isinstance(part, DecodePart):
            assert self._hopper is not None
            self._hopper.run(part, q, layer_kv, out, lse, scale)
            return
        if isinstance(part, PromptPart):
            prompts = self._prompts[q.shape[2]]
            assert prompts is not None
            prompts.run(part, q, layer_kv, out, lse, scale)
            return
        workspaces = self._partials, part.workspace
        module = self.module(q.shape[2])
        module.run(workspaces, part.launch, q, layer_kv, part.index, out, lse, scale)

    def _attend_in_groups(
        self,
        q: Tensor,
        layer_kv: Tensor,
        part: AttentionPart,
        has_shared: Tensor,
        scale: float,
        lse_out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """As `attention`, in two halves of rows that are merged: own slots, then shared ones."""
        num_tokens, num_q_heads, head_dim = q.shape
        assert num_tokens == part.num_tokens, (
            f"the plan is for {part.num_tokens}, q has {num_tokens}"
        )
        shape = (2 * num_tokens, num_q_heads)
        out = torch.empty((*shape, head_dim), dtype=q.dtype, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        self.module(head_dim).run(
            (self._partials, part.workspace),
            part.launch,
            q,
            layer_kv,
            part.index,
            out,
            lse[:num_tokens],
            scale,
        )
        merged_lse = torch.empty_like(lse[:num_tokens]) if lse_out is None else lse_out
        merge_parts(out, lse, has_shared, merged_lse)
        return out[:num_tokens], merged_lse

    def plan_part(
        self,
        rows: HostRows,
        heads: Heads,
        buffers: PlanBuffers,
        splits: Splits = Splits.WHERE_IDLE,
    ) -> AttentionPart:
        """Plan one launch over all the given rows, through the given buffers."""
        num_tokens = int(rows.q_lens.sum())
        self.reserve_partials(heads)
        num_tiles = max_tiles(num_tokens, rows.num_seqs, heads, self.device)
        num_entries = rows.num_index_entries(heads)
        host = buffers.next_host(num_entries, num_tiles, num_tokens)
        index, kv_lens = rows.write(host.entries, heads.block_size)
        launch = self.module(heads.head_dim).plan(
            (self._partials, buffers.workspace, host.workspace),
            index,
            kv_lens,
            heads,
            is_causal=num_tokens > rows.num_seqs,
            splits=splits,
        )
        buffers.send(host, num_entries)
        return AttentionPart(
            num_tokens, launch, rows.views(buffers.entries, heads), buffers.workspace
        )

    def _plan_rest(self, rows: HostRows, heads: Heads) -> AttentionPart | PromptPart:
        """Plan one launch over sequences of several tokens, and decodes among them."""
        prompts = self.prompts_for(heads.head_dim)
        if prompts is not None and is_for_hopper(
            rows.q_lens,
            rows.kv_lens,
            heads.num_q_heads,
            heads.num_kv_heads,
            TILE_TOKENS[heads.head_dim],
            num_sms(self.device),
        ):
            return prompts.plan(rows, heads, self._rest_buffers)
        return self.plan_part(rows, heads, self._rest_buffers)

    def prompts_for(self, head_dim: int) -> PromptAttention | None:
        """FlashInfer's kernel for Hopper, loaded on first use, where there is one."""
        if head_dim not in self._prompts:
            self._prompts[head_dim] = PromptAttention.load(self.device, self._dtype, head_dim)
        return self._prompts[head_dim]

    def reserve_partials(self, heads: Heads) -> None:
        """Make room for the partial outputs of split sequences.

        FlashInfer splits only as far as two tiles per multiprocessor go, whatever their size. This
        also holds a padded decode launch: at most two tiles of 16 rows for each row it is used for.
        """
        num_ctas = CTAS_PER_SM * num_sms(self.device)
        per_head = -(-num_ctas // heads.num_kv_heads) + 1
        rows = heads.num_q_heads * per_head * _MAX_TILE_ROWS
        num_bytes = rows * (heads.head_dim + 1) * 4 + 4096
        if num_bytes > self._partials.numel():
            self._partials = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def hopper_for(self, heads: Heads) -> HopperDecodes | None:
        """Our own kernel for decodes of this shape, where there is one."""
        if not HopperDecodes.takes(heads, self._dtype):
            return None
        if self._hopper is None:
            self._hopper = HopperDecodes(self.device)
        return self._hopper

    def module(self, head_dim: int) -> PagedAttentionModule:
        """The compiled kernels for a head size, loaded on first use."""
        if head_dim not in self._modules:
            self._modules[head_dim] = PagedAttentionModule(self._dtype, head_dim)
        return self._modules[head_dim]


def max_tiles(num_tokens: int, num_seqs: int, heads: Heads, device: torch.device) -> int:
    """An upper bound on the tiles of a launch, over rows and over splits."""
    group = heads.num_q_heads // heads.num_kv_heads
    return num_tokens * group // DECODE_TILE_ROWS + num_seqs + CTAS_PER_SM * num_sms(device)


def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
