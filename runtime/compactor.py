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

MAX_AWAITED = 8  # of one launch: beside a step they end before it does
_AHEAD_OF_STEPS = -1  # stream priority: else each kernel waits for a whole launch of attention


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    idents: tuple[int, ...]
    span: Span | None  # None: done already


class Compactor:
    """Ordered by events, with no wait on the host: a batch starts behind what is on the current
    stream when it is launched, and what is launched there afterwards does not wait for it, unless
    `go_on_behind` is asked."""

    def __init__(self, compressor: KVCompressor, device: torch.device) -> None:
        self._compressor = compressor
        self._device = device
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, _AHEAD_OF_STEPS) if is_cuda else None
        self._batches: deque[_Batch] = deque()
        self._awaited: deque[Span] = deque()  # told as done, perhaps not over yet
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
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            start = timed_event(self._stream)
            failed_rows = self._compressor.run(compactions)
            end = timed_event(self._stream)
        self._batches.append(_Batch(idents, (start, end)))
        return failed_rows

    def go_on_behind(self) -> tuple[int, ...]:
        """Those launched last, as done: what is launched on the current stream from now on waits
        for them there. None where they are many, since others would have to wait, too."""
        if len(self._batches) != 1 or len(self._batches[0].idents) > MAX_AWAITED:
            return ()
        batch = self._batches.popleft()
        if batch.span is not None:
            torch.cuda.current_stream(self._device).wait_event(batch.span[1])
            self._awaited.append(batch.span)
        return batch.idents

    def take_done(self) -> tuple[int, ...]:
        """Those that are done and have not been told yet."""
        while self._awaited and self._awaited[0][1].query():
            self.clock.add(self._awaited.popleft())
        done: list[int] = []
        while self._batches and not self._awaited and _is_done(self._batches[0]):
            batch = self._batches.popleft()
            done += batch.idents
            if batch.span is not None:
                self.clock.add(batch.span)
        return tuple(done)

    def wait(self) -> tuple[int, ...]:
        """As `take_done`, but waits for all."""
        spans = [*self._awaited, *(batch.span for batch in self._batches)]
        for span in spans:
            if span is not None:
                span[1].synchronize()
        return self.take_done()


def _is_done(batch: _Batch) -> bool:
    return batch.span is None or batch.span[1].query()
