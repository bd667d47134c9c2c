"""Logprobs of prompt and drawn tokens equal those of transformers, however they are computed."""

import random

import pytest
import torch


@pytest.fixture(scope="module")
def tiny(make_tiny_model):
    return make_tiny_model("Qwen3", num_key_value_heads=2)


@pytest.fixture(scope="module")
def prompt():
    rng = random.Random(11)
    return [rng.randrange(199) for _ in range(45)]


def reference_logprobs(model, tokens):
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), -1)


def check_entry(entry, line, token_id):
    assert entry.token_id == token_id
    assert entry.logprob == pytest.approx(line[token_id].item(), abs=1e-4)
    assert entry.rank == 1 + (line > line[token_id]).sum().item()
    likeliest = line.topk(len(entry.top))
    assert [top_id for top_id, _ in entry.top] == likeliest.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(likeliest.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"max_chunk_len": 7}, {"overlap": True}], ids=str)
def test_prompt_and_output_logprobs_equal_transformers(tiny, driver, prompt, options):
    folder, model = tiny
    engine = driver(folder, **options)
    engine.add("a", prompt, temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2)
    engine.finish()
    outputs = engine.outputs["a", 0]
    lines = reference_logprobs(model, prompt + engine.tokens("a"))
    entries = outputs[0].prompt_logprobs
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for index in range(1, len(prompt)):
        check_entry(entries[index], lines[index - 1], prompt[index])
    drawn = [entry for output in outputs for entry in output.logprobs]
    for index, entry in enumerate(drawn):
        check_entry(entry, lines[len(prompt) - 1 + index], engine.tokens("a")[index])


def test_prompt_logprobs_from_a_start_take_what_is_before_from_the_cache(tiny, driver, prompt):
    folder, model = tiny
    engine = driver(folder)
    engine.add("warm", prompt, temperature=0, max_tokens=2)
    engine.finish()
    engine.add(
        "late", prompt, temperature=0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=40
    )
    engine.finish()
    assert engine.final("late").usage.cached_tokens == 32  # two whole blocks before token 39
    lines = reference_logprobs(model, prompt)
    entries = engine.outputs["late", 0][0].prompt_logprobs
    assert entries[:40] == [None] * 40
    for index in range(40, len(prompt)):
        check_entry(entries[index], lines[index - 1], prompt[index])
