"""Decode attention inside CUDA graphs: plans whose launch is fixed for each size of batch.

Knows nothing of graphs themselves, of requests, or of how the blocks were filled.
"""

import numpy as np
import torch

from zipage_lang.kernels.attention import (
    CTAS_PER_SM,
    AttentionPart,
    AttentionPlan,
    FlashInferAttention,
    max_tiles,
    num_sms,
)
from zipage_lang.kernels.backend import AttentionBatch
from zipage_lang.kernels.flashinfer_module import DECODE_TILE_ROWS, Heads, LaunchPlan, Splits
from zipage_lang.kernels.grouped_launch import GroupedLayout, sequences_of
from zipage_lang.kernels.hopper.attention import HopperDecodes
from zipage_lang.kernels.host_rows import HostRows
from zipage_lang.kernels.plan_buffers import PlanBuffers
from zipage_lang.kernels.prompt_attention import PromptPart
from zipage_lang.kernels.shared_prefix import PrefixGroup, shared_blocks, worthwhile_groups
from zipage_lang.kernels.whole_rows import is_faster_whole, may_be_faster_whole


class GraphDecode:
    """Decode attention whose launch can be captured: fixed addresses, fixed launch shape.

    `plan` is called before capture and before each replay; its result is the same object in effect
    (equal launch, same tensors), so what was captured stays valid. A bucket has a launch of fixed
    shape that serves any step, our own kernel's where it is made for these heads, and may have a
    second one with a capture of its own:

    - From `min_unsplit_rows` on rows are grouped where it pays: the prefix that neighbours share is
      read once for them all, by FlashInfer.
    - Below, only without our own kernel: FlashInfer's padded launch is as large as any batch of
      that many rows may need, and always splits and merges. Where no row is much longer than the
      others, rows are read whole instead.

    All buckets share the buffers: one of them runs at a time, on one stream.
    """

    def __init__(
        self,
        attention: FlashInferAttention,
        heads: Heads,
        *,
        max_rows: int,
        max_blocks: int,
    ) -> None:
        """max_rows: the largest bucket; max_blocks: blocks a row's table may hold."""
        self._attention, self._heads = attention, heads
        self._buffers = PlanBuffers(attention.device)
        attention.reserve_partials(heads)
        self._hopper = attention.hopper_for(heads)
        num_tiles = max_tiles(max_rows, max_rows, heads, attention.device)
        num_entries = 3 * max_rows + 2
        if self.can_group(max_rows):
            num_entries = GroupedLayout(max_rows, heads).num_fixed
        num_entries += max_rows * max_blocks
        if self._hopper is not None:
            self._hopper.reserve(max_rows, heads)
            own = self._hopper.num_entries(max_rows, max_rows * max_blocks, heads)
            num_entries = max(num_entries, own)
        self._buffers.next_host(num_entries, num_tiles, max_rows)
        self._max_entries = num_entries
        # What rows of the last step shared, and which groups that made.
        self._last_groups: tuple[np.ndarray, list[PrefixGroup]] = (np.zeros(0), [])
        # By bucket and whether it is the second: what was captured.
        self._launches: dict[tuple[int, bool], LaunchPlan | int] = {}

    @property
    def min_unsplit_rows(self) -> int:
        """Rows from which on one tile per row and KV head already fills the card."""
        num_ctas = CTAS_PER_SM * num_sms(self._attention.device)
        return num_ctas // self._heads.num_kv_heads + 1

    def can_group(self, bucket: int) -> bool:
        """Whether rows of this bucket may be grouped."""
        group_size = self._heads.num_q_heads // self._heads.num_kv_heads
        return bucket >= self.min_unsplit_rows and group_size <= DECODE_TILE_ROWS

    def has_second(self, bucket: int) -> bool:
        """Whether steps of this bucket may take a launch other than the one that serves any."""
        return self.can_group(bucket) or self.can_read_whole(bucket)

    def can_read_whole(self, bucket: int) -> bool:
        """Whether rows of this bucket, too few to fill the card, may be read without splits."""
        if self._hopper is not None or bucket >= self.min_unsplit_rows:
            return False
        return may_be_faster_whole(bucket, self._heads, num_sms(self._attention.device))

    def plan(
        self, batch: AttentionBatch, bucket: int, *, may_be_second: bool = True
    ) -> AttentionPlan:
        """Plan a step of at most `bucket` decodes; missing rows read one slot of dummy block 0.

        Args:
            batch: as for `plan_attention`, each row with one query token.
            may_be_second: take the second launch, where there is one and it is the faster.
        """
        if may_be_second and self.can_group(bucket):
            rows = self._padded(batch, bucket)
            layout = GroupedLayout(bucket, self._heads)
            groups = self._groups_of(rows, layout.max_tiles)
            if groups:
                return self._plan_groups(layout, rows, groups)
        is_whole = may_be_second and self.can_read_whole(bucket) and self._is_faster_whole(batch)
        return self._plan_plain(batch, bucket, is_whole=is_whole)

    def plan_padding(self, bucket: int, *, is_second: bool) -> AttentionPlan:
        """Plan a step of dummy rows alone, for the capture of a launch that may serve any step."""
        nothing = AttentionBatch(
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(0, dtype=torch.int32),
            torch.zeros((0, 1), dtype=torch.int32),
        )
        if is_second and self.can_group(bucket):
            return self.plan_groups(nothing, bucket, [])
        return self._plan_plain(nothing, bucket, is_whole=is_second)

    def plan_groups(
        self, batch: AttentionBatch, bucket: int, groups: list[PrefixGroup]
    ) -> AttentionPlan:
        """As `plan`, with these groups, whether or not they are worth it."""
        assert self.can_group(bucket), f"no grouped launch has {bucket} rows"
        layout = GroupedLayout(bucket, self._heads)
        return self._plan_groups(layout, self._padded(batch, bucket), groups)

    def _groups_of(self, rows: HostRows, max_tiles: int) -> list[PrefixGroup]:
        """Those worth it; found anew only when rows have come or gone, which they seldom do."""
        shared = shared_blocks(rows.tables, rows.kv_lens, self._heads.block_size)
        last_shared, groups = self._last_groups
        if not np.array_equal(shared, last_shared):
            groups = worthwhile_groups(shared, self._heads, max_tiles)
            self._last_groups = shared, groups
        return groups

    def _is_faster_whole(self, batch: AttentionBatch) -> bool:
        return is_faster_whole(batch.kv_lens.numpy(), self._heads, num_sms(self._attention.device))

    def _plan_plain(self, batch: AttentionBatch, bucket: int, *, is_whole: bool) -> AttentionPlan:
        """Our own kernel's plan, or FlashInfer's; is_whole: of a small bucket's second launch."""
        if self._hopper is not None:
            return self._plan_items(self._hopper, batch, bucket)
        rows = self._padded(batch, bucket)
        num_entries = rows.num_index_entries(self._heads)
        assert num_entries <= self._max_entries, f"{num_entries} entries of {self._max_entries}"
        is_whole_anyway = bucket >= self.min_unsplit_rows
        splits = Splits.NEVER if is_whole or is_whole_anyway else Splits.ALWAYS
        part = self._attention.plan_part(rows, self._heads, self._buffers, splits)
        return self._checked(AttentionPlan((part,), is_second=is_whole), bucket)

    def _plan_items(
        self, hopper: HopperDecodes, batch: AttentionBatch, bucket: int
    ) -> AttentionPlan:
        rows = HostRows.of(batch)
        num_padding = bucket - rows.num_seqs
        assert num_padding >= 0, f"{rows.num_seqs} rows in a bucket of {bucket}"
        assert rows.num_leading_decodes == rows.num_seqs, f"{rows.q_lens=} must be decodes"
        part = hopper.plan(rows, self._heads, self._buffers, num_padding=num_padding)
        return self._checked(AttentionPlan((part,)), bucket)

    def _plan_groups(
        self, layout: GroupedLayout, rows: HostRows, groups: list[PrefixGroup]
    ) -> AttentionPlan:
        """Write the grouped launch and send it to the card, without waiting for it."""
        num_blocks = layout.num_blocks(rows.kv_lens, groups)
        num_entries = layout.num_fixed + num_blocks
        assert num_entries <= self._max_entries, f"{num_entries} entries of {self._max_entries}"
        host = self._buffers.next_host(num_entries, 0, rows.num_seqs)
        layout.write(host.entries, rows.tables, rows.kv_lens, groups)
        self._buffers.send(host, num_entries)
        arrays = layout.arrays(self._buffers.entries, num_blocks)
        # FlashInfer's index workspace is whatever its places count from.
        workspace = self._buffers.entries
        part = AttentionPart(rows.num_seqs, layout.launch, sequences_of(arrays), workspace)
        plan = AttentionPlan((part,), arrays.has_shared, is_second=True)
        return self._checked(plan, rows.num_seqs)

    def _padded(self, batch: AttentionBatch, bucket: int) -> HostRows:
        rows = HostRows.of(batch).padded(bucket)
        assert rows.num_leading_decodes == bucket, f"{rows.q_lens=} must be decodes"
        return rows

    def _checked(self, plan: AttentionPlan, bucket: int) -> AttentionPlan:
        """The plan, which must fit what was captured of its bucket and kind."""
        (part,) = plan.parts
        assert not isinstance(part, PromptPart), "a graph holds decodes"
        launch = part.launch
        captured = self._launches.setdefault((bucket, plan.is_second), launch)
        assert launch == captured, f"bucket {bucket}: {launch} is not {captured}"
        return plan
