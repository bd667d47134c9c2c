"""Scratch frames: their text goes, their values stay."""

from concurrent.futures import Future

import pytest

import zipage_lang as zipage
from zipage_lang.testing import Reply, ScriptedBackend


def run(body, script="hm"):
    backend = ScriptedBackend(script)
    return zipage.function(body).run(backend=backend), backend


def test_the_text_goes_and_the_values_stay():
    def body(s):
        s += "Q. "
        with s.scratch() as t:
            t += "Think: " + zipage.gen("idea")
            t["note"] = 7
        s += "So: " + zipage.gen("answer")

    state, backend = run(body)
    assert state.text() == "Q. So: hm"
    assert (state["idea"], state["note"], state.meta("idea").text) == ("hm", 7, "hm")
    assert sorted(call.prompt for call in backend.calls) == ["Q. So: ", "Q. Think: "]


def test_leaving_a_frame_does_not_wait():
    def body(s):
        with s.scratch() as t:
            t += zipage.gen("slow")
        is_there = "slow" in s
        gate.set_result(None)
        return is_there, s["slow"]

    gate = Future()
    state, _ = run(body, Reply("late", gate=gate))
    assert state.ret_value == (True, "late")


def test_frames_nest():
    def body(s):
        with s.scratch() as outer:
            outer += "a"
            with outer.scratch() as inner:
                inner += "b" + zipage.gen("deep")
            outer += "c" + zipage.gen("shallow")

    state, backend = run(body)
    assert (state["deep"], state["shallow"], state.text()) == ("hm", "hm", "")
    assert sorted(call.prompt for call in backend.calls) == ["ab", "ac"]


def test_async_programs_use_the_same_with():
    @zipage.function
    async def program(s):
        with s.scratch() as t:
            t += zipage.gen("idea")
        return await s["idea"], await s.text()

    assert program.run(backend=ScriptedBackend("hm")).ret_value == ("hm", "")


def fail_inside(s):
    with s.scratch() as t:
        t += zipage.gen("idea")
        raise ZeroDivisionError


def test_a_frame_that_raises_gives_its_calls_up():
    def body(s):
        with pytest.raises(ZeroDivisionError):
            fail_inside(s)
        with pytest.raises(zipage.RunCancelledError, match="ZeroDivisionError"):
            s["idea"]

    state, backend = run(body, Reply("never", gate=Future()))
    assert state.error() is None
    assert backend.num_running == 0


def test_adopt_takes_the_text_and_values_of_a_branch_of_a_branch():
    def body(s):
        s += "1"
        (outer,) = s.fork(1)
        outer += "2" + zipage.gen("x")
        (inner,) = outer.fork(1)
        inner += "3" + zipage.gen("y")
        s.adopt(inner)
        return s["x"], s["y"]

    state, _ = run(body)
    assert state.text() == "12hm3hm"
    assert state.ret_value == ("hm", "hm")


def test_only_branches_of_the_state_can_be_adopted():
    def body(s):
        left, right = s.fork(2)
        left.adopt(right)

    with pytest.raises(ValueError, match="branch of this state"):
        run(body)


def test_adopting_a_failed_branch_raises_its_error():
    def body(s):
        (branch,) = s.fork(1)
        branch += zipage.gen("x")
        s.adopt(branch)

    with pytest.raises(RuntimeError, match="no blocks"):
        run(body, RuntimeError("no blocks"))
