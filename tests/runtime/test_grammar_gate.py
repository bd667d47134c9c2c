"""The gate: requests wait for their own grammar only, and a bad or endless one harms no other."""

import sys
import threading
import time

import pytest

from zipage_lang.runtime.compile_queue import MAX_THREADS
from zipage_lang.runtime.grammar_gate import MAX_JOBS, GrammarGate
from zipage_lang.runtime.messages import Abort, AddRequest, Fork, TokenOutput
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.think_params import ThinkParams


class Preparer:
    """Prepares a regex once it is told to; "bad..." fails, "boom..." fails unexpectedly."""

    def __init__(self):
        self.may_end = {}
        self.prepared = set()
        self.started = []
        self.users = []
        self.gone = set()

    def is_prepared(self, sampling):
        return sampling.regex in self.prepared

    def prepare(self, sampling):
        self.started.append(sampling.regex)
        self.may_end.setdefault(sampling.regex, threading.Event()).wait(20)
        if sampling.regex is None:
            return
        if sampling.regex.startswith("bad"):
            raise ValueError("bad regex: at position 0")
        if sampling.regex.startswith("boom"):
            raise KeyError("boom")
        self.prepared.add(sampling.regex)

    def hold(self, sampling):
        self.users.append(sampling.regex)
        return sampling.regex not in self.gone

    def let_go(self, sampling):
        self.users.remove(sampling.regex)

    def end(self, regex):
        self.may_end.setdefault(regex, threading.Event()).set()


@pytest.fixture
def preparer():
    made = Preparer()
    yield made
    for event in made.may_end.values():
        event.set()


def request(request_id, regex=None, **fields):
    sampling = SamplingParams(regex=regex, n=fields.pop("n", 1))
    return AddRequest(request_id=request_id, token_ids=[1], sampling=sampling, **fields)


def passed_within(gate, num_messages, limit_s=10.0):
    deadline, passed = time.monotonic() + limit_s, []
    while len(passed) < num_messages and time.monotonic() < deadline:
        gate.wait(0.01)
        passed += gate.pass_on()
    return passed


def wait_for(condition, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_free_request_passes_at_once_while_another_waits(preparer):
    gate = GrammarGate(preparer, 100)
    assert gate.take(request("slow", "a")) is None
    passed = gate.take(request("free"))
    assert passed is not None
    assert passed.message.request_id == "free"
    assert gate.pass_on() == []
    preparer.end("a")
    assert [p.message.request_id for p in passed_within(gate, 1)] == ["slow"]
    assert not gate.has_waiting


def test_requests_of_one_grammar_share_its_compilation(preparer):
    gate = GrammarGate(preparer, 100)
    for request_id in "xyz":
        gate.take(request(request_id, "a"))
    preparer.end("a")
    assert [p.message.request_id for p in passed_within(gate, 3)] == ["x", "y", "z"]
    assert preparer.started == ["a"]
    assert gate.take(request("later", "a")) is not None


@pytest.mark.parametrize(("regex", "told"), [("bad", "at position 0"), ("boom", "KeyError")])
def test_an_error_reaches_only_its_request(preparer, regex, told):
    gate = GrammarGate(preparer, 100)
    gate.take(request("broken", regex))
    gate.take(request("fine", "a"))
    preparer.end(regex)
    preparer.end("a")
    refused = {p.message.request_id: p.refused for p in passed_within(gate, 2)}
    assert refused["fine"] == []
    assert told in refused["broken"][0][1]


def test_a_tenant_with_many_grammars_is_not_ahead_of_anothers_one(preparer):
    gate = GrammarGate(preparer, 100)
    for index in range(20):
        gate.take(request(f"a{index}", f"a{index}", tenant="a"))
    gate.take(request("b", "b", tenant="b"))
    for index in range(MAX_THREADS):
        preparer.end(f"a{index}")
    passed_within(gate, MAX_THREADS)
    wait_for(lambda: "b" in preparer.started)
    assert len(preparer.started) <= 2 * MAX_THREADS
    assert "a19" not in preparer.started


def test_thinking_without_a_grammar_does_not_wait_behind_grammars(preparer):
    gate = GrammarGate(preparer, 100)
    for index in range(10):
        gate.take(request(f"a{index}", f"a{index}"))
    sampling = SamplingParams(think=ThinkParams())
    gate.take(AddRequest(request_id="thinks", token_ids=[1], sampling=sampling))
    wait_for(lambda: None in preparer.started)
    preparer.end(None)
    assert [p.message.request_id for p in passed_within(gate, 1)] == ["thinks"]


def test_a_grammar_that_nobody_waits_for_any_more_is_not_begun(preparer):
    gate = GrammarGate(preparer, 100)
    for index in range(MAX_THREADS + 3):
        gate.take(request(f"r{index}", f"a{index}"))
    gate.abort(Abort(request_ids=[f"r{index}" for index in range(MAX_THREADS + 2)]))
    for index in range(MAX_THREADS + 3):
        preparer.end(f"a{index}")
    assert [p.message.request_id for p in passed_within(gate, 1)] == [f"r{MAX_THREADS + 2}"]
    assert set(preparer.started) == {"a0", "a1", f"a{MAX_THREADS + 2}"}
    assert set(gate.table_sizes().values()) == {0, 1}, "the one that runs holds its grammar"


def test_a_fork_goes_on_when_what_it_still_waited_for_was_aborted(preparer):
    gate = GrammarGate(preparer, 100)
    gate.take(Fork(parent_id="p", children=[request("quick", "a"), request("slow", "b")]))
    preparer.end("a")
    wait_for(lambda: preparer.prepared == {"a"})
    assert gate.pass_on() == []
    assert [r.request_id for r in gate.abort(Abort(request_ids=["slow"]))] == ["slow"]
    (passed,) = passed_within(gate, 1)
    assert [child.request_id for child in passed.message.children] == ["quick"]


def test_only_so_many_grammars_of_a_tenant_may_wait_to_be_compiled(preparer):
    gate = GrammarGate(preparer, 10_000)
    results = [gate.take(request(f"r{i}", f"a{i}", tenant="t")) for i in range(MAX_JOBS + 5)]
    refused = [result for result in results if result is not None]
    assert len(refused) == 5 - MAX_THREADS
    assert f"{MAX_JOBS} grammars wait to be compiled" in refused[0].refused[0][1]
    assert gate.take(request("shares", "a0", tenant="t")) is None
    assert gate.take(request("other", "z", tenant="u")) is None


def test_a_tenant_may_be_bounded_while_others_still_come_in(preparer):
    gate = GrammarGate(preparer, 100, max_waiting_per_tenant=2)
    taken = [gate.take(request(f"r{i}", "a", tenant="t")) for i in range(3)]
    assert taken[:2] == [None, None]
    assert "2 requests of this tenant wait for grammars" in taken[2].refused[0][1]
    assert gate.take(request("other", "a", tenant="u")) is None


def test_a_grammar_that_had_to_give_way_is_told_and_harms_no_other(preparer):
    gate = GrammarGate(preparer, 100)
    preparer.prepared |= {"a", "b"}
    preparer.gone.add("a")
    assert "take all the memory" in gate.take(request("r", "a")).refused[0][1]
    assert gate.take(request("s", "b")).refused == []


def test_a_step_costs_the_same_however_many_wait(preparer):
    """Counted in calls of Python functions, so that no other load on the machine matters."""

    def calls_of_a_step(num_waiting):
        gate = GrammarGate(preparer, 10**6)
        for index in range(num_waiting):
            gate.take(request(f"r{index}", "never"))
        calls = []
        sys.setprofile(lambda frame, event, arg: calls.append(event))
        try:
            gate.pass_on()
        finally:
            sys.setprofile(None)
        return len(calls)

    assert calls_of_a_step(3000) <= calls_of_a_step(10) + 2


def test_an_aborted_request_leaves_and_its_neighbour_stays(preparer):
    gate = GrammarGate(preparer, 100)
    gate.take(request("a", "a"))
    gate.take(request("b", "a", group_id="g"))
    gate.take(request("c", "a"))
    fork = Fork(parent_id="p", children=[request("d", "a"), request("e", "a", group_id="g")])
    gate.take(fork)
    aborted = gate.abort(Abort(request_ids=["a"], group_ids=["g"]))
    assert [r.request_id for r in aborted] == ["a", "b", "e"]
    preparer.end("a")
    first, second = passed_within(gate, 2)
    assert first.message.request_id == "c"
    assert [child.request_id for child in second.message.children] == ["d"]


def test_a_fork_waits_for_all_of_its_children_and_names_the_bad_ones(preparer):
    gate = GrammarGate(preparer, 100)
    children = [request("good", "a"), request("wrong", "bad"), request("free")]
    gate.take(Fork(parent_id="p", children=children))
    preparer.end("a")
    time.sleep(0.05)
    assert gate.pass_on() == []
    preparer.end("bad")
    (passed,) = passed_within(gate, 1)
    assert [child.request_id for child, _ in passed.refused] == ["wrong"]


def test_a_grammar_is_held_until_the_last_sample_has_ended(preparer):
    gate = GrammarGate(preparer, 100)
    preparer.prepared.add("a")
    gate.take(request("r", "a", n=2))
    assert preparer.users == ["a"]
    gate.note_outputs([TokenOutput(request_id="r", sample_index=0, finish_reason="stop")])
    gate.note_outputs([TokenOutput(request_id="r", sample_index=1, token_ids=[1])])
    assert preparer.users == ["a"]
    gate.note_outputs([TokenOutput(request_id="r", sample_index=1, finish_reason="length")])
    assert preparer.users == []


def test_only_so_many_may_wait(preparer):
    gate = GrammarGate(preparer, 2)
    assert gate.take(request("a", "a")) is gate.take(request("b", "b")) is None
    refused = gate.take(request("c", "c"))
    assert refused is not None
    assert "2 requests wait for grammars already" in refused.refused[0][1]
    assert gate.take(request("free")) is not None
