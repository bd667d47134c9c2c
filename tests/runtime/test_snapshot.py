"""Pictures of the scheduler: true to what it holds, bounded, and taken without a trace."""

import pytest
from test_support.random_loads import random_load
from test_support.simulation import Simulation, World

from zipage_lang.radix_cache.census import Owner
from zipage_lang.runtime.config import CompressionConfig
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.queue_times import QueueTimes
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.snapshot import MAX_COMPACTIONS

FREE, PREFIX, CACHED, TAIL, COMPACTED, OLD, HELD = Owner


def take(simulation, *, max_cells=4096, max_nodes=96, max_requests=48):
    scheduler = simulation.scheduler
    return scheduler.snapshot(
        scheduler.stats(), max_cells=max_cells, max_nodes=max_nodes, max_requests=max_requests
    )


def request(request_id, token_ids, max_tokens, **fields):
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=fields.pop("n", 1))
    return AddRequest(request_id=request_id, token_ids=token_ids, sampling=sampling, **fields)


def compacting_world(**fields):
    compression = CompressionConfig(kv_mode="fixed", kv_budget=8, evict_interval=4, policy="random")
    return World(num_blocks=64, max_model_len=256, compression=compression, **fields)


def check_sums(snapshot):
    counts, stats = snapshot.grid.num_by_owner, snapshot.stats
    assert sum(counts) == stats["num_blocks"]
    assert counts[FREE] == stats["num_free"]
    assert counts[CACHED] + counts[OLD] == stats["num_tree_only"]
    held = counts[PREFIX] + counts[TAIL] + counts[COMPACTED] + counts[HELD]
    assert held == stats["num_held"]
    assert [snapshot.grid.cells.count(owner) for owner in Owner] == counts


def check_tree(snapshot):
    seen = {0}
    for node in snapshot.nodes:
        assert node.parent in seen, f"node {node.serial} comes before its parent"
        seen.add(node.serial)
        assert node.num_left_out == 0
    assert len(snapshot.nodes) == snapshot.num_nodes


@pytest.mark.parametrize("seed", range(40))
def test_pictures_of_random_loads_add_up_and_leave_no_trace(seed):
    load = random_load(seed)
    watched, alone = Simulation(load.world), Simulation(load.world)
    step = watched.step

    def step_and_look():
        plan = step()
        snapshot = take(watched)
        check_sums(snapshot)
        check_tree(snapshot)
        assert len(snapshot.requests) == min(snapshot.num_requests, 48)
        return plan

    watched.step = step_and_look
    watched.play(load.events, max_steps=5000)
    alone.play(load.events, max_steps=5000)
    assert watched.plans == alone.plans
    assert watched.scheduler.stats() == alone.scheduler.stats()


def test_a_request_is_shown_with_its_lengths_and_every_compaction():
    simulation = Simulation(compacting_world())
    simulation.add(request("the-request-id", [1, 2, 3, 4, 5], 60))
    while simulation.scheduler.stats()["num_compactions"] < 3:
        simulation.step()
    snapshot = take(simulation)
    (view,) = snapshot.requests
    assert (view.status, view.mode, view.policy) == ("running", "fixed", "random")
    assert (view.protected_len, view.budget, view.interval) == (5, 8, 4)
    assert (view.compactions, view.dropped) == (3, 12)
    assert view.logical_len - view.resident_len == 12
    assert (snapshot.logical_len, snapshot.resident_len) == (view.logical_len, view.resident_len)
    assert [c.number for c in snapshot.compactions] == [1, 2, 3]
    for before, after in zip(snapshot.compactions, snapshot.compactions[1:], strict=False):
        assert after.logical_len - before.logical_len == 4
    for each in snapshot.compactions:
        assert (each.arrival, each.sample_index) == (view.arrival, view.sample_index)
        assert (each.resident_before, each.resident_after) == (17, 13)
    assert view.last_compaction_at == snapshot.compactions[-1].logical_len


def test_waiting_followers_and_held_states_are_told_apart():
    simulation = Simulation(compacting_world())
    simulation.add(request("held", [1, 2, 3], 2, hold=True))
    simulation.run_until_idle(50)
    simulation.add(request("many", [9, 8, 7], 5, n=2))
    statuses = [view.status for view in take(simulation).requests]
    assert sorted(statuses) == ["following", "held", "waiting"]
    assert take(simulation).grid.num_by_owner[HELD] > 0


def test_what_does_not_fit_is_counted_and_left_out():
    simulation = Simulation(compacting_world())
    for index in range(12):
        simulation.add(request(f"r{index}", [index + 1, 2, 3, 4, index + 1], 30))
    for _ in range(6):
        simulation.step()
    snapshot = take(simulation, max_cells=10, max_nodes=4, max_requests=3)
    assert (len(snapshot.requests), snapshot.num_requests) == (3, 12)
    assert len(snapshot.nodes) == 4
    shown = sum(node.parent != 0 for node in snapshot.nodes)
    assert sum(node.num_left_out for node in snapshot.nodes) == snapshot.num_nodes - 1 - shown
    assert snapshot.grid.stride == 7
    assert len(snapshot.grid.cells) == 10
    everything = take(simulation)
    assert snapshot.grid.cells == everything.grid.cells[::7]
    assert snapshot.grid.num_by_owner == everything.grid.num_by_owner


def test_counts_alone_can_be_asked_for():
    simulation = Simulation(compacting_world())
    simulation.add(request("a", [1, 2, 3, 4, 5], 40))
    for _ in range(25):
        simulation.step()
    snapshot = take(simulation, max_cells=0, max_nodes=0, max_requests=0)
    assert (snapshot.grid.cells, snapshot.nodes, snapshot.requests) == (b"", [], [])
    assert snapshot.compactions == []
    assert snapshot.resident_len > 0
    assert snapshot.num_requests == 1


def test_the_most_used_nodes_are_shown_first():
    simulation = Simulation(compacting_world())
    for index in range(4):
        simulation.add(request(f"often{index}", [1, 2, 3, 4, 10 + index], 2))
        simulation.add(request(f"once{index}", [20 + index, 2, 3, 4, 5], 2))
        simulation.run_until_idle(100)
    _root, first = take(simulation, max_nodes=2).nodes
    assert first.num_hits == 3


def test_old_compactions_are_forgotten():
    simulation = Simulation(compacting_world())
    for index in range(12):
        simulation.add(request(f"r{index}", [index + 1, 2, 3], 240))
    while simulation.scheduler.stats()["num_compactions"] <= MAX_COMPACTIONS:
        simulation.step()
    numbers = [each.number for each in take(simulation).compactions]
    last = simulation.scheduler.stats()["num_compactions"]
    assert numbers == list(range(last - MAX_COMPACTIONS + 1, last + 1))


def test_queue_times_count_each_request_once_when_it_first_runs():
    simulation = Simulation(compacting_world())
    simulation.add(request("a", [1, 2, 3], 4, n=2))
    assert simulation.scheduler.queue_times()["queue_s_count"] == 0
    simulation.run_until_idle(50)
    times = simulation.scheduler.queue_times()
    assert times["queue_s_count"] == 2
    assert times["queue_s_sum"] > 0


def test_queue_times_are_cumulative_with_bounds_included():
    times = QueueTimes()
    for waited_s in (0.001, 0.002, 0.3, 1000.0):
        times.note(waited_s)
    stats = times.stats()
    assert stats["queue_s_le_0.001"] == 1
    assert stats["queue_s_le_0.005"] == 2
    assert stats["queue_s_le_0.5"] == 3
    assert stats["queue_s_le_300"] == 3
    assert stats["queue_s_count"] == 4
    assert stats["queue_s_sum"] == pytest.approx(1000.303)
