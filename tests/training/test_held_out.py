"""Exactness and generation against plain loops over one text at a time."""

import pytest
import torch
from generation import write_solutions
from held_out import TEMPERATURE, ExactnessCheck, draw_held_out
from tokenizer import BOS_ID, CHARACTERS, EOS_ID, encode_text

CPU = torch.device("cpu")


def logits_of(model, ids):
    """[num_ids, vocab_size]."""
    starts = torch.tensor([0, len(ids)], dtype=torch.int32)
    with torch.no_grad():
        return model.logits(model(torch.tensor(list(ids)), starts))


def test_exactness_is_the_product_of_each_tokens_probability(model, source, size):
    held_out = draw_held_out(source, 1, 40)
    scores = ExactnessCheck(held_out, len(source.cells), size, CPU).score(model)
    assert [score.num_problems for score in scores] == [20, 20, 20, 20]
    expected = [[], [], [], []]
    for document in held_out.documents():
        log_probs = (logits_of(model, document.ids[:-1]) / TEMPERATURE).log_softmax(-1)
        wanted = torch.tensor(list(document.ids[1:]))
        chosen = log_probs.gather(1, wanted[:, None])[document.solution_start - 1 :]
        expected[document.cell].append(float(chosen.sum().exp()))
    for score, values in zip(scores, expected, strict=True):
        assert score.sampled == pytest.approx(sum(values) / len(values), rel=1e-3)
        assert score.greedy == 0


def test_greedy_exactness_is_one_where_the_model_is_sure(model, source, size, monkeypatch):
    held_out = draw_held_out(source, 1, 8)
    check = ExactnessCheck(held_out, len(source.cells), size, CPU)
    batch = next(check._on_device())
    perfect = torch.nn.functional.one_hot(batch.targets, 128) * 50.0
    monkeypatch.setattr(model, "logits", lambda hidden: perfect)
    assert all(score.greedy == 1 and score.sampled > 0.999 for score in check.score(model))
    assert check.first_slips(model) == {}
    slipped = int((batch.counted & (batch.tokens != BOS_ID)).nonzero()[3])
    perfect[slipped] = perfect[slipped].roll(1)
    assert sum(score.greedy < 1 for score in check.score(model)) == 1
    assert len(check.first_slips(model)) == 1


def test_held_out_problems_are_the_same_each_time_and_no_training_text(source):
    first, again = (draw_held_out(source, 1, 40) for _ in range(2))
    assert first == again
    assert draw_held_out(source, 2, 40).problems != first.problems


def test_written_texts_are_what_a_loop_without_a_cache_writes(model):
    prompts = ["back abc\n", "front a\n", "back fedcba\n"]
    written = write_solutions(model, prompts, temperature=1e-4, seed=1, limit_s=100)
    for prompt, result in zip(prompts, written, strict=True):
        ids = bytes([BOS_ID]) + encode_text(prompt)
        start = len(ids)
        while len(ids) <= model.shape.context and ids[-1] != EOS_ID:
            ids += bytes([int(logits_of(model, ids)[-1].argmax())])
        has_ended = ids[-1] == EOS_ID
        own = [i - 4 for i in ids[start : len(ids) - has_ended] if 0 <= i - 4 < len(CHARACTERS)]
        assert result.text == "".join(CHARACTERS[i] for i in own)
        assert result.has_ended == has_ended


def test_sequences_that_end_early_keep_their_text_when_others_go_on(model, monkeypatch):
    prompts = [f"back {letter}\n" for letter in "abcdefgh"]
    alone = write_solutions(model, prompts, temperature=1e-4, seed=1, limit_s=100)
    monkeypatch.setattr("generation.LOOK_EVERY", 1)
    monkeypatch.setattr("generation.WORTH_SHRINKING", 1.0)
    assert write_solutions(model, prompts, temperature=1e-4, seed=1, limit_s=100) == alone


def test_a_time_limit_ends_the_writing(model, monkeypatch):
    monkeypatch.setattr("generation.LOOK_EVERY", 16)
    (written,) = write_solutions(model, ["back abc\n"], temperature=1.0, seed=1, limit_s=0)
    assert len(written.text) <= 16
