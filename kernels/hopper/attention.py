"""Decode attention by our Hopper kernel: a step's rows divided into items, each key read once.

Knows nothing of requests, of prefixes that rows share, or of prompts.
"""

import dataclasses
import functools
import math

import torch
from torch import Tensor

from zipage_lang.kernels.decode_items import ITEM_NUMBERS, divide, max_parts
from zipage_lang.kernels.flashinfer_module import Heads
from zipage_lang.kernels.hopper.library import TensorMap, check, is_available, load, pool_map
from zipage_lang.kernels.host_rows import HostRows
from zipage_lang.kernels.plan_buffers import PlanBuffers

BLOCK_SIZE = 16
HEAD_DIMS = (64, 128)
MAX_GROUP = 8
CTAS_PER_SM = 2
_LOG2_E = math.log2(math.e)
_HEADER = ITEM_NUMBERS  # int32 ahead of the items, of which the first is their count


@dataclasses.dataclass(frozen=True, slots=True)
class DecodePart:
    """One launch over a step's decodes, padding included; its numbers lie in `entries`."""

    num_tokens: int
    launch: int  # where `entries` lie: all that differs from step to step is in them
    entries: Tensor  # int32 on the device: count, items, block ids


class HopperDecodes:
    """Plans and runs, on one stream; owns the places where parts of a pair meet.

    The kernel reads keys and values while the kernel ahead of it still runs, all but the last tile
    of each item. So since the last kernel that its successor waited for in full, nothing may have
    written to the pool but each row's newest slot.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_ctas = CTAS_PER_SM * _num_sms(device)
        self._queue = torch.zeros(2, dtype=torch.int32, device=device)
        # Captured launches keep using what they were captured with, so nothing here is ever freed.
        self._places: dict[tuple[int, int], list[_Places]] = {}
        self._maps: dict[tuple[int, torch.Size], TensorMap] = {}

    @staticmethod
    def takes(heads: Heads, dtype: torch.dtype) -> bool:
        """Whether the kernel is made for this shape and this card has it; may build the library."""
        fits = (
            dtype == torch.bfloat16
            and heads.head_dim in HEAD_DIMS
            and heads.block_size == BLOCK_SIZE
            and heads.num_q_heads // heads.num_kv_heads <= MAX_GROUP
        )
        return fits and _is_there()

    def num_entries(self, num_rows: int, num_blocks: int, heads: Heads) -> int:
        """int32 numbers that a plan of so many rows, padding included, may take."""
        num_pairs = num_rows * heads.num_kv_heads
        num_items = num_pairs + max_parts(num_pairs, self._num_ctas)
        return _HEADER + num_items * ITEM_NUMBERS + num_blocks

    def reserve(self, num_rows: int, heads: Heads) -> None:
        """Make the places of so many rows, so that captured launches of fewer find them."""
        self._places_for(max_parts(num_rows * heads.num_kv_heads, self._num_ctas), heads)

    def plan(
        self, rows: HostRows, heads: Heads, buffers: PlanBuffers, *, num_padding: int = 0
    ) -> DecodePart:
        """Divide the decodes and send them to the card, without waiting for it.

        Args:
            rows: decodes alone.
            num_padding: rows behind them that read the first slot of dummy block 0.
        """
        items = divide(
            rows.kv_lens, heads.num_kv_heads, self._num_ctas, num_padding, heads.block_size
        )
        ids = rows.block_ids(heads.block_size)
        first_id = _HEADER + items.numbers.size
        num_entries = first_id + len(ids) + num_padding
        num_rows = rows.num_seqs + num_padding
        room = self.num_entries(num_rows, len(ids) + num_padding, heads)
        host = buffers.next_host(room, 0, num_rows)
        entries = host.entries.numpy()
        entries[0] = len(items.numbers)
        numbers = entries[_HEADER:first_id].reshape(-1, ITEM_NUMBERS)
        numbers[:] = items.numbers
        numbers[:, 2] += first_id  # the kernel counts blocks from the entries' beginning
        entries[first_id : first_id + len(ids)] = ids
        entries[first_id + len(ids) : num_entries] = 0
        buffers.send(host, num_entries)
        self._places_for(max_parts(rows.num_seqs * heads.num_kv_heads, self._num_ctas), heads)
        return DecodePart(num_rows, buffers.entries.data_ptr(), buffers.entries)

    def run(
        self,
        part: DecodePart,
        q: Tensor,
        layer_kv: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scale: float,
    ) -> None:
        """Attention of q into `out` and, when given, the base-2 log-sum-exp into `lse`.

        Lets the kernel behind it start at once, which must wait for this one before it reads
        anything but constants. Reads each key and value once: 4 bytes a slot, head and dim.

        Args:
            q: [num_tokens, num_q_heads, head_dim], heads side by side.
            layer_kv: [num_blocks, 2, block_size, num_kv_heads, head_dim], contiguous.
            out: [num_tokens, num_q_heads, head_dim], contiguous.
            lse: float32 [num_tokens, num_q_heads], contiguous.

        Raises RuntimeError where the launch fails.
        """
        num_tokens, num_q_heads, head_dim = q.shape
        num_kv_heads = layer_kv.shape[3]
        assert num_tokens == part.num_tokens, f"{num_tokens} tokens, planned {part.num_tokens}"
        assert q.stride()[1:] == (head_dim, 1), q.stride()
        assert out.is_contiguous()
        assert lse is None or lse.is_contiguous()
        heads = Heads(num_q_heads, num_kv_heads, head_dim, layer_kv.shape[2])
        places = self._places_for(max_parts(num_tokens * num_kv_heads, self._num_ctas), heads)
        entries = part.entries.data_ptr()
        code = load().zl_attention(
            self._map_of(layer_kv).address,
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            None if lse is None else lse.data_ptr(),
            entries,
            entries + 4 * _HEADER,
            entries,
            self._queue.data_ptr(),
            places.arrived.data_ptr(),
            places.sums.data_ptr(),
            places.stats.data_ptr(),
            num_kv_heads,
            num_q_heads // num_kv_heads,
            head_dim,
            scale * _LOG2_E,
            self._num_ctas,
            torch.cuda.current_stream(self._device).cuda_stream,
        )
        check(code)

    def _places_for(self, num_parts: int, heads: Heads) -> "_Places":
        group = heads.num_q_heads // heads.num_kv_heads
        made = self._places.setdefault((group, heads.head_dim), [])
        if not made or made[-1].num_parts < num_parts:
            made.append(_Places.of(num_parts, group, heads.head_dim, self._device))
        return made[-1]

    def _map_of(self, layer_kv: Tensor) -> TensorMap:
        key = layer_kv.data_ptr(), layer_kv.shape
        if key not in self._maps:
            assert layer_kv.is_contiguous()
            num_blocks, _, block_size, num_kv_heads, head_dim = layer_kv.shape
            num_rows = num_blocks * 2 * block_size
            num_columns = num_kv_heads * head_dim
            self._maps[key] = pool_map(layer_kv.data_ptr(), num_rows, num_columns)
        return self._maps[key]


@dataclasses.dataclass(frozen=True, slots=True)
class _Places:
    """Where parts of a pair meet."""

    num_parts: int
    arrived: Tensor  # int32 [num_parts], zero between launches
    sums: Tensor  # float32 [num_parts, group, head_dim]
    stats: Tensor  # float32 [num_parts, group, 2]

    @classmethod
    def of(cls, num_parts: int, group: int, head_dim: int, device: torch.device) -> "_Places":
        return cls(
            num_parts,
            torch.zeros(num_parts, dtype=torch.int32, device=device),
            torch.empty((num_parts, group, head_dim), dtype=torch.float32, device=device),
            torch.empty((num_parts, group, 2), dtype=torch.float32, device=device),
        )


def _num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _is_there() -> bool:
    return is_available()
