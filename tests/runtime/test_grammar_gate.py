"""The gate: requests wait for their own grammar only, and a bad or endless one harms no other."""

import threading
import time

import pytest

from zipage_lang.runtime.grammar_gate import MAX_THREADS, GrammarGate
from zipage_lang.runtime.messages import Abort, AddRequest, Fork, TokenOutput
from zipage_lang.runtime.sampling_params import SamplingParams


class Preparer:
    """Prepares a regex once it is told to; "bad..." fails, "boom..." fails unexpectedly."""

    def __init__(self):
        self.may_end = {}
        self.prepared = set()
        self.started = []
        self.users = []

    def is_prepared(self, sampling):
        return sampling.regex in self.prepared

    def prepare(self, sampling):
        self.started.append(sampling.regex)
        self.may_end.setdefault(sampling.regex, threading.Event()).wait(20)
        if sampling.regex.startswith("bad"):
            raise ValueError("bad regex: at position 0")
        if sampling.regex.startswith("boom"):
            raise KeyError("boom")
        self.prepared.add(sampling.regex)

    def hold(self, sampling):
        self.users.append(sampling.regex)

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


def test_a_grammar_without_end_runs_out_of_time_and_at_most_blocks_its_threads(preparer):
    gate = GrammarGate(preparer, 100, timeout_s=0.05)
    for index in range(MAX_THREADS + 1):
        gate.take(request(f"endless-{index}", f"a{index}"))
    errors = [p.refused[0][1] for p in passed_within(gate, MAX_THREADS + 1)]
    assert sum("took over 0.05 s" in error for error in errors) == MAX_THREADS
    assert sum("other grammars take too long" in error for error in errors) == 1
    for index in range(MAX_THREADS):
        preparer.end(f"a{index}")
    preparer.end("b")
    deadline = time.monotonic() + 10
    while True:  # until the threads have ended
        gate.take(request(f"later-{time.monotonic()}", "b"))
        (later,) = passed_within(gate, 1)
        if not later.refused:
            break
        assert time.monotonic() < deadline, later.refused


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
