"""What the scheduler decides, case by case: exact plans where they document its policy.

Each case runs on the FakeRunner, so that every plan is also carried out and checked.
"""

import itertools
import zlib

import pytest
from test_support.simulation import Simulation, World

from zipage_lang.runtime.config import SchedulerConfig
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import Abort, AddRequest, Stop
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.step_plan import BlockUpdate, Chunk, decode_plan, encode_plan

FIXED = KVParams(mode="fixed", budget=4, interval=4, policy="zipage")


def request(name, tokens, max_tokens=4, n=1, **fields):
    sampling = SamplingParams(
        max_tokens=max_tokens, seed=zlib.crc32(name.encode()), ignore_eos=True, n=n
    )
    return AddRequest(request_id=name, token_ids=list(tokens), sampling=sampling, **fields)


def start(*requests, **world):
    scheduler = world.pop("scheduler", {})
    simulation = Simulation(World(scheduler=SchedulerConfig(**scheduler), **world))
    for each in requests:
        simulation.add(each)
    assert not simulation.refused
    return simulation


def finish(simulation, max_steps=400):
    simulation.run_until_idle(max_steps)
    simulation.check_all_ended()
    simulation.check_outputs()
    return simulation.scheduler.stats()


def row_owners(simulation):
    """Sampling seed -> the request it belongs to."""
    return {
        transcript.request.sampling.seed: name
        for (name, _), transcript in simulation.transcripts.items()
    }


def admissions(simulation):
    """Names in the order in which they took a row."""
    owners = row_owners(simulation)
    return [owners[s.sampling.seed] for plan in simulation.plans for s in plan.row_setups]


# The order of work in a step


def test_first_step_prefills_the_prompt_and_draws():
    simulation = start(request("a", [1, 2, 3]))
    plan = simulation.step()
    (setup,) = plan.row_setups
    assert (setup.row, setup.token_ids, setup.num_prompt_tokens) == (0, (1, 2, 3), 3)
    assert plan.block_updates[-1] == BlockUpdate(0, 0, (1, 2))
    assert plan.chunks == (Chunk(0, 3, (1, 2, 3), 0, 0, (0,), None, None),)
    assert decode_plan(encode_plan(plan)) == plan


def test_decodes_go_before_prefill_chunks():
    simulation = start(request("a", [1, 2, 3]), scheduler={"max_step_tokens": 6})
    simulation.step()
    simulation.add(request("b", range(10, 20)))
    plan = simulation.step()
    assert plan.chunks == (
        Chunk(0, 1, None, 3, 3, (0,), None, None),
        Chunk(1, 5, (10, 11, 12, 13, 14), 0, 0, (), None, None),
    )
    plan = simulation.step()
    assert plan.chunks == (
        Chunk(0, 1, None, 4, 4, (0,), None, None),
        Chunk(1, 5, (15, 16, 17, 18, 19), 5, 5, (1,), None, None),
    )
    finish(simulation)


def test_chunk_limit_cuts_a_prefill():
    simulation = start(request("a", [1, 2, 3, 4, 5]), scheduler={"max_chunk_len": 2})
    chunks = [simulation.step().chunks[0] for _ in range(3)]
    assert [(c.position, c.num_tokens, c.sample_rows) for c in chunks] == [
        (0, 2, ()),
        (2, 2, ()),
        (4, 1, (0,)),
    ]


def test_more_runners_than_step_tokens_take_turns():
    names = ["a", "b", "c", "d"]
    simulation = start(
        *(request(name, [index], 6) for index, name in enumerate(names)),
        scheduler={"max_step_tokens": 2},
    )
    finish(simulation, max_steps=60)
    assert {len(simulation.output(name)) for name in names} == {6}


# Sharing


def test_identical_prompts_wait_a_step_and_then_share():
    prompt = [1, 2, 3, 4, 5]
    simulation = start(request("a", prompt), request("b", prompt))
    first, second = simulation.step(), simulation.step()
    assert [chunk.row for chunk in first.chunks] == [0]
    assert second.chunks == (
        Chunk(0, 1, None, 5, 5, (0,), None, None),
        Chunk(1, 1, None, 4, 4, (1,), None, None),
    )
    table = next(u for u in second.block_updates if u.row == 1)
    assert table.block_ids[:2] == first.block_updates[-1].block_ids[:2]
    finish(simulation)
    assert simulation.final("b").usage.cached_tokens == 4
    assert simulation.final("a").usage.cached_tokens == 0


def test_sixteen_samples_compute_the_prefill_once_and_hold_the_prefix_once():
    prompt = list(range(9))
    simulation = start(request("a", prompt, max_tokens=3, n=16), num_blocks=64)
    first = simulation.step()
    (chunk,) = first.chunks
    assert (chunk.num_tokens, len(chunk.sample_rows)) == (9, 16)
    simulation.step()
    # 4 full prompt blocks once, and for each sample one block with the tokens behind them
    assert simulation.scheduler.stats()["num_held"] == 4 + 16
    finish(simulation)
    assert simulation.runner.num_computed_tokens == 9 + 16 * 2
    simulation.check_all_home()


def test_more_samples_than_rows_compute_the_prompt_blocks_once():
    prompt = list(range(8))
    simulation = start(
        request("a", prompt, max_tokens=3, n=16), num_blocks=64, scheduler={"max_running": 4}
    )
    finish(simulation)
    # a sample that finds no row at the prefill computes the prompt's last token again, no more
    assert simulation.runner.num_computed_tokens <= 8 + 16 * 2 + 12 * 2
    simulation.check_all_home()


def test_other_namespace_shares_nothing():
    prompt = [1, 2, 3, 4, 5]
    simulation = start(request("a", prompt))
    finish(simulation)
    simulation.add(request("b", prompt, namespace="other"))
    simulation.add(request("c", prompt))
    finish(simulation)
    assert simulation.final("b").usage.cached_tokens == 0
    assert simulation.final("c").usage.cached_tokens == 4


def test_prefix_caching_off_finds_nothing_after_the_end():
    prompt = [1, 2, 3, 4, 5]
    simulation = start(request("a", prompt), prefix_caching=False)
    finish(simulation)
    assert simulation.scheduler.stats()["num_free"] == simulation.world.num_blocks
    simulation.add(request("b", prompt))
    finish(simulation)
    assert simulation.final("b").usage.cached_tokens == 0


# Forks of compacted states


def thought(hold=True):
    """A held request that has been compacted."""
    simulation = start(
        request("thought", [1, 2, 3], 30, kv=FIXED, hold=hold), num_blocks=64, num_query_slots=16
    )
    finish(simulation)
    assert simulation.final("thought").kv.compactions > 0
    return simulation


def branches(simulation, count, **kv):
    tokens = [1, 2, 3, *simulation.output("thought")]
    settings = {"mode": "fixed", "budget": 4, "interval": 4, "policy": "zipage", **kv}
    asked = KVParams(**{"protected_len": 3, **settings})
    return [request(f"branch{index}", tokens, 2, kv=asked) for index in range(count)]


def test_eight_branches_continue_from_one_compacted_copy():
    simulation = thought()
    held = simulation.scheduler.stats()["num_held"]
    before = simulation.runner.num_computed_tokens
    simulation.fork("thought", branches(simulation, 8))
    plan = simulation.step()
    assert len(plan.chunks) == 8
    assert {chunk.num_tokens for chunk in plan.chunks} == {1}
    # one shared copy; each branch has at most its own last block
    assert simulation.scheduler.stats()["num_held"] <= held + 8
    finish(simulation)
    assert simulation.runner.num_computed_tokens - before == 8 * 2
    simulation.check_all_home()


def test_next_turn_continues_from_a_compacted_node_of_the_tree():
    simulation = thought(hold=False)
    before = simulation.runner.num_computed_tokens
    (turn,) = branches(simulation, 1)
    simulation.add(turn)
    finish(simulation)
    assert simulation.runner.num_computed_tokens - before == 2


@pytest.mark.parametrize(
    "other",
    [{"policy": "random"}, {"budget": 5}, {"interval": 3}, {"protected_len": 2}],
    ids=lambda other: next(iter(other)),
)
def test_other_signature_does_not_match_a_compacted_node(other):
    simulation = thought(hold=False)
    (turn,) = branches(simulation, 1, **other)
    simulation.add(turn)
    finish(simulation)
    # slots before the first compacted one are plain prefix, good for anyone
    assert simulation.final("branch0").usage.cached_tokens <= 3


def test_reuse_exact_does_not_match_a_compacted_node():
    simulation = thought(hold=False)
    (turn,) = branches(simulation, 1, reuse="exact")
    simulation.add(turn)
    finish(simulation)
    assert simulation.final("branch0").usage.cached_tokens <= 3


# What gives way when blocks are short


def counts(simulation, *names):
    stats = simulation.scheduler.stats()
    return tuple(stats[name] for name in names)


PRESSURE = ("num_early_compactions", "num_preemptions", "num_swap_outs")


def test_the_tree_gives_way_first():
    simulation = start(request("old", range(8), 2), num_blocks=8)
    finish(simulation)
    simulation.add(request("new", range(20, 30), 4))
    finish(simulation)
    assert counts(simulation, *PRESSURE) == (0, 0, 0)
    assert simulation.scheduler.stats()["num_evicted_nodes"] > 0


def test_early_compaction_comes_before_preemption():
    adaptive = KVParams(mode="adaptive", budget=4, interval=2, policy="zipage")
    simulation = start(
        request("a", [1, 2], 18, kv=adaptive),
        request("b", [3, 4], 18, kv=adaptive),
        num_blocks=14,
    )
    finish(simulation)
    early, preempted, swapped = counts(simulation, *PRESSURE)
    assert early > 0
    assert (preempted, swapped) == (0, 0)


def test_newest_is_preempted_without_host_memory_and_comes_back_for_free():
    simulation = start(
        request("oldest", [1, 2], 14),
        request("newest", [3, 4], 10),
        num_blocks=9,
        num_host_blocks=0,
    )
    finish(simulation)
    early, preempted, swapped = counts(simulation, *PRESSURE)
    assert (early, swapped) == (0, 0)
    assert preempted > 0
    assert admissions(simulation).count("oldest") == 1
    assert admissions(simulation).count("newest") == 1 + preempted
    # whole blocks that nobody took meanwhile are found again
    assert simulation.final("newest").kv.recomputed < preempted * 12


def test_newest_compacted_is_swapped_when_nobody_else_can_give_way():
    simulation = start(
        request("oldest", [1], 30),
        request("newest", [2], 30, kv=FIXED),
        num_blocks=16,
        num_host_blocks=8,
    )
    finish(simulation)
    _, preempted, swapped = counts(simulation, *PRESSURE)
    assert (preempted, swapped) == (0, 1)
    assert counts(simulation, "num_swap_ins") == (1,)
    assert admissions(simulation) == ["oldest", "newest", "newest"]
    assert simulation.final("newest").kv.recomputed == 0
    simulation.check_all_home()


def test_newest_is_swapped_rather_than_computed_again():
    simulation = start(request("oldest", [1, 2], 14), request("newest", [3, 4], 10), num_blocks=9)
    stats = finish(simulation)
    assert (stats["num_preemptions"], stats["num_swap_outs"]) == (0, 1)
    assert stats["num_recomputed_tokens"] == 0
    assert admissions(simulation) == ["oldest", "newest", "newest"]


def test_those_who_do_not_fit_together_take_turns():
    simulation = start(
        *(request(name, [index], 40) for index, name in enumerate("abc")),
        num_blocks=44,
        num_host_blocks=64,
        scheduler={"turn_len": 8},
    )
    widest = 0
    while simulation.scheduler.has_work:
        simulation.step()
        lens = [len(simulation.output(name)) for name in "abc"]
        widest = max(widest, max(lens) - min(lens))
    stats = finish(simulation)
    assert stats["num_turns_taken"] > 0
    assert stats["num_recomputed_tokens"] == 0
    assert widest <= 2 * 8, "one may be a turn ahead, and one more while it is being displaced"


def test_displaced_request_comes_before_a_newcomer_with_a_shorter_cached_prefix():
    simulation = start(
        request("oldest", [1], 30),
        request("displaced", [2, 3, 4, 5], 30),
        num_blocks=20,
        num_host_blocks=64,
        scheduler={"order": "lpm", "turn_len": 1000},
    )
    while simulation.scheduler.stats()["num_swap_outs"] == 0:
        simulation.step()
    simulation.add(request("newcomer", [1, 9, 9, 9], 4))
    waiting = simulation.scheduler._admission.candidates()
    assert [each.request_id for each in waiting] == ["displaced", "newcomer"]
    finish(simulation)


def test_without_pressure_nobody_gives_way_at_the_end_of_a_turn():
    simulation = start(
        *(request(name, [index], 12) for index, name in enumerate("abc")),
        num_blocks=60,
        scheduler={"turn_len": 2},
    )
    stats = finish(simulation)
    assert (stats["num_swap_outs"], stats["num_preemptions"]) == (0, 0)


def test_decodes_that_share_a_prefix_stand_side_by_side():
    prompts = {"a": [1, 2, 3, 4, 5], "b": [6, 7, 8, 9, 10], "c": [11, 12, 13, 14, 15]}
    names = [f"{prompt}{sample}" for sample in range(3) for prompt in prompts]
    simulation = start(
        *(request(name, prompts[name[0]], 6) for name in names),
        num_blocks=90,
        scheduler={"max_running": 9},
    )
    for _ in range(4):
        plan = simulation.step()
    owners = {request.row: request.request_id for request in simulation.scheduler._state.running}
    order = [owners[chunk.row][0] for chunk in plan.chunks]
    assert len(order) == 9
    assert len([prompt for prompt, _ in itertools.groupby(order)]) == 3, order


def test_newcomer_starts_even_with_those_who_run():
    simulation = start(request("old", [1], 40), scheduler={"turn_len": 4})
    for _ in range(20):
        simulation.step()
    simulation.add(request("new", [2], 20))
    simulation.step()
    old, new = simulation.scheduler._state.running
    assert (old.request_id, new.request_id) == ("old", "new")
    assert old.turn == new.turn > 0


def test_compacted_request_starts_over_when_there_is_no_host_memory_for_it():
    simulation = start(
        request("oldest", [1], 30),
        request("newest", [2], 30, kv=FIXED),
        num_blocks=16,
        num_host_blocks=0,
    )
    finish(simulation)
    _, preempted, swapped = counts(simulation, *PRESSURE)
    assert (preempted > 0, swapped) == (True, 0)
    simulation.check_all_home()


# Who goes first


def test_fcfs_serves_in_order_of_arrival():
    names = ["a", "b", "c"]
    simulation = start(
        *(request(name, [index]) for index, name in enumerate(names)), scheduler={"max_running": 1}
    )
    finish(simulation)
    assert admissions(simulation) == names


def test_lower_priority_number_goes_first():
    simulation = start(
        request("late", [1], priority=1),
        request("normal", [2]),
        request("urgent", [3], priority=-1),
        scheduler={"max_running": 1},
    )
    finish(simulation)
    assert admissions(simulation) == ["urgent", "normal", "late"]


@pytest.mark.parametrize("max_skips", [1, 2, 64])
def test_lpm_prefers_cached_prefixes_until_someone_was_skipped_too_often(max_skips):
    simulation = start(
        request("warm", range(8)),
        scheduler={"max_running": 1, "order": "lpm", "max_skips": max_skips},
    )
    finish(simulation)
    simulation.add(request("cold", [40, 41, 42, 43]))
    for index in range(4):
        simulation.add(request(f"hit{index}", [*range(8), 30 + index]))
    finish(simulation)
    order = admissions(simulation)[1:]
    assert order.index("cold") == min(max_skips, 4)


# Query slots


def test_request_without_a_query_slot_waits_at_its_line_and_not_earlier():
    kv = KVParams(mode="fixed", budget=8, interval=8, policy="zipage")
    simulation = start(
        request("first", [1], 40, kv=kv),
        request("second", [2], 40, kv=kv),
        num_query_slots=1,
        num_blocks=64,
    )
    line = 1 + 8 + 8 - 4
    longest_without_slot = 0
    while simulation.scheduler.has_work:
        for chunk in simulation.step().chunks:
            if chunk.query_slot is None:
                end = chunk.resident_start + chunk.num_tokens
                longest_without_slot = max(longest_without_slot, end)
        assert simulation.num_steps < 300
    assert longest_without_slot == line
    simulation.check_all_ended()
    assert all(simulation.final(name).kv.compactions > 2 for name in ("first", "second"))


def test_requests_too_short_to_become_due_need_no_query_slot():
    names = [f"r{index}" for index in range(4)]
    simulation = start(
        *(request(name, [index], 5, kv=FIXED) for index, name in enumerate(names)),
        num_query_slots=1,
        num_blocks=64,
    )
    finish(simulation, max_steps=7)


def test_compaction_keeps_the_budget_and_frees_whole_blocks():
    simulation = start(request("a", [1, 2], 12, kv=FIXED))
    while not (acts := simulation.step().compactions):
        assert simulation.num_steps < 20
    (act,) = acts
    assert (act.protected_len, act.tail_len, act.num_keep, act.stateful_len) == (2, 8, 4, 0)
    assert act.logical_len == 10
    assert act.block_ids == act.block_ids_before[:3]
    assert act.block_copies == ()
    finish(simulation)


# Ends


def test_abort_frees_the_blocks_within_a_step_and_tells_the_end_once():
    simulation = start(request("a", range(6), 20), request("b", range(10, 16), 20))
    simulation.step()
    simulation.abort("a", "unknown")
    simulation.receive()
    assert simulation.final("a").finish_reason == "abort"
    simulation.abort("a")
    simulation.scheduler.flush_cache()
    assert simulation.scheduler.stats()["num_held"] == 3
    finish(simulation)
    simulation.check_all_home()


def test_group_is_aborted_together():
    simulation = start(
        request("a", [1], 20, group_id="g"),
        request("b", [2], 20, group_id="g", n=2),
        request("c", [3], 3),
    )
    simulation.step()
    simulation.scheduler.abort(Abort(group_ids=["g"]))
    finish(simulation)
    reasons = {
        key: transcript.final.finish_reason for key, transcript in simulation.transcripts.items()
    }
    assert reasons == {("a", 0): "abort", ("b", 0): "abort", ("b", 1): "abort", ("c", 0): "length"}


def test_stop_cuts_the_tokens_behind_the_stop_string():
    simulation = start(request("a", [1, 2], 20, hold=True))
    for _ in range(6):
        simulation.step()
    simulation.stop("a", 0, 3)
    finish(simulation)
    final = simulation.final("a")
    assert final.finish_reason == "stop"
    assert final.usage.completion_tokens == 3
    # a fork goes on from the cut: only its own tokens are computed
    before = simulation.runner.num_computed_tokens
    simulation.fork("a", [request("child", [1, 2, *simulation.output("a"), 9, 9], 2)])
    finish(simulation)
    assert simulation.runner.num_computed_tokens - before <= 2 + 1 + 1
    simulation.check_all_home()


@pytest.mark.parametrize("sample", [0, 1, 2])
def test_a_stop_of_a_sample_that_has_said_nothing_is_not_heard(sample):
    """A sample that waits for the others' prompt would else end, and be drawn for all the same."""
    simulation = start(request("a", range(8), 3, n=3), scheduler={"max_step_tokens": 4})
    simulation.step()
    simulation.scheduler.stop(Stop(request_id="a", sample_index=sample, num_output_tokens=0))
    finish(simulation)
    finals = {key: each.final for key, each in simulation.transcripts.items()}
    assert {final.finish_reason for final in finals.values()} == {"length"}
    simulation.check_all_home()


def test_end_of_sequence_and_stop_tokens_end_a_sample():
    sampling = SamplingParams(max_tokens=200, seed=3)
    simulation = start(vocab_size=4, eos_token_ids=(0,), max_model_len=300, num_blocks=200)
    simulation.add(AddRequest(request_id="a", token_ids=[1], sampling=sampling))
    stopping = sampling.replace(stop_token_ids=[2], ignore_eos=True, seed=4)
    simulation.add(AddRequest(request_id="b", token_ids=[3], sampling=stopping))
    finish(simulation)
    assert (simulation.final("a").finish_reason, simulation.final("a").stop_token_id) == ("stop", 0)
    assert (simulation.final("b").finish_reason, simulation.final("b").stop_token_id) == ("stop", 2)


def test_context_length_ends_a_sample():
    simulation = start(request("a", [1, 2], 20), max_model_len=10)
    finish(simulation)
    assert simulation.final("a").finish_reason == "length"
    assert len(simulation.output("a")) == 8


def test_request_id_in_use_and_full_queue_are_refused():
    simulation = start(request("a", [1]), scheduler={"max_waiting": 1})
    simulation.add(request("b", [2]))
    assert "max_waiting" in simulation.refused["b"]
    simulation.step()
    simulation.add(request("a", [1]))
    assert "'a'" in simulation.refused["a"]
    finish(simulation)


def test_held_state_goes_when_memory_is_short():
    simulation = start(request("held", range(8), 2, hold=True), num_blocks=8)
    finish(simulation)
    assert simulation.scheduler.stats()["num_held"] == 5
    simulation.add(request("big", range(20, 32), 4))
    finish(simulation)
    simulation.release("held")
    simulation.check_all_home()


def test_a_child_that_may_not_have_a_held_state_whole_finds_its_blocks_in_the_tree():
    simulation = start(request("held", range(4), 9, hold=True), num_query_slots=16)
    finish(simulation)
    tokens = [*range(4), *simulation.output("held")]
    bounded = KVParams(mode="fixed", budget=4, interval=4, policy="zipage", protected_len=4)
    simulation.fork("held", [request("child", tokens, 2, kv=bounded)])
    finish(simulation)
    # 4 + 4 + 4 slots less the window: that much it may take, and all of it is there
    assert simulation.final("child").usage.cached_tokens == 8
    simulation.release("held")
    simulation.check_all_home()


def test_aborting_a_group_releases_its_held_states_and_spares_who_has_no_group():
    simulation = start(
        request("kept", [1, 2, 3], group_id="g", hold=True),
        request("other", [4, 5, 6], max_tokens=30),
    )
    while simulation.transcripts["kept", 0].final is None:
        simulation.step()
    assert simulation.scheduler.stats()["num_held_requests"] == 1
    simulation.scheduler.abort(Abort(group_ids=["g", ""]))
    assert simulation.scheduler.stats()["num_held_requests"] == 0
    assert simulation.scheduler.stats()["num_running"] == 1
    finish(simulation)
    assert len(simulation.output("other")) == 30
