"""A tiny training: it learns, goes on after a pause as if there were none, and leaves a model."""

import dataclasses
import json
import sys

import pytest
import torch
import train
from attention import attend_by_document
from checkpoint import Standing
from feed import Feed
from optimizer import MuonAdam
from packing import draw_batch
from reasoner import Reasoner
from run_log import RunLog, read_log
from schedule import CountedProgress
from trainer import Pace, Trainer

CPU = torch.device("cpu")
EVEN = [1.0, 1.0, 1.0, 1.0]


@pytest.fixture
def call(tmp_path, monkeypatch, source, shape, size):
    """Runs train.py's main on the small families, with small steps."""
    monkeypatch.setattr(train, "FAMILIES", source.families)
    monkeypatch.setattr(train, "batch_size", lambda num_tokens, context: size)
    small = ["--device", "cpu", "--workers", "2", "--batch-tokens", "512", "--problems", "4"]
    for name, value in dataclasses.asdict(shape).items():
        if isinstance(value, int) and name != "vocab_size":
            small += [f"--{name.replace('_', '-')}", str(value)]

    def run(folder, *options):
        arguments = ["--out", str(tmp_path / folder), *small, "--log-every", "5", *options]
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        train.main()
        return read_log(tmp_path / folder / "log.jsonl")

    return run


def of_kind(records, kind):
    return [record for record in records if record["kind"] == kind]


def test_a_nano_model_learns_a_few_hundred_short_texts_by_heart(source, size, shape, tmp_path):
    batches = [draw_batch(source, size, EVEN, 1, index) for index in range(8)]

    class Again:
        """A feed that hands out the same batches over and over."""

        waited_s, asked = 0.0, 0

        def next(self):
            self.asked += 1
            return batches[self.asked % len(batches)]

    wide = dataclasses.replace(shape, hidden_size=64, intermediate_size=128)
    model = Reasoner(wide, attend_by_document, torch.float32)
    model.initialize(1)
    log = RunLog(tmp_path / "log.jsonl")
    Trainer(
        model,
        MuonAdam(model),
        Again(),
        CountedProgress(160, until=1.0),
        Pace(peak_rate=1e-2, log_every=20, check_every_s=1e9),
        Standing(),
        log,
    ).run(check=lambda: None, recover=lambda: None)
    losses = [record["loss"] for record in read_log(tmp_path / "log.jsonl")]
    assert losses[0] > 1
    assert losses[-1] < 0.02


def test_two_pieces_give_the_losses_and_weights_of_one(call, tmp_path):
    whole = of_kind(call("whole", "--steps", "30"), "step")
    call("parts", "--steps", "30", "--until", "0.5")
    resume = ["--resume", str(tmp_path / "parts")]
    parts = of_kind(call("parts", "--steps", "30", *resume), "step")
    assert [record["loss"] for record in parts] == [record["loss"] for record in whole]
    assert whole[-1]["step"] == 30
    files = [
        sorted((tmp_path / folder / "model").glob("*.safetensors")) for folder in ("whole", "parts")
    ]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_a_piece_leaves_a_model_its_scores_and_a_card(call, tmp_path):
    records = call("run", "--steps", "10")
    assert not of_kind(records, "failure")
    (exactness,) = of_kind(records, "exactness")
    (generation,) = of_kind(records, "generation")
    assert set(exactness["sampled"]) == set(generation["accuracy"]) == {"back", "front"}
    (summary,) = of_kind(records, "summary")
    assert summary["failures"] == []
    assert summary["step"] == 10
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "| back |" in card
    assert f"{of_kind(records, 'step')[-1]['loss']:.4f}" in card
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["vocab_size"] == 128


def test_what_fails_after_training_does_not_cost_the_model(call, tmp_path, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no room on the card")

    monkeypatch.setattr(train, "write_solutions", broken)
    monkeypatch.setattr(train.ExactnessCheck, "score", broken)
    records = call("run", "--steps", "5")
    failures = of_kind(records, "failure")
    assert [failure["what"] for failure in failures] == ["exactness", "generation"]
    assert all("no room on the card" in failure["trace"] for failure in failures)
    assert (tmp_path / "run" / "model" / "model.safetensors.index.json").is_file()
    assert (tmp_path / "run" / "checkpoint.pt").is_file()


def test_a_loss_that_is_no_number_is_taken_back_at_half_the_rate(call, monkeypatch):
    step, calls = MuonAdam.step, []

    def poisoned(self, rate):
        calls.append(rate)
        if len(calls) == 7:
            self._all[0].grad.fill_(float("nan"))
        return step(self, rate)

    monkeypatch.setattr(MuonAdam, "step", poisoned)
    records = call("run", "--steps", "60")
    (recovery,) = of_kind(records, "recovery")
    assert recovery == recovery | {"back_to_step": 0, "rate_scale": 0.5}
    last = of_kind(records, "step")[-1]
    assert last["step"] == 60
    assert last["loss"] < of_kind(records, "step")[0]["loss"]
    assert max(calls[10:]) == pytest.approx(max(calls[:10]) / 2)


def test_a_folder_without_a_checkpoint_is_refused(call, tmp_path):
    with pytest.raises(ValueError, match=r"there is no checkpoint\.pt in that folder"):
        call("run", "--resume", str(tmp_path))


def test_batches_come_in_order_and_do_not_depend_on_the_workers(source, size):
    expected = [draw_batch(source, size, EVEN, 1, i).tokens.tobytes() for i in range(9)]
    for num_workers in (1, 3):
        feed = Feed(source, size, num_workers, 1, lambda: EVEN)
        assert [feed.next().tokens.tobytes() for _ in range(9)] == expected
        feed.close()


def test_a_feed_goes_on_with_the_weights_that_were_asked_before(source, size):
    first = Feed(source, size, 2, 1, lambda: EVEN)
    first.next()
    second = Feed(source, size, 1, 1, lambda: [0.0, 0.0, 0.0, 1.0], first.state())
    for _ in range(4):
        assert second.next().tokens.tobytes() == first.next().tokens.tobytes()
    assert set(second.next().cells) == {3, -1}
    first.close()
    second.close()


def test_a_killed_worker_costs_no_batch(source, size):
    feed = Feed(source, size, 2, 1, lambda: EVEN)
    expected = [draw_batch(source, size, EVEN, 1, i).tokens.tobytes() for i in range(12)]
    drawn = [feed.next().tokens.tobytes()]
    for process in list(feed._pool._processes.values()):
        process.kill()
        process.join()
    drawn += [feed.next().tokens.tobytes() for _ in range(11)]
    assert drawn == expected
    feed.close()
