"""The training loop: a batch, a step, a line in the log, now and then a look at how good it is.

Knows nothing of how batches are drawn, how progress is told, or what the looks do.
"""

import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np
import torch
from checkpoint import Standing
from feed import Feed
from optimizer import MuonAdam
from packing import BatchSize, PackedBatch, pack
from reasoner import Reasoner, Shape
from run_log import RunLog
from schedule import Progress, rate_factor
from torch import Tensor
from transfer import DeviceBatch, to_device

PEAK_FLOPS = 790e12  # of one H200 in bfloat16, measured


@dataclasses.dataclass(frozen=True)
class Pace:
    """How fast the training learns and how often it looks up from it."""

    peak_rate: float
    log_every: int  # steps; each look at the loss waits for the device
    check_every_s: float


@dataclasses.dataclass
class _Window:
    """What happened since the last line of the log."""

    loss: Tensor  # sum over steps
    norm: Tensor
    started: float
    waited_s: float  # the feed's clock at the start
    num_steps: int = 0
    num_tokens: int = 0
    num_flops: float = 0.0


class Trainer:
    """Makes steps until the progress says stop."""

    def __init__(
        self,
        model: Reasoner,
        optimizer: MuonAdam,
        feed: Feed,
        progress: Progress,
        pace: Pace,
        standing: Standing,
        log: RunLog,
    ) -> None:
        self.model, self.optimizer, self.feed = model, optimizer, feed
        self.progress, self.pace, self.standing, self.log = progress, pace, standing, log
        self._device = model.cos.device
        self._losses: Callable[[Tensor, Tensor], Tensor] = model.token_losses
        self._window = self._new_window()

    def compile(self, size: BatchSize) -> None:
        """Compile the layers and try them; what can't be compiled runs as it is."""
        for layer in self.model.layers:
            layer.compile(dynamic=False)
        self._losses = torch.compile(self.model.token_losses, dynamic=False)
        started = time.monotonic()
        if not self.log.guard("compile", lambda: self._rehearse(size)):
            torch.compiler.set_stance("force_eager")
            self._rehearse(size)
        self.log.write("compile", seconds=time.monotonic() - started)

    def run(self, check: Callable[[], None], recover: Callable[[], None]) -> None:
        """Train until `progress.until`.

        check: called every `check_every_s` seconds. recover: called when the loss is no number;
        it puts model, optimizer and standing back.
        """
        self.progress.start()
        self._window, checked = self._new_window(), time.monotonic()
        while True:
            self.standing.progress = self.progress.now(self.standing.num_steps)
            if self.standing.progress >= self.progress.until:
                break
            self._step(self.feed.next())
            if self._window.num_steps < self.pace.log_every:
                continue
            if not self._close_window():
                recover()
            if time.monotonic() - checked > self.pace.check_every_s:
                check()
                self._window, checked = self._new_window(), time.monotonic()
        if self._window.num_steps and not self._close_window():
            recover()

    def _step(self, batch: PackedBatch) -> None:
        loss = self._backward(to_device(batch, self._device))
        rate = self.pace.peak_rate * self.standing.rate_scale
        norm = self.optimizer.step(rate * rate_factor(self.standing.progress))
        window = self._window
        window.loss += loss
        window.norm += norm
        window.num_steps += 1
        window.num_tokens += batch.tokens.size
        window.num_flops += training_flops(self.model.shape, batch)
        self.standing.num_steps += 1
        self.standing.num_tokens += batch.tokens.size

    def _backward(self, batch: DeviceBatch) -> Tensor:
        """Gradients of the mean loss of counted tokens; returns that loss, float32 []."""
        hidden = self.model(batch.tokens, batch.starts)
        losses = self._losses(hidden, batch.targets)  # [num_tokens]
        loss = (losses * batch.counted).sum() / batch.counted.sum().clamp(min=1)
        loss.backward()
        return loss.detach()

    def _rehearse(self, size: BatchSize) -> None:
        """A step on nothing but padding, without its last act."""
        self._backward(to_device(pack([], size), self._device))
        self.model.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _new_window(self) -> _Window:
        zeros = torch.zeros(2, device=self._device)
        return _Window(zeros[0], zeros[1], time.monotonic(), self.feed.waited_s)

    def _close_window(self) -> bool:
        """Write the window's line and open the next; whether the loss is a number."""
        window, standing = self._window, self.standing
        loss = float(window.loss) / window.num_steps  # waits for the device
        seconds = time.monotonic() - window.started
        standing.trained_s += seconds
        self.log.write(
            "step",
            step=standing.num_steps,
            tokens=standing.num_tokens,
            progress=round(standing.progress, 5),
            loss=loss,
            gradient_norm=float(window.norm) / window.num_steps,
            rate=self.pace.peak_rate * standing.rate_scale * rate_factor(standing.progress),
            tokens_per_s=window.num_tokens / seconds,
            flops_share=window.num_flops / seconds / PEAK_FLOPS,
            wait_share=(self.feed.waited_s - window.waited_s) / seconds,
            memory_gib=_peak_gib(self._device),
            trained_s=round(standing.trained_s, 1),
        )
        self._window = self._new_window()
        return math.isfinite(loss)


def training_flops(shape: Shape, batch: PackedBatch) -> float:
    """Floating point operations of one step that the model asks for, attention's included."""
    lengths = np.diff(batch.starts).astype(np.float64)
    # Two products over the causal half, once forward and twice backward.
    attention = 6 * float(np.square(lengths).sum()) * shape.num_q_heads * shape.head_dim
    head = shape.vocab_size * shape.hidden_size
    return (
        6 * (shape.num_layer_parameters + head) * batch.tokens.size + shape.num_layers * attention
    )


def _peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
