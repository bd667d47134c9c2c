"""run_batch and run_batch_iter: what one program does costs the others nothing."""

import asyncio
import gc
import threading
import weakref
from concurrent.futures import Future

import pytest

import zipage_lang as zipage
from zipage_lang.frontend.errors import EngineDiedError
from zipage_lang.testing import Reply, ScriptedBackend

NUM_PROGRAMS = 500


@zipage.function
def ask(s, q):
    s += q + zipage.gen("a")
    if s["a"] == "raise":
        raise ZeroDivisionError(q)
    return s["a"]


@zipage.function
async def ask_async(s, q):
    s += q + zipage.gen("a")
    if await s["a"] == "raise":
        raise ZeroDivisionError(q)
    return await s["a"]


def script(call):
    """Item 17 raises, item 123 never ends."""
    if call.prompt == "q17":
        return "raise"
    return Reply("late", gate=Future()) if call.prompt == "q123" else "fine"


class ClockLoop(asyncio.SelectorEventLoop):
    """A loop whose clock can be put forward."""

    ahead_s = 0.0

    def time(self):
        return super().time() + self.ahead_s

    def jump(self, seconds):
        self.ahead_s += seconds


class ClockBackend(ScriptedBackend):
    """A scripted backend whose loop's clock can be put forward."""

    loop = None  # set by the fixture


@pytest.fixture
def clock_backend():
    backend = ClockBackend(script)
    backend.loop = ClockLoop()
    thread = threading.Thread(target=backend.loop.run_forever)
    thread.start()
    yield backend
    backend.loop.call_soon_threadsafe(backend.loop.stop)
    thread.join()
    backend.loop.close()


@pytest.mark.parametrize("program", [ask, ask_async])
def test_500_programs_with_one_raising_and_one_timing_out_give_498_results(program, clock_backend):
    items = [{"q": f"q{i}"} for i in range(NUM_PROGRAMS)]
    results = {}
    for index, result in program.run_batch_iter(items, backend=clock_backend, timeout=600):
        results[index] = result
        if len(results) == NUM_PROGRAMS - 1:  # the one that is left has its ten minutes now
            clock_backend.loop.call_soon_threadsafe(clock_backend.loop.jump, 601)
    failed = {i: r for i, r in results.items() if isinstance(r, BaseException)}
    assert {i: type(error) for i, error in failed.items()} == {
        17: ZeroDivisionError,
        123: zipage.ProgramTimeoutError,
    }
    assert str(failed[17]) == "q17"
    assert "timeout=600 s" in str(failed[123])
    assert sorted(results) == list(range(NUM_PROGRAMS))
    for index, result in results.items():
        assert index in failed or result.text() == f"q{index}fine"
    assert clock_backend.num_running == 0


def test_results_stand_in_the_order_of_the_items():
    gates = {f"q{i}": Future() for i in range(4)}
    seen = []

    def reply(call):
        seen.append(call.prompt)
        if len(seen) == len(gates):  # all run: let them end, the last one first
            for prompt in reversed(gates):
                gates[prompt].set_result(None)
        return Reply("raise" if call.prompt == "q1" else call.prompt, gate=gates[call.prompt])

    results = ask.run_batch(
        [(prompt,) for prompt in gates], backend=ScriptedBackend(reply), return_exceptions=True
    )
    assert isinstance(results[1], ZeroDivisionError)
    assert [results[i]["a"] for i in (0, 2, 3)] == ["q0", "q2", "q3"]


@pytest.mark.parametrize("program", [ask, ask_async])
def test_a_timeout_counts_real_seconds(program):
    (result,) = program.run_batch(
        [("q123",)], backend=ScriptedBackend(script), timeout=0.05, return_exceptions=True
    )
    assert isinstance(result, zipage.ProgramTimeoutError)


def test_a_timeout_keeps_no_program_that_has_ended():
    backend = ScriptedBackend("fine")
    states = [
        weakref.ref(state)
        for _, state in ask.run_batch_iter([("q1",)] * 3, backend=backend, timeout=3600)
    ]
    ask.run("q1", backend=backend)  # the loop has had time to let go
    gc.collect()
    assert [state() for state in states] == [None] * 3


def test_without_return_exceptions_the_error_holds_all_results():
    items = [{"q": f"q{i}"} for i in (16, 17, 18)]
    with pytest.raises(zipage.BatchError) as raised:
        ask.run_batch(items, backend=ScriptedBackend(script))
    assert [isinstance(r, ZeroDivisionError) for r in raised.value.results] == [False, True, False]


def test_iterating_gives_results_as_they_come():
    gates = {"q0": Future(), "q1": Future()}
    gates["q1"].set_result(None)
    backend = ScriptedBackend(lambda call: Reply("x", gate=gates[call.prompt]))
    seen = []
    for index, state in ask.run_batch_iter([("q0",), ("q1",)], backend=backend):
        seen.append((index, state["a"]))
        if not gates["q0"].done():
            gates["q0"].set_result(None)
    assert seen == [(1, "x"), (0, "x")]


def test_leaving_the_iterator_cancels_the_rest():
    def reply(call):
        return "x" if call.prompt == "q0" else Reply("x", gate=Future())

    backend = ScriptedBackend(reply)
    batch = ask.run_batch_iter([("q0",), ("q1",), ("q2",)], backend=backend)
    assert next(batch)[0] == 0
    batch.close()
    ended = zipage.function(lambda s: s.append("q0" + zipage.gen("a"))).run(backend=backend)
    assert ended["a"] == "x"  # the loop has had time to close the others
    assert backend.num_running == 0


def test_more_errors_than_allowed_end_the_batch():
    def reply(call):
        return "raise" if call.prompt in ("q0", "q1") else Reply("x", gate=Future())

    items = [(f"q{i}",) for i in range(6)]
    results = ask.run_batch(
        items, backend=ScriptedBackend(reply), max_errors=1, return_exceptions=True
    )
    assert [type(r) for r in results[:2]] == [ZeroDivisionError] * 2
    for result in results[2:]:
        assert isinstance(result, zipage.RunCancelledError)
        assert "max_errors=1" in str(result)


def test_allowed_errors_end_nothing():
    backend = ScriptedBackend(script)
    items = [("q17",), ("q1",)]
    results = ask.run_batch(items, backend=backend, max_errors=1, return_exceptions=True)
    assert results[1]["a"] == "fine"


class TestRetries:
    def run(self, num_failures, retries, error=None):
        failures = [error or EngineDiedError("gone")] * num_failures
        seeds = []

        def reply(call):
            seeds.append(call.sampling.seed)
            return failures.pop() if failures else "fine"

        (result,) = ask.run_batch(
            [("q",)], backend=ScriptedBackend(reply), retries=retries, return_exceptions=True
        )
        return result, seeds

    def test_a_retryable_error_is_tried_again_with_the_same_seeds(self):
        result, seeds = self.run(num_failures=2, retries=2)
        assert result["a"] == "fine"
        assert len(seeds) == 3
        assert len(set(seeds)) == 1

    def test_when_retries_are_spent_the_last_error_stands(self):
        result, seeds = self.run(num_failures=9, retries=1)
        assert isinstance(result, EngineDiedError)
        assert len(seeds) == 2

    def test_other_errors_are_not_tried_again(self):
        result, seeds = self.run(num_failures=1, retries=3, error=ValueError("a mistake"))
        assert isinstance(result, ValueError)
        assert len(seeds) == 1


@pytest.mark.parametrize("bad", [{"retries": -1}, {"max_errors": True}, {"timeout": 0}])
def test_bad_policies_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        ask.run_batch([("q",)], backend=ScriptedBackend(), **bad)


def test_an_empty_batch_is_an_empty_list():
    assert ask.run_batch([], backend=ScriptedBackend()) == []


def test_a_batch_leaves_no_thread_behind():
    before = threading.active_count()
    ask.run_batch([("q1",)] * 100, backend=ScriptedBackend(script))
    for thread in threading.enumerate():
        if thread.name.startswith("zipage-batch"):
            thread.join(10)
    assert threading.active_count() <= before + 1  # the one shared loop
