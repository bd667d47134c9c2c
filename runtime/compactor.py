"""Runs compactions beside the decoding: on a CUDA stream of their own, or at once on the CPU.

Knows nothing of requests or of how slots are scored.
"""

import dataclasses
import time
from collections import deque

import torch

from zipage_lang.runtime.device_clock import DeviceClock, Span, timed_event
from zipage_lang.runtime.kv_compressor import KVCompressor
from zipage_lang.runtime.step_plan import Compaction


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    idents: tuple[int, ...]
    span: Span | None  # None: done already


class Compactor:
    """Ordered by events, with no wait on the host: a batch starts behind what is on the current
    stream when it is launched, and what is launched there afterwards does not wait for it."""

    def __init__(self, compressor: KVCompressor, device: torch.device) -> None:
        self._compressor = compressor
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._batches: deque[_Batch] = deque()
        self.clock = DeviceClock()

    def launch(self, compactions: tuple[Compaction, ...]) -> frozenset[int]:
        """Start them. Their requests must sit out until they are told as done.

        Returns the rows that found no memory, see `KVCompressor.run`; they are told as done too.
        """
        idents = tuple(item.ident for item in compactions)
        if self._stream is None:
            started = time.perf_counter()
            failed_rows = self._compressor.run(compactions)
            self.clock.busy_s += time.perf_counter() - started
            self._batches.append(_Batch(idents, None))
            return failed_rows
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            start = timed_event(self._stream)
            failed_rows = self._compressor.run(compactions)
            end = timed_event(self._stream)
        self._batches.append(_Batch(idents, (start, end)))
        return failed_rows

    def take_done(self) -> tuple[int, ...]:
        """Those that are done and have not been told yet."""
        done: list[int] = []
        while self._batches and _is_done(self._batches[0]):
            batch = self._batches.popleft()
            done += batch.idents
            if batch.span is not None:
                self.clock.add(batch.span)
        return tuple(done)

    def wait(self) -> tuple[int, ...]:
        """As `take_done`, but waits for all."""
        for batch in self._batches:
            if batch.span is not None:
                batch.span[1].synchronize()
        return self.take_done()


def _is_done(batch: _Batch) -> bool:
    return batch.span is None or batch.span[1].query()
