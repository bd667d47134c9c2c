"""Whole blocks of every pool tensor go to host memory and come back, into whatever blocks, however
late or early the lanes beside the steps get to work."""

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from functools import partial

import pytest
import torch

from zipage_lang.kernels.backend import choose_backend
from zipage_lang.runtime.host_swap import HostSwap, StagedHostSwap, make_host_swap
from zipage_lang.runtime.kv_cache import KVCache, KVShape
from zipage_lang.runtime.step_plan import BlockSwap

NUM_BLOCKS = 9
NUM_HOST_BLOCKS = 7


@dataclasses.dataclass(eq=False)
class Job:
    work: Callable[[], None]
    lane: "LazyLane"
    after: list


class LazyLane:
    """Holds work back until someone waits for it, or until it is told to catch up."""

    def __init__(self):
        self.waiting = deque()

    def run(self, work, after):
        job = Job(work, self, [mark for mark in after if mark is not None])
        self.waiting.append(job)
        return job

    def finish(self, job):
        while job in self.waiting:
            self.do_next()

    def do_next(self):
        job = self.waiting[0]
        for earlier in job.after:
            earlier.lane.finish(earlier)
        self.waiting.popleft().work()


class EagerLane(LazyLane):
    """The steps' lane as the test sees it: nothing is held back."""

    def run(self, work, after):
        job = super().run(work, after)
        self.finish(job)
        return job


def run_in_any_order(lanes, draw):
    """Do all that is held back: each lane in order, but whichever lane may go next."""
    while any(lane.waiting for lane in lanes):
        lane = draw.choice([lane for lane in lanes if lane.waiting])
        earlier = lane.waiting[0].after
        if not any(job in job.lane.waiting for job in earlier):
            lane.waiting.popleft().work()


def make_cache(device="cpu"):
    shape = KVShape(num_layers=3, num_q_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    cache = KVCache(
        shape,
        num_blocks=NUM_BLOCKS,
        block_size=4,
        num_query_slots=1,
        window=2,
        device=torch.device(device),
    )
    for pool in cache.block_pools:
        pool.copy_(torch.randn(pool.shape).mul(1000).to(pool.dtype))
    return cache


def make_staged(cache, lanes, piece_len=2, chunk_len=3):
    line = sum(pool[:, 0].nbytes for pool in cache.block_pools)
    return StagedHostSwap(
        cache,
        NUM_HOST_BLOCKS,
        choose_backend("cpu"),
        *lanes,
        piece_bytes=piece_len * line,
        chunk_bytes=chunk_len * line,
    )


def simple(cache):
    return HostSwap(cache, NUM_HOST_BLOCKS)


def staged(cache):
    return make_staged(cache, (EagerLane(), LazyLane(), LazyLane()))


def one_line_pieces(cache):
    return make_staged(cache, (EagerLane(), EagerLane(), LazyLane()), piece_len=1, chunk_len=1)


def one_large_piece(cache):
    return make_staged(cache, (EagerLane(), LazyLane(), EagerLane()), piece_len=99, chunk_len=99)


WAYS = [simple, staged, one_line_pieces, one_large_piece]


@pytest.mark.parametrize("make", WAYS)
def test_swapped_blocks_come_back_into_other_blocks_with_all_that_they_held(make):
    cache = make_cache()
    before = [pool.clone() for pool in cache.block_pools]
    swap = make(cache)
    swap.swap_out([BlockSwap(block_id=2, host_id=4), BlockSwap(block_id=7, host_id=0)])
    for pool in cache.block_pools:
        pool[:, [2, 7]] = 0
    swap.swap_in([BlockSwap(block_id=7, host_id=4), BlockSwap(block_id=1, host_id=0)])
    for pool, old in zip(cache.block_pools, before, strict=True):
        assert torch.equal(pool[:, 7], old[:, 2])
        assert torch.equal(pool[:, 1], old[:, 7])
        assert torch.equal(pool[:, 3:7], old[:, 3:7])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("make", WAYS)
def test_many_swaps_in_a_row_keep_what_was_swapped(make, seed):
    cache = make_cache()
    swap_over_and_over(cache, make(cache), random.Random(seed))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_many_swaps_on_a_card_keep_what_was_swapped(seed):
    cache = make_cache("cuda")
    swap = make_host_swap(cache, NUM_HOST_BLOCKS, choose_backend("cuda"))
    swap_over_and_over(cache, swap, random.Random(seed))
    assert isinstance(swap, StagedHostSwap)


def swap_over_and_over(cache, swap, draw):
    """Pieces and host lines are used again and again; blocks are overwritten once they left."""
    kept = {}  # host_id -> what must come back
    for turn in range(20):
        free = [host_id for host_id in range(NUM_HOST_BLOCKS) if host_id not in kept]
        host_ids = draw.sample(free, draw.randint(0, len(free)))
        block_ids = draw.sample(range(NUM_BLOCKS), len(host_ids))
        for block_id, host_id in zip(block_ids, host_ids, strict=True):
            kept[host_id] = [pool[:, block_id].clone() for pool in cache.block_pools]
        swap.swap_out([BlockSwap(*pair) for pair in zip(block_ids, host_ids, strict=True)])
        for pool in cache.block_pools:
            pool[:, block_ids] = turn
        back = draw.sample(sorted(kept), draw.randint(0, len(kept)))
        block_ids = draw.sample(range(NUM_BLOCKS), len(back))
        swap.swap_in([BlockSwap(*pair) for pair in zip(block_ids, back, strict=True)])
        for block_id, host_id in zip(block_ids, back, strict=True):
            for pool, wanted in zip(cache.block_pools, kept.pop(host_id), strict=True):
                assert torch.equal(pool[:, block_id], wanted), (turn, host_id)


@pytest.mark.parametrize("seed", range(40))
def test_lanes_may_run_in_any_order_that_their_marks_allow(seed):
    """The device lags behind the host by all of it: blocks leave, are overwritten, come back."""
    draw = random.Random(seed)
    cache = make_cache()
    before = [pool.clone() for pool in cache.block_pools]
    lanes = steps, _, _ = (LazyLane(), LazyLane(), LazyLane())
    swap = make_staged(cache, lanes, piece_len=draw.randint(1, 3))
    places = list(range(NUM_HOST_BLOCKS))  # where the content of each of these blocks is
    for turn in range(6):
        host_ids = draw.sample(range(NUM_HOST_BLOCKS), NUM_HOST_BLOCKS)
        swap.swap_out([BlockSwap(*pair) for pair in zip(places, host_ids, strict=True)])
        for pool in cache.block_pools:
            steps.run(partial(pool.fill_, turn), [])
        places = draw.sample(range(NUM_BLOCKS), NUM_HOST_BLOCKS)
        pairs = list(zip(places, host_ids, strict=True))
        cut = draw.randint(0, NUM_HOST_BLOCKS)
        for part in (*([pair] for pair in pairs[:cut]), pairs[cut:]):
            swap.swap_in([BlockSwap(*pair) for pair in part])
    run_in_any_order(lanes, draw)
    for pool, old in zip(cache.block_pools, before, strict=True):
        assert torch.equal(pool[:, places], old[:, :NUM_HOST_BLOCKS])


def test_a_swap_out_does_not_wait_for_its_copies_while_pieces_are_free():
    outward = LazyLane()
    swap = make_staged(make_cache(), (EagerLane(), outward, LazyLane()))
    swap.swap_out([BlockSwap(block_id=at, host_id=at) for at in range(6)])
    assert len(outward.waiting) == 3


def test_host_memory_grows_by_chunks_as_it_is_used():
    swap = make_staged(make_cache(), (EagerLane(), EagerLane(), EagerLane()))
    assert swap.host_bytes == 0
    swap.swap_out([BlockSwap(block_id=1, host_id=0), BlockSwap(block_id=2, host_id=2)])
    one_chunk = swap.host_bytes
    swap.swap_out([BlockSwap(block_id=1, host_id=6)])
    assert swap.host_bytes == 2 * one_chunk > 0


def test_neighbours_in_host_memory_are_one_copy_whatever_the_order():
    swap = make_staged(make_cache(), (EagerLane(), EagerLane(), EagerLane()), piece_len=6)
    ordered = [BlockSwap(block_id=9 - at, host_id=at) for at in (0, 1, 2, 4, 5)]
    runs = [(first, len(lines)) for first, lines in swap._runs(ordered)]
    assert runs == [(0, 3), (3, 2)]


@pytest.mark.parametrize("num_host_blocks", [0, 10**12])
def test_no_host_memory_is_taken_before_the_first_swap(num_host_blocks):
    swap = make_host_swap(make_cache(), num_host_blocks, choose_backend("cpu"))
    swap.swap_out([])
    swap.swap_in([])


def test_with_the_memory_both_ways_are_gone_once_and_nothing_has_changed():
    lanes = EagerLane(), LazyLane(), LazyLane()
    runs = []
    for lane in lanes:
        lane.run = lambda work, after, lane=lane, run=lane.run: (
            runs.append(lane) or run(work, after)
        )
    cache = make_cache()
    before = [pool.clone() for pool in cache.block_pools]
    assert make_staged(cache, lanes).take_memory() == NUM_HOST_BLOCKS
    steps, outward, inward = lanes
    assert runs == [steps, outward, inward, steps]
    run_in_any_order(lanes, random.Random(0))
    assert all(map(torch.equal, cache.block_pools, before))


def test_no_swap_space_is_allowed():
    lanes = (EagerLane(), EagerLane(), EagerLane())
    swap = StagedHostSwap(make_cache(), 0, choose_backend("cpu"), *lanes)
    assert swap.take_memory() == 0
    swap.swap_out([])
    swap.swap_in([])
    assert swap.host_bytes == 0
