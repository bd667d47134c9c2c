"""Memory that is short at the start: a clear error, or less of what one can do without."""

import logging

import pytest
import torch
from test_support.refusals import Refusals, RefusedMemory

from zipage_lang.kernels.backend import choose_backend
from zipage_lang.runtime.host_swap import HostSwap, StagedHostSwap
from zipage_lang.runtime.kv_cache import KVCache, KVShape

SHAPE = KVShape(num_layers=2, num_q_heads=2, num_kv_heads=1, head_dim=4, dtype=torch.float32)


class DirectLane:
    """Does the work at once."""

    def run(self, work, after):
        work()


@pytest.fixture
def cache():
    return KVCache(
        SHAPE, num_blocks=9, block_size=2, num_query_slots=1, window=2, device=torch.device("cpu")
    )


@pytest.fixture
def refuse_empty(monkeypatch):
    """`torch.empty` gives at most so many tensors, or elements."""
    empty = torch.empty

    def refuse(*, num_tensors=10**9, max_elements=2**62):
        left = iter(range(num_tensors))

        def scarce(shape, **kind):
            size = 1
            for length in shape:
                size *= length
            if size > max_elements or next(left, None) is None:
                raise RuntimeError("CUDA error: out of memory")
            return empty(shape, **{**kind, "pin_memory": False})

        monkeypatch.setattr(torch, "empty", scarce)

    return refuse


def test_a_pool_larger_than_the_machine_is_refused_with_its_size_and_the_fix(make_engine):
    with pytest.raises(ValueError, match=r"a KV pool of [0-9.]+ GiB \(1000000000000 blocks\)") as e:
        make_engine(num_blocks=10**12)
    assert "lower kv_cache_memory" in str(e.value)


@pytest.mark.parametrize("number", [0, 3, 10, 25])
def test_a_refusal_while_the_model_loads_is_one_clear_error(make_engine, number):
    refusals = Refusals(numbers=lambda asked: asked >= number)
    with (
        pytest.raises(ValueError, match="did not fit this machine's memory"),
        RefusedMemory(refusals),
    ):
        make_engine()


def test_host_memory_is_halved_until_the_host_gives_it(cache, refuse_empty, caplog):
    refuse_empty(max_elements=2 * 30 * 2 * 2 * 4)  # thirty blocks' K and V
    with caplog.at_level(logging.WARNING):
        assert HostSwap(cache, 100).take_memory() == 25
    assert "25 of the 100 blocks of swap_space" in caplog.text


def test_a_host_that_gives_nothing_means_no_swaps(cache, refuse_empty, caplog):
    refuse_empty(num_tensors=0)
    with caplog.at_level(logging.WARNING):
        assert HostSwap(cache, 100).take_memory() == 0
    assert "are computed again" in caplog.text


def test_pinned_memory_is_taken_as_far_as_it_goes(cache, refuse_empty, caplog):
    lanes = (DirectLane(), DirectLane(), DirectLane())
    swap = StagedHostSwap(cache, 20, choose_backend("cpu"), *lanes, piece_bytes=1, chunk_bytes=800)
    refuse_empty(num_tensors=2)
    with caplog.at_level(logging.WARNING):
        num_blocks = swap.take_memory()
    assert num_blocks == 2 * swap._chunk_len
    assert 0 < num_blocks < 20
    assert f"{num_blocks} of the 20 blocks" in caplog.text


def test_enough_host_memory_is_taken_without_a_word(cache, caplog):
    assert HostSwap(cache, 7).take_memory() == 7
    assert not caplog.messages


def test_an_engine_schedules_with_the_host_memory_it_got(make_engine, monkeypatch):
    monkeypatch.setattr(HostSwap, "take_memory", lambda _: 3)
    engine = make_engine(num_blocks=50)
    assert engine.limits.num_host_blocks == 3
    assert engine.stats()["num_free_host_blocks"] == 3
