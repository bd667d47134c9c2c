import asyncio
from concurrent.futures import Future

import pytest

import zipage_lang as zipage
from zipage_lang.testing import Reply, ScriptedBackend


@zipage.function
def two(s):
    s += "one: " + zipage.gen("a") + " two: " + zipage.gen("b")


def stream(script, program=two):
    return program.run(backend=ScriptedBackend(script), stream=True)


def test_a_streaming_run_returns_before_its_calls_are_done():
    gate = Future()
    state = stream([Reply("abc", gate=gate), "def"])
    assert not gate.done()
    gate.set_result(None)
    assert "".join(state.text_iter()) == "abcdef"


def test_a_reader_who_is_there_gets_each_piece_as_it_comes_without_the_authors_text():
    gate = Future()
    pieces = stream(["a", Reply("bcd", gate=gate)]).text_iter()
    assert next(pieces) == "a"
    gate.set_result(None)  # the reader is there by now
    assert list(pieces) == ["b", "c", "d"]


def test_a_late_reader_gets_the_same_text_in_larger_pieces():
    state = stream(["abc", "de"])
    state.sync()
    assert list(state.text_iter()) == ["abc", "de"]


def test_one_name_streams_alone_and_is_waited_for_until_the_body_queues_it():
    gate = Future()

    @zipage.function
    def program(s):
        gate.result(10)
        s += zipage.gen("a") + zipage.gen("b")

    state = stream(["abc", "def"], program)
    pieces = state.text_iter("b")
    gate.set_result(None)
    assert "".join(pieces) == "def"
    assert "".join(state.text_iter("a")) == "abc"  # a late reader sees all of it


def test_a_name_the_body_never_queues_is_a_key_error_once_it_has_ended():
    state = stream(["abc", "def"])
    with pytest.raises(KeyError, match="nothing"):
        list(state.text_iter("nothing"))
    with pytest.raises(KeyError, match="nothing"):
        state["nothing"]


def test_an_error_in_mid_stream_is_raised_to_every_reader():
    state = stream([Reply("abc", error=RuntimeError("cut off")), "x"])
    for name in (None, "a"):
        with pytest.raises(RuntimeError, match="cut off"):
            list(state.text_iter(name))


def test_what_came_before_an_error_was_delivered():
    state = stream([Reply("abc", error=RuntimeError("cut off")), "x"])
    state.sync()
    pieces = state.text_iter()
    assert next(pieces) == "abc"
    with pytest.raises(RuntimeError, match="cut off"):
        next(pieces)


def test_an_error_of_the_body_reaches_every_reader():
    @zipage.function
    def program(s):
        s += zipage.gen("a")
        raise ZeroDivisionError("in the body")

    state = stream(Reply("never", gate=Future()), program)
    with pytest.raises(ZeroDivisionError):
        list(state.text_iter())
    with pytest.raises(ZeroDivisionError):
        state.text()
    with pytest.raises(ZeroDivisionError):
        _ = state.ret_value
    with pytest.raises(ZeroDivisionError):
        state["never queued"]
    with pytest.raises(zipage.RunCancelledError) as raised:
        state["a"]
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert isinstance(state.error(), ZeroDivisionError)


def test_of_several_samples_the_first_is_streamed():
    @zipage.function
    def program(s):
        s += zipage.gen("a", n=2)

    assert "".join(stream(["abc", "xyz"], program).text_iter("a")) == "abc"


def test_characters_are_never_cut():
    assert "".join(stream(["é€", "x"]).text_iter("a")) == "é€"


def test_reading_inside_of_the_body_ends_with_what_is_queued():
    @zipage.function
    def program(s):
        s += zipage.gen("a")
        heard = "".join(s.text_iter())
        s += zipage.gen("b")
        return heard

    assert stream(["ab", "cd"], program).ret_value == "ab"


def test_an_assigned_value_streams_as_one_piece():
    @zipage.function
    def program(s):
        s["x"] = "whole"

    assert list(stream("", program).text_iter("x")) == ["whole"]


def test_select_streams_its_choice():
    @zipage.function
    def program(s):
        s += "p" + zipage.select("c", ["yes", "no"])

    assert list(stream("", program).text_iter()) == ["yes"]


def test_async_iteration_works_on_a_loop_of_the_readers_own():
    async def read():
        state = stream(["abc", "def"])
        return "".join([piece async for piece in state.text_async_iter("a")])

    assert asyncio.run(read()) == "abc"


def test_leaving_an_iterator_early_leaves_the_run_alone():
    state = stream(["abc", "def"])
    for piece in state.text_iter():
        assert piece.startswith("a")
        break
    assert state.text() == "one: abc two: def"


def test_deltas_of_all_branches_are_told_apart_and_counted_in_tokens():
    @zipage.function
    def program(s):
        branches = s.fork(3)
        branches += lambda i: f"{i}" + zipage.gen("v", max_tokens=4)
        return list(branches.deltas())

    backend = ScriptedBackend({"0": "abcdef", "1": "uvwxyz", "2": "12"})
    deltas = program.run(backend=backend).ret_value
    texts = ["".join(d.text for d in deltas if d.branch == branch) for branch in range(3)]
    assert texts == ["abcd", "uvwx", "12"]
    assert sum(delta.num_tokens for delta in deltas) == 4 + 4 + 3  # the end token counts
    assert {delta.name for delta in deltas} == {"v"}


def test_deltas_arrive_while_other_branches_still_wait():
    gate = Future()

    @zipage.function
    def program(s):
        branches = s.fork(2)
        branches += lambda i: f"{i}" + zipage.gen("v")
        deltas = branches.deltas()
        first = next(deltas)
        gate.set_result(None)
        return [first, *deltas]

    backend = ScriptedBackend({"0": Reply("x", gate=gate), "1": "y"})
    branches = [delta.branch for delta in program.run(backend=backend).ret_value if delta.text]
    assert branches == [1, 0]


def test_deltas_end_quietly_where_a_branch_fails_and_its_value_raises():
    @zipage.function
    def program(s):
        branches = s.fork(2)
        branches += zipage.gen("v")
        heard = "".join(delta.text for delta in branches.deltas())
        branches.join(on_error="keep")
        return heard

    state = program.run(backend=ScriptedBackend(Reply("ab", error=RuntimeError("late"))))
    assert sorted(state.ret_value) == ["a", "a", "b", "b"]
    assert all(isinstance(value, RuntimeError) for value in state["v"])
