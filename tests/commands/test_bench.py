"""`zipage bench`: what it prints; the load itself is the same each time."""

import json

import pytest

from zipage_lang.commands.bench import _summary
from zipage_lang.commands.bench_load import latencies, make_job
from zipage_lang.runtime.kv_params import KVParams

SMALL = ("--batch", 2, "--prompt-len", 6, "--max-tokens", 12, "--repeats", 2)
ENGINE = ("--num-blocks", 64, "--max-running", 2, "--num-threads", 1)


def test_a_budget_runs_in_turn_with_the_full_cache(zipage):
    budget = ("--kv-mode", "fixed", "--kv-budget", 4, "--evict-interval", 2)
    result = zipage("bench", "zipage-tiny-reasoner", *SMALL, *ENGINE, *budget)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "2 requests at once, 6 prompt tokens and 12 drawn each" in lines[0]
    assert [line.split()[0] for line in lines[1:5]] == ["K=4", "full"] * 2
    assert " 0 compactions" in lines[2]
    assert " 0 compactions" not in lines[1]
    assert lines[5].startswith("median: K=4 E=2 ")
    assert lines[5].endswith(" x full KV")


def test_json_lines_are_all_that_is_printed(zipage):
    result = zipage("bench", "zipage-tiny-reasoner", *SMALL, *ENGINE, "--json")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["batch"], row["max_tokens"], row["mode"]) for row in rows] == [(2, 12, "off")] * 2
    assert all(row["tok_s"] > 0 for row in rows)


def test_a_load_that_is_too_long_is_refused(zipage, asked):
    result = zipage("bench", "--prompt-len", 500, "--max-tokens", 100)
    assert result.exit_code == 2
    assert "make 600 tokens, the model takes 512" in result.stderr


def test_the_load_is_the_same_each_time_and_fits_the_vocabulary():
    def prompts(vocab_size):
        return make_job(3, 8, KVParams(), prompt_len=5, vocab_size=vocab_size).prompts

    assert prompts(50_000) == prompts(50_000)
    assert all(0 <= token < 128 for prompt in prompts(128) for token in prompt)
    job = make_job(3, 8, KVParams(), prompt_len=5, vocab_size=128)
    assert (job.batch, job.num_tokens) == (3, 24)


def test_latencies_are_of_all_requests():
    found = latencies(10.0, [[10.5, 10.6], [10.3, 10.6]])
    assert found["ttft_ms_median"] == pytest.approx(400)
    assert found["tpot_ms_median"] == pytest.approx(200)
    assert latencies(1.0, [[2.0]])["tpot_ms_p99"] == 0


def test_the_summary_is_of_medians():
    assert _summary({"K=1 E=1": [30.0, 10.0, 20.0], "full KV": [10.0]}) == (
        "median: K=1 E=1 20.0 tok/s, full KV 10.0 tok/s; K=1 E=1 is 2.00 x full KV"
    )
