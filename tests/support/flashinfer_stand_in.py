"""FlashInfer's compiled attention module, played on the CPU: unsplit, non-causal, tiles of 16 rows.

Follows `BatchPrefillWithPagedKVCacheRun` and its kernel in FlashInfer 0.6.11 number by number: what
is read from which place, what is written where. Knows nothing of who wrote the numbers, or why.
"""

import math

import torch
from torch import Tensor

from zipage_lang.kernels.flashinfer_module import PagedAttentionModule

TILE_ROWS = 16
# Places in FlashInfer's PrefillPlanInfo.
NUM_ITEMS, TILE, ENTRIES, TILES, CHUNKS, OUT_STARTS, CHUNK_LEN = 0, 3, 4, 5, 6, 8, 9
IS_GRAPH, IS_SPLIT = 13, 14


class FlashInferStandIn:
    """Writes each output at most once, and leaves NaN in all others."""

    def __init__(self) -> None:
        self.blocks_read = 0  # in the last run, for one KV head

    def paged_run(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        info: tuple[int, ...],
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        q_starts: Tensor,
        block_starts: Tensor,
        block_ids: Tensor,
        last_block_lens: Tensor,
        out: Tensor,
        lse: Tensor | None,
        mask_mode: int,
        layout: int,
        window: int,
        may_overlap: bool,
        scale: float,
        releases_early: int,
    ) -> None:
        assert lse is not None, "groups are merged by their log-sum-exps"
        assert lse.shape == q.shape[:2], "FlashInfer compares them"
        assert (info[TILE], info[IS_GRAPH], info[IS_SPLIT]) == (TILE_ROWS, 0, 0)
        assert (mask_mode, layout, window) == (0, 0, -1)
        assert releases_early in (0, 1)
        # The kernel knows addresses, not shapes: the memory goes on behind what it was shown.
        lse = lse.as_strided(out.shape[:2], lse.stride())
        for tensor in (out, lse):
            tensor.fill_(torch.nan)
        self.blocks_read = 0
        block_size, num_kv_heads = keys.shape[1:3]
        group_size = q.shape[1] // num_kv_heads
        words = int_workspace.view(torch.int32)

        def word(place: int, offset: int) -> int:
            assert info[place] % 4 == 0, f"{info[place]} is not the place of an int32"
            return int(words[info[place] // 4 + offset])

        assert word(CHUNK_LEN, 0) > 0, "the kernel divides by it"
        for item in range(info[NUM_ITEMS]):
            entry, tile = word(ENTRIES, item), word(TILES, item)
            assert word(CHUNKS, item) == 0
            q_start, q_end = q_starts[entry : entry + 2].tolist()
            q_len = (q_end - q_start) % 2**32  # unsigned
            first, end = block_starts[entry : entry + 2].tolist()
            kv_len = 0
            if end > first:
                kv_len = (end - first - 1) * block_size + int(last_block_lens[entry])
            blocks = block_ids[first:end].long()
            self.blocks_read += len(blocks)
            for packed in range(TILE_ROWS * tile, TILE_ROWS * (tile + 1)):
                token, in_group = divmod(packed, group_size)
                if token >= q_len:
                    continue
                row = word(OUT_STARTS, entry) + token
                for kv_head in range(num_kv_heads):
                    head = kv_head * group_size + in_group
                    key = keys[blocks, :, kv_head].flatten(0, 1)[:kv_len]
                    value = values[blocks, :, kv_head].flatten(0, 1)[:kv_len]
                    scores = key @ q[q_start + token, head] * scale  # [kv_len]
                    assert lse[row, head].isnan(), f"row {row} head {head} is written twice"
                    lse[row, head] = scores.logsumexp(0) / math.log(2)
                    out[row, head] = scores.softmax(0) @ value


def stand_in_module() -> PagedAttentionModule:
    """Our module over the stand-in, which its `_module` is; it can run, but not plan."""
    module = object.__new__(PagedAttentionModule)
    module._module = FlashInferStandIn()
    return module
