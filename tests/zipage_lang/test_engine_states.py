"""Forks, holds, aborts and pins on a real engine with a tiny random model; the engine counts."""

import asyncio

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import zipage_lang as zipage

BLOCK_SIZE = 16
NUM_BLOCKS = 160  # of the pool: small, so that old prefixes are evicted
GREEDY = {"temperature": 0, "ignore_eos": True}
BOUNDED = zipage.KV(mode="fixed", budget=16, interval=16, policy="streaming")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with random weights and a tokenizer of one token for each byte."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=258, special_tokens=["<|eos|>", "<|start|>"], initial_alphabet=alphabet
    )
    backend.train_from_iterator(["a text"], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model):
    options = {"num_threads": 1, "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    with zipage.Engine(str(model), dtype="float32", **options) as engine:
        yield engine


@pytest.fixture
def stats(engine):
    """Reads the engine's counters; each test begins with an empty cache."""

    def read(name):
        return ask(engine, engine.async_llm.stats())[name]

    ask(engine, engine.async_llm.flush_cache())
    return read


def ask(engine, work):
    return asyncio.run_coroutine_threadsafe(work, engine.loop).result()


def run(body, engine, **options):
    return zipage.function(body).run(backend=engine, **options)


def text_of(length, seed=0):
    """Text of so many tokens that no other seed begins with."""
    return (f"{seed:03d} " + "lorem ipsum dolor sit amet " * (length // 27 + 1))[:length]


def num_prefilled(stats, use):
    """Prompt tokens that the engine computed meanwhile; one alone counts as a decode."""
    before = stats("num_prefilled_tokens")
    use()
    return stats("num_prefilled_tokens") - before


def test_16_branches_of_1000_tokens_compute_the_prompt_once(engine, stats):
    def body(s):
        s += text_of(1000)  # right before the fork; 62 blocks and a half
        branches = s.fork(16)
        branches += lambda i: f" {i:02d}" + zipage.gen("x", max_tokens=2, **GREEDY)
        branches.join()

    assert num_prefilled(stats, lambda: run(body, engine)) == 1000 + 16 * 3


def test_three_forks_deep_and_four_wide_compute_each_shared_token_once(engine, stats):
    def grow(branch, level):
        for index, child in enumerate(branch.fork(4)):
            child += f" {level}{index}" + zipage.gen("x", max_tokens=3, **GREEDY)
            if level < 3:
                grow(child, level + 1)

    def body(s):
        s += text_of(100)
        grow(s, 1)

    num_nodes = 4 + 16 + 64
    drawn_before = stats("num_decoded_tokens")
    assert num_prefilled(stats, lambda: run(body, engine)) == 100 + 3 * num_nodes
    num_forks = 1 + 4 + 16  # each computes the last drawn token, and draws one that does not count
    assert stats("num_decoded_tokens") - drawn_before == 3 * num_nodes + num_forks
    assert stats("num_held_requests") == 0


def test_calls_in_a_row_compute_each_token_once(engine, stats):
    def body(s):
        for step in range(4):
            s += text_of(21, step) + zipage.gen("x", max_tokens=5, **GREEDY)

    # The last drawn token of a call is computed with the text that comes after it.
    assert num_prefilled(stats, lambda: run(body, engine)) == 4 * 21 + 3


def test_forked_branches_draw_what_they_would_draw_alone(engine, stats):
    def body(s):
        s += text_of(100)
        branches = s.fork(3)
        branches += lambda i: f" {i}" + zipage.gen("x", max_tokens=8, **GREEDY)
        branches.join()

    def alone(s, index):
        s += text_of(100) + f" {index}" + zipage.gen("x", max_tokens=8, **GREEDY)

    together = run(body, engine)["x"]
    ask(engine, engine.async_llm.flush_cache())
    for index, text in enumerate(together):
        assert run(lambda s, i=index: alone(s, i), engine)["x"] == text


def test_the_prefix_is_not_evicted_before_the_last_branchs_first_call(engine, stats):
    def flood():
        for seed in range(1, 7):  # each fills a third of the pool
            run(lambda s, n=seed: s.append(text_of(800, n) + zipage.gen("y", max_tokens=1)), engine)

    def body(s):
        s += text_of(300)
        branches = s.fork(2)
        branches[0] += " 0" + zipage.gen("x", max_tokens=2, **GREEDY)
        branches[0].sync()
        flood()
        branches[1] += " 1" + zipage.gen("x", max_tokens=2, **GREEDY)
        return branches[1].meta("x").usage.cached_tokens

    evicted_before = stats("num_evicted_nodes")
    assert run(body, engine).ret_value == 300
    assert stats("num_evicted_nodes") > evicted_before
    flood()
    again = run(lambda s: s.append(text_of(300) + zipage.gen("x", max_tokens=1)), engine)
    assert again.meta("x").usage.cached_tokens < BLOCK_SIZE  # without a hold it does not last


def test_cancelled_branches_give_their_blocks_back_at_once(engine, stats):
    def body(s):
        s += text_of(160)
        branches = s.fork(8, kv=BOUNDED)  # the one that stays does not grow meanwhile
        branches += lambda i: f" {i}" + zipage.gen("x", max_tokens=1000, **GREEDY)
        for delta in branches.deltas():
            if delta.branch == 7:
                break
        held_before = stats("num_held")
        branches.cancel(branches.states[1:], reason="one stays")
        branches[7].sync()  # the abort has been sent
        running, held = stats("num_running"), stats("num_held")
        branches.cancel()
        branches[0].sync()
        s.sync()
        return held_before, running, held, stats("num_running"), stats("num_held")

    held_before, running, held, running_after, held_after = run(body, engine).ret_value
    assert running == 1
    assert held < held_before
    assert held <= 160 // BLOCK_SIZE + 1 + 1000 // BLOCK_SIZE + 1
    assert (running_after, held_after) == (0, 0)


def test_a_decided_vote_leaves_nothing_running(engine, stats):
    def body(s):
        s += text_of(100)

        def answer(branch):
            if branch.index < 20:
                return "sure"
            branch += zipage.gen("x", max_tokens=2000, **GREEDY)
            return branch["x"]

        result = zipage.vote(s, 32, answer)
        return result, stats("num_running"), stats("num_waiting"), stats("num_held")

    result, running, waiting, held = run(body, engine).ret_value
    assert (result.winner, result.counts["sure"]) == ("sure", 17)  # more than the other 15
    assert 12 <= result.num_stopped <= 15
    assert (running, waiting, held) == (0, 0, 0)


def test_a_token_budget_over_branches_is_kept_to_the_token(engine, stats):
    def body(s):
        s += text_of(50)
        branches = s.fork(6)
        branches += zipage.gen("x", max_tokens=500, **GREEDY)
        branches.join()

    state = run(body, engine, budget=zipage.Budget(tokens=100))
    outputs = state.meta("x")
    assert sum(len(output.token_ids) for output in outputs) == 100
    assert all(output.stop_reason == "budget: tokens" for output in outputs)
    assert stats("num_running") == 0
    assert stats("num_held") == 0


def test_a_pin_survives_what_evicts_others_and_is_given_back(engine, stats):
    with zipage.pin(text_of(300), backend=engine):
        for seed in range(1, 7):
            run(lambda s, n=seed: s.append(text_of(800, n) + zipage.gen("y", max_tokens=1)), engine)
        state = run(
            lambda s: s.append(text_of(300) + " more" + zipage.gen("x", max_tokens=1)), engine
        )
        assert state.meta("x").usage.cached_tokens == 300
        assert stats("num_held_requests") == 1
    run(lambda s: s.append("x" + zipage.gen("x", max_tokens=1)), engine)
    assert stats("num_held_requests") == 0


def test_pinned_states_give_way_to_requests_that_need_their_blocks(engine, stats):
    pins = [zipage.pin(text_of(700, seed), backend=engine) for seed in (1, 2, 3)]
    for kept in pins:
        kept.wait()
    big = run(
        lambda s: s.append(text_of(2000, 9) + zipage.gen("x", max_tokens=2, **GREEDY)), engine
    )
    assert big.meta("x").usage.completion_tokens == 2
    assert stats("num_held_requests") < 3
    for kept in pins:
        kept.release()
