"""Where prompts go to the kernel for Hopper, and how much room its plan is given. Needs no card."""

import logging
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zipage_lang.kernels.backend import AttentionBatch
from zipage_lang.kernels.flashinfer_build import BuildError
from zipage_lang.kernels.flashinfer_module import Heads
from zipage_lang.kernels.host_rows import HostRows
from zipage_lang.kernels.plan_buffers import workspace_bytes
from zipage_lang.kernels.prompt_attention import TILE_TOKENS, PromptAttention
from zipage_lang.kernels.prompt_choice import _keys_read, is_for_hopper
from zipage_lang.kernels.prompt_module import FOR_HOPPER, PromptLaunch

NUM_SMS = 132


def chosen(seqs, num_q_heads=32, num_kv_heads=8, tile_tokens=128):
    q_lens, kv_lens = np.array(seqs, dtype=np.int32).T
    return is_for_hopper(q_lens, kv_lens, num_q_heads, num_kv_heads, tile_tokens, NUM_SMS)


# Both kernels' times on an H200, heads of 128: more than 1.05 times apart.
@pytest.mark.parametrize(
    "seqs",
    [
        [(4096, 4096)],
        [(4096, 20480)],
        [(512, 8192)],
        [(350, 1374)] * 8,
        [(2048, 3072)] * 2,
        [(130, 900), (1024, 5000)],
    ],
)
def test_long_prompts_are_for_hopper(seqs):
    assert chosen(seqs)


@pytest.mark.parametrize(
    "seqs",
    [
        [(8, 1032)] * 16,
        [(24, 4120)] * 16,
        [(48, 16432)] * 8,
        [(64, 4160)] * 32,
        [(96, 16480)],  # one sequence, read by 32 multiprocessors alone
        [(1, 4096)] * 60 + [(200, 8192)],  # decodes that came late
    ],
)
def test_few_tokens_of_each_are_not(seqs):
    assert not chosen(seqs)


@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(0, 3000)), min_size=1, max_size=6),
    st.sampled_from([1, 16, 32, 128, 192]),
)
def test_keys_are_counted_as_tiles_read_them(pairs, tile):
    q_lens = np.array([q_len for q_len, _ in pairs])
    kv_lens = np.array([q_len + held for q_len, held in pairs])
    read = sum(
        held + min(end, q_len) for q_len, held in pairs for end in range(tile, q_len + tile, tile)
    )
    assert _keys_read(q_lens, kv_lens, tile) == read


def test_lengths_beyond_int32_in_sum_are_counted():
    assert chosen([(2**20, 2**30)] * 40)


def test_more_query_heads_than_a_tile_has_rows_are_counted():
    assert not chosen([(1, 5000)] * 600, num_q_heads=256, num_kv_heads=1)


class PlannedModule:
    """Stands in for the compiled module: what a plan was given, and what was run with it."""

    def __init__(self):
        self.planned, self.run_with = [], []

    def plan(self, workspaces, index, kv_lens, heads):
        self.planned.append((workspaces, index, kv_lens))
        return PromptLaunch((len(self.planned),))

    def run(self, *arguments):
        self.run_with.append(arguments)


class HostBuffers:
    """PlanBuffers without a card."""

    def __init__(self):
        self.workspace = torch.zeros(1, dtype=torch.uint8)
        self.entries = torch.zeros(500, dtype=torch.int32)
        self.num_bytes = 0

    def next_host(self, num_entries, num_tiles, num_tokens):
        self.num_bytes = workspace_bytes(num_tiles, num_tokens)
        return types.SimpleNamespace(
            workspace=torch.zeros(1, dtype=torch.uint8),
            entries=torch.zeros(num_entries, dtype=torch.int32),
        )

    def send(self, host, num_entries):
        self.entries[:num_entries] = host.entries[:num_entries]


def bytes_taken(num_items):
    """By PrefillSM90Plan of FlashInfer 0.6.11: seven numbers an item, and where each CTA begins;
    every array starts at a multiple of 16 bytes."""
    arrays = [4 * num_items] * 7 + [4 * (NUM_SMS + 1)]
    return sum(-(-num_bytes // 16) * 16 for num_bytes in arrays)


@pytest.mark.parametrize("num_seqs", [1, 64, 5000])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_plan_of_any_size_has_room(head_dim, num_seqs):
    ones = np.ones(num_seqs, dtype=np.int32)
    rows = HostRows(2 * ones, 2 * ones, np.ones((num_seqs, 1), dtype=np.int32))
    buffers = HostBuffers()
    buffers.entries = torch.zeros(10 * num_seqs, dtype=torch.int32)
    prompts = PromptAttention(PlannedModule(), torch.device("cpu"))
    prompts.plan(rows, Heads(64, 8, head_dim, 16), buffers)
    assert buffers.num_bytes >= bytes_taken(64 * num_seqs)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_plan_has_room_for_all_its_items_and_an_index_on_the_device(head_dim):
    heads = Heads(32, 8, head_dim, 16)
    q_lens, kv_lens = [200, 1, 385], [300, 44, 385]
    tables = torch.arange(1, 90, dtype=torch.int32).view(1, -1).repeat(3, 1)
    batch = AttentionBatch(
        torch.tensor([0, 200, 201, 586], dtype=torch.int32),
        torch.tensor(kv_lens, dtype=torch.int32),
        tables,
    )
    module, buffers = PlannedModule(), HostBuffers()
    prompts = PromptAttention(module, torch.device("cpu"))
    part = prompts.plan(HostRows.of(batch), heads, buffers)
    tiles = sum(-(-q_len // TILE_TOKENS[head_dim]) for q_len in q_lens)
    assert buffers.num_bytes >= bytes_taken(32 * tiles)
    [(_, index, planned_lens)] = module.planned
    assert planned_lens.tolist() == kv_lens
    for here, there in zip(index, part.index, strict=True):
        assert here.tolist() == there.tolist()
        assert there.data_ptr() != here.data_ptr()
    assert part.num_tokens == sum(q_lens)
    prompts.run(part, "q", "kv", "out", None, 0.1)
    [(workspaces, launch, *rest)] = module.run_with
    assert workspaces[1] is buffers.workspace
    assert launch == PromptLaunch((1,))
    assert rest == ["q", "kv", part.index, "out", None, 0.1]


@pytest.mark.parametrize(
    ("capability", "head_dim", "is_there"),
    [((9, 0), 128, True), ((9, 0), 64, True), ((9, 0), 256, False), ((8, 0), 128, False)],
)
def test_other_cards_and_sizes_have_none(monkeypatch, capability, head_dim, is_there):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(FOR_HOPPER, "build", lambda dtype, head_dim: None)
    monkeypatch.setattr(FOR_HOPPER, "load", lambda dtype, head_dim: PlannedModule())
    found = PromptAttention.load(torch.device("cpu"), torch.bfloat16, head_dim)
    assert (found is not None) == is_there


def test_a_build_that_fails_costs_a_warning_and_speed(monkeypatch, caplog):
    def fails(dtype, head_dim):
        raise BuildError("could not be built: fatal error: curand_kernel.h: No such file")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(FOR_HOPPER, "build", fails)
    with caplog.at_level(logging.WARNING):
        assert PromptAttention.load(torch.device("cpu"), torch.bfloat16, 128) is None
    assert "long prompts take longer" in caplog.text
    assert "curand_kernel.h" in caplog.text


def test_memory_refused_while_loading_is_no_missing_build(monkeypatch):
    def refuses(dtype, head_dim):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(FOR_HOPPER, "build", lambda dtype, head_dim: None)
    monkeypatch.setattr(FOR_HOPPER, "load", refuses)
    with pytest.raises(torch.OutOfMemoryError):
        PromptAttention.load(torch.device("cpu"), torch.bfloat16, 128)
