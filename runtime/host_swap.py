"""Host memory for swapped requests: whole blocks of every pool tensor, out and in.

On a card a block crosses the bus as one line of bytes, all layers side by side, by plain copies
between pinned host memory and a few pieces of device memory; packing and unpacking the lines is
quick and in the order of the steps. So blocks may be reused right behind `swap_out`, and decoding
goes on beside the copies. Knows nothing of whose blocks they are.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from zipage_lang.kernels.backend import Backend
from zipage_lang.kernels.reference.host_copy import line_bytes
from zipage_lang.runtime.device_copy import send_ints
from zipage_lang.runtime.kv_cache import KVCache
from zipage_lang.runtime.out_of_memory import is_out_of_memory
from zipage_lang.runtime.step_plan import BlockSwap

_LOG = logging.getLogger(__name__)

PIECE_BYTES = 64 * 2**20  # packed before the first byte can leave; large enough for a full bus
NUM_PIECES = 8  # so much leaves before a swap-out makes the steps wait for the bus
CHUNK_BYTES = 128 * 2**20  # host memory pinned at a time: pinning costs about 0.4 s per GiB


class Swap(Protocol):
    """What the runner asks: both may return before the copies are done, but look as if they were
    to whatever is launched on the current stream afterwards."""

    def take_memory(self) -> int: ...
    def swap_out(self, swaps: Sequence[BlockSwap]) -> None: ...
    def swap_in(self, swaps: Sequence[BlockSwap]) -> None: ...


class Lane(Protocol):
    """A queue of work on the device: in order within itself, at any time against other lanes."""

    def run(self, work: Callable[[], None], after: Sequence[Any]) -> Any:
        """Enqueue work behind marks of other lanes; returns the mark of its end. None: no mark."""


def make_host_swap(cache: KVCache, num_host_blocks: int, backend: Backend) -> Swap:
    """The way to host memory that suits the backend's device."""
    if backend.device.type != "cuda":
        return HostSwap(cache, num_host_blocks)
    lanes = (CudaLane(None), CudaLane(torch.cuda.Stream()), CudaLane(torch.cuda.Stream()))
    return StagedHostSwap(cache, num_host_blocks, backend, *lanes)


class HostSwap:
    """Copies at once. Bounded at construction; what is reserved costs memory only once written."""

    def __init__(self, cache: KVCache, num_host_blocks: int) -> None:
        self._pools = cache.block_pools
        self._num_blocks = num_host_blocks
        self._host: list[Tensor] = []

    def take_memory(self) -> int:
        """Reserve all host memory; returns how many blocks it holds, which is less with a warning
        where the host gives less."""
        wanted = self._num_blocks
        while self._num_blocks and not self._can_reserve():
            self._num_blocks //= 2
        if self._num_blocks < wanted:
            _warn_of_less(self._num_blocks, wanted)
        return self._num_blocks

    def _can_reserve(self) -> bool:
        try:
            self._host_pools()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def swap_out(self, swaps: Sequence[BlockSwap]) -> None:
        """Copy pool blocks to host memory."""
        if not swaps:
            return
        block_ids, host_ids = _columns(swaps)
        for host, pool in zip(self._host_pools(), self._pools, strict=True):
            host[:, host_ids] = pool[:, block_ids.to(pool.device)].to(host.device)

    def swap_in(self, swaps: Sequence[BlockSwap]) -> None:
        """Copy host memory back into pool blocks."""
        if not swaps:
            return
        block_ids, host_ids = _columns(swaps)
        for host, pool in zip(self._host_pools(), self._pools, strict=True):
            pool[:, block_ids.to(pool.device)] = host[:, host_ids].to(pool.device)

    def _host_pools(self) -> list[Tensor]:
        if not self._host:
            self._host = [
                torch.empty((pool.shape[0], self._num_blocks, *pool.shape[2:]), dtype=pool.dtype)
                for pool in self._pools
            ]
        return self._host


@dataclasses.dataclass(frozen=True, slots=True)
class CudaLane:
    """A CUDA stream; marks are events, so the host never waits."""

    stream: torch.cuda.Stream | None  # None: the current one, where steps are launched

    def run(self, work: Callable[[], None], after: Sequence[torch.cuda.Event | None]) -> Any:
        stream = self.stream or torch.cuda.current_stream()
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            work()
        return stream.record_event()


@dataclasses.dataclass(slots=True)
class _Piece:
    lines: Tensor  # uint8 [piece_len, line_bytes] on the device
    free: Any = None  # mark from which on it may be written again


class StagedHostSwap:
    """Packs on the steps' lane, copies on a lane per direction. Host memory grows in chunks.

    Holds NUM_PIECES pieces of device memory (or what the whole host memory takes, if less) and at
    most `num_host_blocks` lines of host memory, rounded up to a chunk.
    """

    def __init__(
        self,
        cache: KVCache,
        num_host_blocks: int,
        backend: Backend,
        steps: Lane,
        outward: Lane,
        inward: Lane,
        *,
        piece_bytes: int = PIECE_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """steps: where the pool is read and written; outward, inward: for the copies."""
        self._pools, self._backend = cache.block_pools, backend
        self._num_blocks = num_host_blocks
        self._steps, self._outward, self._inward = steps, outward, inward
        self._line_bytes = line_bytes(self._pools)
        self._chunk_len = min(max(1, chunk_bytes // self._line_bytes), max(1, num_host_blocks))
        self._chunks: dict[int, Tensor] = {}  # host_id // chunk_len -> uint8 [chunk_len, line]
        piece_len = min(max(1, piece_bytes // self._line_bytes), max(1, num_host_blocks))
        num_pieces = min(NUM_PIECES, -(-num_host_blocks // piece_len))
        shape = (num_pieces, piece_len, self._line_bytes)
        staging = torch.empty(shape, dtype=torch.uint8, device=backend.device)
        self._pieces = [_Piece(lines) for lines in staging.unbind()]
        self._num_chunks = -(-num_host_blocks // self._chunk_len)
        self._turn = 0
        self._written: dict[int, Any] = {}  # host_id -> mark of the copy that filled it

    def take_memory(self) -> int:
        """Take all host memory now: pinning it in the middle of a step would stall the device.

        Block 0, which holds nothing, goes there and back once, so that no step waits for kernels.
        Returns how many blocks it holds, which is less with a warning where the host gives less.
        """
        num_blocks = self._take_chunks()
        if num_blocks:
            empty = [BlockSwap(block_id=0, host_id=0)]
            self.swap_out(empty)
            self.swap_in(empty)
        return num_blocks

    def _take_chunks(self) -> int:
        for number in range(self._num_chunks):
            if number not in self._chunks:
                chunk = self._new_chunk()
                if chunk is None:
                    num_blocks = number * self._chunk_len
                    _warn_of_less(num_blocks, self._num_blocks)
                    return num_blocks
                self._chunks[number] = chunk
        return self._num_blocks

    @property
    def host_bytes(self) -> int:
        """Host memory taken so far."""
        return sum(chunk.nbytes for chunk in self._chunks.values())

    def swap_out(self, swaps: Sequence[BlockSwap]) -> None:
        """Copy pool blocks to host memory; the blocks may be overwritten by what comes next.

        Host lines that an earlier swap-in read are free by then: it was unpacked on the same lane.
        """
        for piece, part in self._in_pieces(swaps):
            block_ids, lines = self._block_ids(part), piece.lines[: len(part)]
            packed = piece.free = self._steps.run(
                partial(self._backend.pack_blocks, self._pools, block_ids, lines), [piece.free]
            )
            piece.free = self._outward.run(partial(self._lines_out, part, lines), [packed])
            self._written.update(dict.fromkeys((swap.host_id for swap in part), piece.free))

    def swap_in(self, swaps: Sequence[BlockSwap]) -> None:
        """Copy host memory into pool blocks; the copies start at once, beside a running step."""
        for piece, part in self._in_pieces(swaps):
            block_ids, lines = self._block_ids(part), piece.lines[: len(part)]
            filled = {id(mark): mark for mark in (self._written[s.host_id] for s in part)}
            loaded = piece.free = self._inward.run(
                partial(self._lines_in, part, lines), [piece.free, *filled.values()]
            )
            piece.free = self._steps.run(
                partial(self._backend.unpack_blocks, self._pools, block_ids, lines), [loaded]
            )

    def _in_pieces(self, swaps: Sequence[BlockSwap]) -> Iterator[tuple[_Piece, list[BlockSwap]]]:
        """In order of host memory, so that neighbours there are one copy."""
        ordered = sorted(swaps, key=lambda swap: swap.host_id)
        start = 0
        while start < len(ordered):
            piece = self._pieces[self._turn]
            self._turn = (self._turn + 1) % len(self._pieces)
            yield piece, ordered[start : start + len(piece.lines)]
            start += len(piece.lines)

    def _block_ids(self, swaps: Sequence[BlockSwap]) -> Tensor:
        return send_ints([swap.block_id for swap in swaps], self._backend.device)  # [num_swaps]

    def _lines_out(self, swaps: Sequence[BlockSwap], lines: Tensor) -> None:
        for first, host in self._runs(swaps):
            host.copy_(lines[first : first + len(host)], non_blocking=True)

    def _lines_in(self, swaps: Sequence[BlockSwap], lines: Tensor) -> None:
        for first, host in self._runs(swaps):
            lines[first : first + len(host)].copy_(host, non_blocking=True)

    def _runs(self, swaps: Sequence[BlockSwap]) -> Iterator[tuple[int, Tensor]]:
        """Runs of swaps that are neighbours in host memory: index of the first, host lines."""
        first = 0
        for index, swap in enumerate(swaps):
            is_last = index + 1 == len(swaps)
            following = swap.host_id + 1
            if is_last or swaps[index + 1].host_id != following or following % self._chunk_len == 0:
                yield first, self._host_lines(swaps[first].host_id, index + 1 - first)
                first = index + 1

    def _host_lines(self, host_id: int, count: int) -> Tensor:
        number, at = divmod(host_id, self._chunk_len)
        if number not in self._chunks:
            chunk = self._new_chunk()
            if chunk is None:
                raise MemoryError(f"no host memory for {self._chunk_len * self._line_bytes} bytes")
            self._chunks[number] = chunk
        return self._chunks[number][at : at + count]

    def _new_chunk(self) -> Tensor | None:
        """uint8 [chunk_len, line_bytes]; None where the host has none to give."""
        shape, is_pinned = (self._chunk_len, self._line_bytes), self._backend.device.type == "cuda"
        try:
            return torch.empty(shape, dtype=torch.uint8, pin_memory=is_pinned)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None


def _warn_of_less(num_blocks: int, wanted: int) -> None:
    _LOG.warning(
        "the host gives memory for %d of the %d blocks of swap_space: requests that lose their "
        "place when memory is short %s. Lower swap_space, or free host memory",
        num_blocks,
        wanted,
        "may be computed again instead" if num_blocks else "are computed again",
    )


def _columns(swaps: Sequence[BlockSwap]) -> tuple[Tensor, Tensor]:
    block_ids = torch.tensor([swap.block_id for swap in swaps])  # [num_swaps]
    host_ids = torch.tensor([swap.host_id for swap in swaps])  # [num_swaps]
    return block_ids, host_ids
