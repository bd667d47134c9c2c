"""Our models give transformers' logits: whole and chunked prefill, decode, and mixtures of them.

Knows nothing of the scheduler or the engine.
"""

import pytest
import torch

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "llama": ("llama", {}),
    "llama_tied_mha": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": ("llama", {"head_dim": 20}),
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama_linear_rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "llama_yarn_rope": ("llama", {"rope_parameters": YARN}),
    "llama_dynamic_rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2_tied_gqa8": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "hidden_size": 32,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_tied_gqa1": (
        "qwen3",
        {"head_dim": 8, "tie_word_embeddings": True, "num_key_value_heads": 6},
    ),
    "qwen3_gqa8": (
        "qwen3",
        {"head_dim": 12, "num_attention_heads": 8, "num_key_value_heads": 1},
    ),
}


def assert_close(actual, expected, tolerance=1e-4):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.fixture(params=VARIANTS)
def twin(request, make_twin):
    family, overrides = VARIANTS[request.param]
    return make_twin(family, **overrides)


def test_prefill_and_decode_equal_transformers(twin, make_driver, prompts):
    driver = make_driver(twin.load(), num_seqs=3, max_len=48, block_size=4)
    expected = [twin.expected_logits(ids) for ids in prompts]

    whole = driver.feed({0: prompts[0][:-3]})  # a whole prompt
    assert_close(whole[0], expected[0][:-3])

    seen = {1: [], 2: []}
    for start in range(0, 35, 7):  # one decodes in pace while another prefills in chunks
        chunks = {2: prompts[2][start : start + 7]}
        if start < 7 * 3:
            chunks = {0: [prompts[0][-3 + start // 7]], **chunks}
        logits = driver.feed(chunks)
        seen[2].append(logits[2])
        if 0 in chunks:
            assert_close(logits[0], expected[0][-3 + start // 7][None])
    assert_close(torch.cat(seen[2]), expected[2][:35])

    for step in range(5):  # both decode
        logits = driver.feed({2: [prompts[2][35 + step]], 1: [prompts[1][step]]})
        assert_close(logits[2], expected[2][35 + step][None])
        assert_close(logits[1], expected[1][step][None])


@pytest.mark.parametrize("block_size", [1, 2, 16, 64])
def test_any_block_size_gives_the_same_logits(make_twin, make_driver, prompts, block_size):
    twin = make_twin("llama")
    driver = make_driver(twin.load(), num_seqs=2, max_len=64, block_size=block_size)
    logits = driver.feed({0: prompts[0], 1: prompts[2]})
    assert_close(logits[0], twin.expected_logits(prompts[0]))
    assert_close(logits[1], twin.expected_logits(prompts[2]))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_close_to_transformers_in_bfloat16(make_twin, make_driver, prompts, family):
    twin = make_twin(family, initializer_range=0.1)
    exact = twin.expected_logits(prompts[0])
    loaded = twin.load(torch.bfloat16)
    driver = make_driver(loaded, num_seqs=1, max_len=48, block_size=4, dtype=torch.bfloat16)
    ours = driver.feed({0: prompts[0]})[0]
    twin.theirs.to(torch.bfloat16)
    their_error = (twin.expected_logits(prompts[0]) - exact).abs().mean()
    our_error = (ours - exact).abs().mean()
    assert ours.dtype == torch.float32
    assert our_error < 1.5 * their_error
    assert our_error < 0.05 * exact.abs().mean()


@pytest.mark.parametrize("wanted", [[], [0], [4, 30], [31, 32, 33], [*range(5), 33]])
def test_wanted_states_alone_are_those_among_all(make_twin, make_driver, prompts, wanted):
    loaded = make_twin("qwen3", head_dim=16, num_hidden_layers=3).load()
    chunks = {1: prompts[1][:5], 0: prompts[0][:12], 2: prompts[2][:17]}
    ring_slots = torch.full((34,), -1)
    ring_slots[[4, 33]] = torch.tensor([3, 6])
    whole, cut = (make_driver(loaded, num_seqs=3, max_len=48, block_size=4) for _ in range(2))
    expected = whole.logits_of(None, chunks, ring_slots)
    found = cut.logits_of(wanted, chunks, ring_slots)
    assert found.shape == (len(wanted), expected.shape[1])
    assert_close(found, expected[wanted])
    for name in ("kv", "queries", "query_lse"):  # of all tokens, whoever is wanted
        parts = (getattr(driver.cache, name).nan_to_num(7.0) for driver in (cut, whole))
        assert_close(*parts)
    following = {seq: [prompts[seq][len(ids)]] for seq, ids in chunks.items()}
    assert_close(cut.logits_of(None, following), whole.logits_of(None, following))


def kept_by_hand(driver, seq, entry):
    """The log-sum-exps of a kept query that is its sequence's last: [num_layers, num_q_heads]."""
    cache, num = driver.cache, driver.lens[seq]
    keys = cache.kv[:, driver.tables[seq].long(), 0].flatten(1, 2)[:, :num]
    keys = keys.repeat_interleave(3, dim=2).double()  # [num_layers, num, num_q_heads, head_dim]
    scores = torch.einsum("lhd,lnhd->lhn", cache.queries[:, entry].double(), keys) / 16**0.5
    return scores.exp().sum(-1).log2().float()


def test_kept_queries_are_those_after_rope_with_their_lse(make_twin, make_driver, prompts):
    twin = make_twin("qwen3", head_dim=16)
    driver = make_driver(twin.load(), num_seqs=1, max_len=48, block_size=4)
    ring_slots = torch.full((len(prompts[0]),), -1)
    ring_slots[-2:] = torch.tensor([4, 5])
    driver.feed({0: prompts[0]}, ring_slots)

    cache = driver.cache
    assert_close(cache.query_lse[:, 5], kept_by_hand(driver, 0, 5))
    assert cache.queries[:, 4].abs().sum() > 0
    assert not cache.queries[:, [0, 1, 2, 3, 6, 7]].any()
    assert not cache.query_lse[:, [0, 1, 2, 3, 6, 7]].any()


def test_queries_kept_in_mixed_steps_equal_those_of_a_whole_prompt(make_twin, make_driver, prompts):
    """One sequence token by token beside another in chunks; each keeps its last four in a ring."""
    loaded = make_twin("qwen3", head_dim=16).load()
    whole = make_driver(loaded, num_seqs=2, max_len=48, block_size=4)
    for seq, ids in ((0, prompts[1]), (1, prompts[2][:36])):
        ring_slots = torch.full((len(ids),), -1)
        last = torch.arange(len(ids) - 4, len(ids))
        ring_slots[-4:] = seq * 4 + last % 4
        whole.feed({seq: ids}, ring_slots)

    mixed = make_driver(loaded, num_seqs=2, max_len=48, block_size=4)
    for step, token in enumerate(prompts[1]):
        chunk = prompts[2][step * 4 : step * 4 + 4]
        ring_slots = torch.tensor([step % 4, 4, 5, 6, 7])
        mixed.feed({0: [token], 1: chunk}, ring_slots)
        for seq, entry in ((0, step % 4), (1, 7)):
            assert_close(mixed.cache.query_lse[:, entry], kept_by_hand(mixed, seq, entry))
    assert whole.cache.queries.abs().sum((0, 2, 3)).min() > 0
    assert_close(mixed.cache.queries, whole.cache.queries)
    assert_close(mixed.cache.query_lse, whole.cache.query_lse)


def test_sharded_weights_give_the_same_logits(make_twin, make_driver, prompts):
    twin = make_twin("qwen2", shard_size="20KB")
    assert len(list(twin.folder.glob("*.safetensors"))) > 1
    driver = make_driver(twin.load(), num_seqs=1, max_len=48, block_size=8)
    assert_close(driver.feed({0: prompts[0]})[0], twin.expected_logits(prompts[0]))
