import threading
from concurrent.futures import Future

import pytest

import zipage_lang as zipage
from zipage_lang.testing import Reply, ScriptedBackend


@zipage.function
def ask(s, question, tail="."):
    s += "Q: " + question + tail + zipage.gen("answer")
    return s["answer"].upper()


def test_run_returns_the_state_and_keeps_what_the_body_returned():
    state = ask.run("why", backend=ScriptedBackend("so"))
    assert state.text() == "Q: why.so"
    assert state["answer"] == "so"
    assert state.ret_value == "SO"


def test_run_waits_for_what_the_body_queued():
    @zipage.function
    def program(s):
        s += "x" + zipage.gen("a")

    backend = ScriptedBackend(Reply("slow", token_delay_s=0.01))
    program.run(backend=backend)
    assert backend.num_running == 0


def test_calling_a_program_without_a_state_runs_it():
    zipage.set_default_backend(ScriptedBackend("so"))
    try:
        assert ask("why").ret_value == "SO"
    finally:
        zipage.set_default_backend(None)


def test_no_backend_is_one_clear_error():
    with pytest.raises(zipage.NoBackendError, match="set_default_backend"):
        ask.run("why")


def test_what_is_no_backend_is_refused():
    with pytest.raises(TypeError, match=r"zipage\.Engine"):
        ask.run("why", backend="http://server")
    with pytest.raises(TypeError):
        zipage.set_default_backend(object())


def test_sampling_fields_of_run_are_the_defaults_of_its_calls():
    @zipage.function
    def program(s):
        s += zipage.gen("a") + zipage.gen("b", temperature=0.9)

    backend = ScriptedBackend("x")
    program.run(backend=backend, temperature=0.1, max_tokens=3)
    assert [call.sampling.temperature for call in backend.calls] == [0.1, 0.9]
    assert [call.sampling.max_tokens for call in backend.calls] == [3, 3]


def test_unknown_argument_names_the_nearest_known_one():
    backend = ScriptedBackend("x")
    with pytest.raises(ValueError, match="'question'"):
        ask.run(quesion="why", backend=backend)
    with pytest.raises(ValueError, match="'temperature'"):
        ask.run("why", temprature=1.0, backend=backend)


def test_missing_surplus_and_doubled_arguments_are_type_errors():
    backend = ScriptedBackend("x")
    with pytest.raises(TypeError, match="question"):
        ask.run(backend=backend)
    with pytest.raises(TypeError, match="takes 2 positional"):
        ask.run("a", "b", "c", backend=backend)
    with pytest.raises(TypeError, match="two values for 'question'"):
        ask.run("a", question="b", backend=backend)
    assert backend.calls == []


def test_a_body_that_can_not_be_a_program_is_refused():
    with pytest.raises(ValueError, match="first parameter"):
        zipage.function(lambda: None)
    with pytest.raises(ValueError, match="word of run"):
        zipage.function(lambda s, backend: None)
    with pytest.raises(ValueError, match="by name"):
        zipage.function(lambda s, *items: None)


def test_bad_fields_for_two_calls_together_are_raised_where_they_are_appended():
    @zipage.function
    def program(s):
        s += zipage.gen("a", min_tokens=50)

    with pytest.raises(ValueError, match="min_tokens=50"):
        program.run(backend=ScriptedBackend("x"), max_tokens=10)


def test_an_error_of_the_body_is_raised_by_run_and_its_calls_are_dropped():
    @zipage.function
    def program(s):
        s += zipage.gen("a")
        raise KeyError("mine")

    backend = ScriptedBackend(Reply("never", gate=Future()))
    with pytest.raises(KeyError, match="mine"):
        program.run(backend=backend)
    settle(backend)
    assert backend.num_running == 0
    assert len(backend.aborted_groups) == 1


def settle(backend):
    """Two turns of the loop: what was cancelled has ended."""
    for _ in range(2):
        turned = threading.Event()
        backend.loop.call_soon_threadsafe(turned.set)
        assert turned.wait(5)


class TestBind:
    def test_positional_arguments_fill_what_is_not_bound(self):
        state = ask.bind(question="bound").run("!", backend=ScriptedBackend("x"))
        assert state.text() == "Q: bound!x"

    def test_a_call_may_override_a_bound_value(self):
        state = ask.bind(tail="?").run("a", tail="!", backend=ScriptedBackend("x"))
        assert state.text() == "Q: a!x"

    def test_names_are_checked(self):
        with pytest.raises(ValueError, match="did you mean 'tail'"):
            ask.bind(tial="?")

    def test_the_callers_batch_items_stay_as_they_are(self):
        items = [{"question": "a"}, {"question": "b"}]
        ask.bind(tail="?").run_batch(items, backend=ScriptedBackend("x"))
        assert items == [{"question": "a"}, {"question": "b"}]

    def test_the_program_it_was_made_of_is_not_changed(self):
        ask.bind(tail="?")
        assert ask.run("a", backend=ScriptedBackend("x")).text() == "Q: a.x"


class TestNesting:
    def test_a_program_called_with_a_state_goes_on_in_it(self):
        @zipage.function
        def outer(s):
            s += "first "
            s["kept"] = ask(s, "why")

        state = outer.run(backend=ScriptedBackend("so"))
        assert state.text() == "first Q: why.so"
        assert state["kept"] == "SO"

    def test_run_inside_of_a_body_is_a_run_of_its_own(self):
        backend = ScriptedBackend("so")

        @zipage.function
        def outer(s):
            s += "first "
            return ask.run("why", backend=backend)["answer"]

        state = outer.run(backend=backend)
        assert (state.text(), state.ret_value) == ("first ", "so")


class TestBatch:
    def test_results_come_in_input_order_for_dicts_and_tuples(self):
        backend = ScriptedBackend(lambda call: call.prompt[3])
        states = ask.run_batch([{"question": "a"}, ("b", "!"), ["c"]], backend=backend)
        assert [state["answer"] for state in states] == ["a", "b", "c"]

    def test_an_empty_batch_gives_an_empty_list(self):
        assert ask.run_batch([], backend=ScriptedBackend("x")) == []

    def test_one_failing_body_loses_no_other_result(self):
        backend = ScriptedBackend({"bad.": RuntimeError("engine says no"), "good.": "fine"})
        results = ask.run_batch([("good",), ("bad",)], backend=backend, return_exceptions=True)
        assert results[0]["answer"] == "fine"
        assert isinstance(results[1], RuntimeError)
        with pytest.raises(zipage.BatchError, match="1 of 2") as raised:
            ask.run_batch([("good",), ("bad",)], backend=backend)
        assert raised.value.results[0]["answer"] == "fine"
        assert str(raised.value.__cause__) == "engine says no"

    def test_a_failed_call_nobody_read_is_raised_where_it_is_read(self):
        @zipage.function
        def program(s, q):
            s += q + zipage.gen("a")

        backend = ScriptedBackend({"bad": RuntimeError("engine says no"), "good": "fine"})
        good, bad = program.run_batch([("good",), ("bad",)], backend=backend)
        assert good["a"] == "fine"
        with pytest.raises(RuntimeError, match="engine says no"):
            bad["a"]

    def test_programs_run_side_by_side(self):
        @zipage.function
        def program(s):
            s += zipage.gen("a")
            both.wait()  # passes only when both bodies are here

        both = threading.Barrier(2, timeout=10)
        states = program.run_batch([{}, {}], backend=ScriptedBackend("x"))
        assert [state["a"] for state in states] == ["x", "x"]

    def test_num_threads_bounds_the_bodies(self):
        seen = set()

        @zipage.function
        def program(s, q):
            seen.add(threading.get_ident())
            s += q + zipage.gen("a")

        program.run_batch([("a",)] * 20, num_threads=2, backend=ScriptedBackend("x"))
        assert len(seen) <= 2
        with pytest.raises(ValueError, match="num_threads=0"):
            program.run_batch([("a",)], num_threads=0, backend=ScriptedBackend("x"))

    def test_item_that_is_no_set_of_arguments_is_refused(self):
        with pytest.raises(ValueError, match="batch item 'text'"):
            ask.run_batch(["text"], backend=ScriptedBackend("x"))

    def test_progress_bar_counts_programs(self, capsys):
        ask.run_batch([("a",), ("b",)], progress_bar=True, backend=ScriptedBackend("x"))
        assert "2/2" in capsys.readouterr().out
