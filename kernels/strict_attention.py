"""Paged attention on a card whose every token has the same bits in any step.

One program per run of a sequence's query tokens and KV head reads all slots in tiles of fixed
length, in order, decodes and prefills alike (`strict_kernels.run_attention_kernel`). Nothing is
split over slots, so few sequences leave most of the card idle: the price of the mode.
Knows nothing of requests, policies or how the blocks were filled.
"""

import dataclasses

import numpy as np
import torch
import triton
from torch import Tensor

from zipage_lang.kernels.backend import AttentionBatch
from zipage_lang.kernels.host_rows import HostRows
from zipage_lang.kernels.reference.exact import LOG2_E
from zipage_lang.kernels.strict_kernels import run_attention_kernel
from zipage_lang.kernels.strict_products import ALIGNMENT

ROWS = 16  # query tokens times query heads of a KV head, at least: what the tensor cores take
TILE = 64  # slots
_RUN_NUMBERS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class RunPlan:
    """A step's runs and block tables on the device."""

    runs: Tensor  # int32 [num_runs, 4]: first token, tokens, slots the first sees, table line
    tables: Tensor  # int32 [num_seqs, max_blocks]
    num_tokens: int
    num_kv_heads: int
    block_size: int

    @property
    def is_second(self) -> bool:
        """One launch serves all steps: another would add in another order."""
        return False


class StrictCardAttention:
    """Plans and launches; keeps nothing between steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def plan_attention(
        self,
        batch: AttentionBatch,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
    ) -> RunPlan:
        """Send a step's runs to the device, without waiting for it; arguments as the twin's."""
        rows = HostRows.of(batch)
        runs = host_runs(rows, num_q_heads // num_kv_heads)
        return RunPlan(
            _sent(runs, self._device),
            _sent(rows.tables, self._device),
            int(rows.q_lens.sum()),
            num_kv_heads,
            block_size,
        )

    @staticmethod
    def attention(
        q: Tensor,
        layer_kv: Tensor,
        plan: RunPlan,
        scale: float,
        need_lse: bool,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As the twin's: out [num_tokens, num_q_heads, head_dim] of q's dtype, and float32 lse
        [num_tokens, num_q_heads], base 2, when asked."""
        num_tokens, num_q_heads, head_dim = q.shape
        assert num_tokens == plan.num_tokens, f"planned {plan.num_tokens}, q has {num_tokens}"
        assert q.is_contiguous(), q.stride()
        assert q.data_ptr() % ALIGNMENT == 0, "a kernel is compiled for where q lies"
        assert layer_kv.is_contiguous(), layer_kv.stride()
        out = torch.empty_like(q)
        lse = lse_out
        if need_lse and lse is None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        group_size = num_q_heads // plan.num_kv_heads
        run_attention_kernel[(len(plan.runs), plan.num_kv_heads)](
            q,
            layer_kv,
            plan.runs,
            plan.tables,
            out,
            lse if need_lse else None,
            scale * LOG2_E,
            plan.tables.stride(0),
            BLOCK_SIZE=plan.block_size,
            NUM_Q_HEADS=num_q_heads,
            NUM_KV_HEADS=plan.num_kv_heads,
            HEAD_DIM=head_dim,
            DIM=max(16, triton.next_power_of_2(head_dim)),
            ROWS=rows_of_run(group_size),
            TILE=TILE,
            HAS_LSE=need_lse,
            num_warps=4,
            num_stages=2,
        )
        return out, lse


class StrictGraphDecode:
    """Decodes that a CUDA graph may hold: runs and tables lie in memory of fixed place."""

    def __init__(
        self,
        device: torch.device,
        num_kv_heads: int,
        block_size: int,
        *,
        max_rows: int,
        max_blocks: int,
    ) -> None:
        """max_rows: the largest bucket; max_blocks: blocks a row's table may hold."""
        self._num_kv_heads, self._block_size = num_kv_heads, block_size
        self._runs = torch.zeros((max_rows, _RUN_NUMBERS), dtype=torch.int32, device=device)
        self._tables = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)

    def has_second(self, bucket: int) -> bool:
        """One launch serves all steps."""
        return False

    def plan(self, batch: AttentionBatch, bucket: int, *, may_be_second: bool = True) -> RunPlan:
        """A step of at most `bucket` decodes; missing rows read one slot of dummy block 0."""
        rows = HostRows.of(batch).padded(bucket)
        assert rows.num_leading_decodes == bucket, f"{rows.q_lens=} must be decodes"
        width = rows.tables.shape[1]
        assert width <= self._tables.shape[1], f"{width} blocks of {self._tables.shape[1]}"
        runs, tables = self._runs[:bucket], self._tables[:bucket]
        device = runs.device
        runs.copy_(_sent(host_runs(rows, 1), device))
        tables[:, :width].copy_(_sent(rows.tables, device))
        return RunPlan(runs, tables, bucket, self._num_kv_heads, self._block_size)

    def plan_padding(self, bucket: int, *, is_second: bool) -> RunPlan:
        """A step of dummy rows alone, for the capture of a launch that may serve any step."""
        assert not is_second, "strict mode has one launch"
        nothing = AttentionBatch(
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(0, dtype=torch.int32),
            torch.zeros((0, 1), dtype=torch.int32),
        )
        return self.plan(nothing, bucket)


def rows_of_run(group_size: int) -> int:
    """Query rows of a program, by the heads alone."""
    return max(ROWS, triton.next_power_of_2(group_size))


def host_runs(rows: HostRows, group_size: int) -> np.ndarray:
    """int32 [num_runs, 4]: each sequence's query tokens, as many at a time as a program takes."""
    run_len = rows_of_run(group_size) // group_size
    num_runs = -(-rows.q_lens // run_len)  # [num_seqs]
    owner = np.repeat(np.arange(rows.num_seqs), num_runs)  # [num_runs]
    first_run = np.cumsum(num_runs) - num_runs  # [num_seqs]
    offset = (np.arange(len(owner)) - first_run[owner]) * run_len  # [num_runs]
    starts = np.cumsum(rows.q_lens) - rows.q_lens  # [num_seqs]
    runs = np.empty((len(owner), _RUN_NUMBERS), dtype=np.int32)
    runs[:, 0] = starts[owner] + offset
    runs[:, 1] = np.minimum(run_len, rows.q_lens[owner] - offset)
    runs[:, 2] = (rows.kv_lens - rows.q_lens)[owner] + offset + 1
    runs[:, 3] = owner
    return runs


def _sent(array: np.ndarray, device: torch.device) -> Tensor:
    """On the device, behind what is on its stream, without waiting for it."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
