"""Trains the tiny reasoner, in one piece or several: the command line, and what a piece is made of.

    python training/train.py --out DIR --minutes 9 --until 0.5
    python training/train.py --out DIR --minutes 9 --until 1 --resume DIR

A piece trains from where the checkpoint stands up to `--until` (1 is the end of the whole
training) in the wall-clock time it has, so the learning rate has fallen to nothing exactly when the
last piece ends, however fast the machine is. Knows nothing of how a step is made.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from attention import choose_attention
from checkpoint import Standing, load_checkpoint, save_checkpoint
from export import export_model
from feed import Feed
from generation import write_solutions
from held_out import ExactnessCheck, HeldOut, draw_held_out, summarize
from mixture import Mixture
from model_card import write_model_card
from optimizer import MuonAdam
from options import batch_size, parse_options, shape_of
from packing import Source, source_of
from reasoner import Reasoner, Shape
from run_log import RunLog, read_log
from schedule import CountedProgress, Progress, TimedProgress
from trainer import Pace, Trainer

from zipage_lang.evaluation.families import FAMILIES

GENERATION_LIMIT_S = 22.0


def main() -> None:
    started = time.monotonic()
    options = parse_options(__doc__)
    log = RunLog(options.out / "log.jsonl")
    log.write(
        "begin", torch=torch.__version__, options={k: str(v) for k, v in vars(options).items()}
    )
    Piece(options, log, started).run()


class Piece:
    """One call's share of a training."""

    def __init__(self, options: argparse.Namespace, log: RunLog, started: float) -> None:
        """started: when the call's time began, by the monotonic clock."""
        self.options, self.log = options, log
        saved = load_checkpoint(options.resume) if options.resume else {}
        self.standing: Standing = saved.get("standing") or Standing()
        self.shape: Shape = saved.get("shape") or shape_of(options)
        self.source = source_of(FAMILIES)
        self.mixture = Mixture(self.source.cells)
        self.mixture.wrong = saved.get("wrong") or self.mixture.wrong
        self.size = batch_size(options.batch_tokens, self.shape.context)
        # Workers are forked here, before the card is first touched.
        self.feed = Feed(
            self.source,
            self.size,
            options.workers,
            options.seed,
            lambda: self.mixture.weights(self.standing.progress),
            saved.get("feed"),
        )
        self.device = torch.device(options.device)
        self.attend = choose_attention(self.device, log.note)
        self.model = self._new_model(torch.float32)
        self.model.initialize(options.seed)
        self.optimizer = MuonAdam(self.model)
        if saved:
            self._restore(saved)
        self.trainer = Trainer(
            self.model,
            self.optimizer,
            self.feed,
            self._progress(started),
            Pace(options.rate, options.log_every, options.check_every),
            self.standing,
            log,
        )
        self.held_out = draw_held_out(self.source, options.seed, options.problems)
        self.exactness = ExactnessCheck(
            self.held_out, len(self.source.cells), self.size, self.device
        )

    def run(self) -> None:
        """Train, then save, score and export what came out."""
        self.save()
        if self.device.type == "cuda":
            self.trainer.compile(self.size)
        self.trainer.run(self.check, self.recover)
        self.feed.close()
        self.log.guard("save", self.save)
        self.log.guard("export", self.export)
        self.log.guard("first slips", self.show_slips)
        self.log.guard("exactness", self.look)
        self.log.guard("generation", self.generate)
        self.log.guard("card", self.write_card)
        self.log.guard("summary", self.sum_up)

    def check(self) -> None:
        """What is done every minute or so."""
        self.log.guard("exactness", self.look)
        self.log.guard("save", self.save)
        self.log.guard("export", self.export)

    def look(self) -> None:
        """Exactness on held-out problems, which also steers the mixture."""
        scores = self.exactness.score(self.model)
        self.mixture.observe([score.sampled for score in scores])
        self.log.write(
            "exactness",
            step=self.standing.num_steps,
            greedy=summarize(scores, self.source, lambda score: score.greedy),
            sampled=summarize(scores, self.source, lambda score: score.sampled),
            problems=[score.num_problems for score in scores],
        )

    def show_slips(self) -> None:
        for cell, slip in self.exactness.first_slips(self.model).items():
            family, level = self.source.cells[cell]
            self.log.write("slip", family=family, level=level, text=slip)

    def generate(self) -> None:
        """Accuracy by decoding with the full KV cache, as the harness will measure it."""
        writer = self._new_model(self.model.compute_dtype)
        writer.load_state_dict(self.model.state_dict())
        began = time.monotonic()
        prompts = [problem.prompt for problem in self.held_out.problems]
        written = write_solutions(writer, prompts, 0.6, self.options.seed, GENERATION_LIMIT_S)
        self.log.write(
            "generation",
            step=self.standing.num_steps,
            accuracy=accuracy_table(self.source, self.held_out, [text.text for text in written]),
            unfinished=sum(not text.has_ended for text in written),
            mean_len=sum(len(text.text) for text in written) / len(written),
            seconds=time.monotonic() - began,
        )

    def export(self) -> None:
        export_model(self.model, self.options.out / "model")

    def write_card(self) -> None:
        write_model_card(self.options.out / "model", self.options.out / "log.jsonl")

    def sum_up(self) -> None:
        """What this call's steps were like: medians, and the loss at both ends."""
        records = read_log(self.options.out / "log.jsonl")
        begin = max(at for at, record in enumerate(records) if record["kind"] == "begin")
        steps = [record for record in records[begin:] if record["kind"] == "step"]
        names = ("tokens_per_s", "flops_share", "wait_share")
        medians = {name: statistics.median(step[name] for step in steps) for name in names}
        ends = {name: steps[-1][name] for name in ("step", "tokens", "memory_gib", "trained_s")}
        failures = [record["what"] for record in records[begin:] if record["kind"] == "failure"]
        losses = {"first_loss": steps[0]["loss"], "last_loss": steps[-1]["loss"]}
        self.log.write("summary", **medians, **ends, **losses, failures=failures)

    def save(self) -> None:
        save_checkpoint(
            self.options.out,
            {
                "shape": self.shape,
                "standing": self.standing,
                "wrong": self.mixture.wrong,
                "feed": self.feed.state(),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            },
        )

    def recover(self) -> None:
        """Go back to the last checkpoint, and on at half the rate with the batches that follow."""
        scale = self.standing.rate_scale / 2
        saved = load_checkpoint(self.options.out)
        self._restore(saved)
        self.standing.rate_scale = scale
        self.log.write("recovery", back_to_step=saved["standing"].num_steps, rate_scale=scale)

    def _restore(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def _new_model(self, parameter_dtype: torch.dtype) -> Reasoner:
        """A model on the device that computes in bfloat16 on a card, in float32 elsewhere."""
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return Reasoner(self.shape, self.attend, dtype).to(self.device, parameter_dtype)

    def _progress(self, started: float) -> Progress:
        options = self.options
        if options.steps:
            return CountedProgress(options.steps, options.until)
        deadline = started + 60 * options.minutes - options.reserve
        return TimedProgress(self.standing.progress, options.until, deadline)


def accuracy_table(source: Source, held_out: HeldOut, texts: list[str]) -> dict[str, list[float]]:
    """Family -> share of right answers per level."""
    right: dict[int, list[bool]] = {cell: [] for cell in range(len(source.cells))}
    for problem, cell, text in zip(held_out.problems, held_out.cells, texts, strict=True):
        right[cell].append(source.families[problem.family].check(problem.answer, text))
    table: dict[str, list[float]] = {}
    for cell, (family, _) in enumerate(source.cells):
        table.setdefault(family, []).append(round(sum(right[cell]) / len(right[cell]), 4))
    return table


if __name__ == "__main__":
    main()
