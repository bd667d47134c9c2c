"""Budgets: never more than they say, the program gets what it has, and the reason is told."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zipage_lang as zipage
from zipage_lang.loops import new_future
from zipage_lang.testing import Reply, ScriptedBackend, WordTokenizer


def run(body, script="abcdefghij", budget=None, **options):
    backend = ScriptedBackend(script, **options)
    return zipage.function(body).run(backend=backend, budget=budget), backend


def num_drawn(outputs):
    return sum(len(output.token_ids) for output in outputs)


class TestTokens:
    def test_a_call_gets_what_is_left_and_the_next_one_nothing(self):
        def body(s):
            s += zipage.gen("x", max_tokens=4) + "|" + zipage.gen("y") + "|" + zipage.gen("z")

        state, backend = run(body, budget=zipage.Budget(tokens=6))
        assert [state[name] for name in "xyz"] == ["abcd", "ab", ""]
        assert [call.sampling.max_tokens for call in backend.calls] == [4, 2]
        assert state.text() == "abcd|ab|"
        assert state.meta("x").stop_reason is None
        assert state.meta("y").stop_reason == state.meta("z").stop_reason == "budget: tokens"
        assert state.meta("z").finish_reason == "length"
        assert state.stop_reason == "tokens"

    def test_a_call_that_ends_by_itself_on_the_last_token_ended_by_itself(self):
        state, _ = run(lambda s: s.append(zipage.gen("x")), "ab", zipage.Budget(tokens=3))
        assert (state["x"], state.meta("x").finish_reason) == ("ab", "stop")
        assert state.stop_reason is None

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 40))
    def test_branches_side_by_side_never_draw_more_and_waste_none(self, lengths, limit):
        texts = iter(["x" * length for length in lengths])

        def body(s):
            branches = s.fork(len(lengths))
            branches += zipage.gen("x", max_tokens=100)
            branches.join()

        state, backend = run(body, lambda call: next(texts), zipage.Budget(tokens=limit))
        outputs = state.meta("x")
        wanted = sum(length + 1 for length in lengths)  # each ends with a token of its own
        assert num_drawn(outputs) == min(limit, wanted)
        for output in outputs:
            assert output.usage.completion_tokens == len(output.token_ids)
            assert output.text == backend.decode(output.token_ids, skip_special_tokens=True)
        assert backend.num_running == 0

    def test_the_samples_of_one_call_share_it(self):
        state, _ = run(lambda s: s.append(zipage.gen("x", n=3)), budget=zipage.Budget(tokens=7))
        assert num_drawn(state.meta("x")) == 7
        assert "".join(state["x"]) == "abc" + "ab" + "ab"

    def test_what_goes_on_after_a_stop_is_token_for_token_what_was_drawn(self):
        def body(s):
            branches = s.fork(2)
            branches += zipage.gen("x", max_tokens=50)
            branches.join()
            return [(b.text(), b.token_ids(), b.meta("x")) for b in branches]

        state, _ = run(
            body, "one two three four five", zipage.Budget(tokens=5), tokenizer=WordTokenizer()
        )
        for text, token_ids, output in state.ret_value:
            assert text == output.text
            assert token_ids == output.token_ids

    def test_streamed_pieces_add_up_to_what_stays(self):
        def body(s):
            branches = s.fork(3)
            branches += zipage.gen("x", max_tokens=50)
            pieces = ["", "", ""]
            for delta in branches.deltas():
                pieces[delta.branch] += delta.text
            return pieces, branches["x"]

        state, _ = run(body, budget=zipage.Budget(tokens=10))
        pieces, values = state.ret_value
        assert pieces == values
        assert len("".join(values)) == 10


class TestNesting:
    def test_a_child_spends_from_all_around_it(self):
        def body(s):
            with s.budget(tokens=8) as outer:
                with s.budget(tokens=3) as inner:
                    s += zipage.gen("a") + "|"
                with s.budget(tokens=100):
                    s += zipage.gen("b")
                s.sync()
                spent = inner.num_tokens, inner.reason, outer.num_tokens, outer.reason
            s += "|" + zipage.gen("c", max_tokens=2)
            return spent

        state, _ = run(body)
        assert [state[name] for name in "abc"] == ["abc", "abcde", "ab"]
        assert state.ret_value == (3, "tokens", 8, "tokens")

    def test_branches_inherit_and_a_forks_budget_is_for_each(self):
        def body(s):
            with s.budget(zipage.Budget(tokens=5)):
                branches = s.fork(3, budget=zipage.Budget(tokens=2))
            branches += zipage.gen("x")
            branches.join()

        state, _ = run(body)
        lengths = sorted(len(text) for text in state["x"])
        assert lengths == [1, 2, 2]
        assert all(m.stop_reason == "budget: tokens" for m in state.meta("x"))

    def test_branches_of_branches_spend_from_the_run(self):
        def body(s):
            for outer in s.fork(2):
                inner = outer.fork(2)
                inner += zipage.gen("x")
                inner.join()
                outer["done"] = 1

        states = zipage.function(body)
        backend = ScriptedBackend("abcdefghij")
        states.run(backend=backend, budget=zipage.Budget(tokens=9))
        assert backend.calls[0].sampling.max_tokens == 9

    def test_every_program_of_a_batch_has_its_own(self):
        program = zipage.function(lambda s, q: s.append(q + zipage.gen("x")))
        states = program.run_batch(
            [("a",), ("b",)], backend=ScriptedBackend("wxyz"), budget=zipage.Budget(tokens=2)
        )
        assert [state["x"] for state in states] == ["wx", "wx"]


class TestOtherLimits:
    def test_calls_are_counted_and_those_that_run_go_on(self):
        def body(s):
            branches = s.fork(3)
            branches += zipage.gen("x", max_tokens=5)
            branches.join()
            s += zipage.select("pick", ["yes", "no"])

        state, backend = run(body, budget=zipage.Budget(calls=2))
        assert sorted(state["x"]) == ["", "abcde", "abcde"]
        assert state["pick"] is None
        assert len(backend.calls) == 2
        assert state.stop_reason == "calls"

    def test_seconds_end_a_running_call_with_what_it_has(self):
        def body(s):
            s += zipage.gen("x", max_tokens=5000) + zipage.gen("y")

        script = Reply("a" * 5000, token_delay_s=0.01)
        state, backend = run(body, script, zipage.Budget(seconds=0.2))
        assert 0 < len(state["x"]) < 5000
        assert set(state["x"]) == {"a"}
        assert state["y"] == ""
        assert state.meta("x").stop_reason == "budget: seconds"
        assert state.error() is None
        assert len(backend.calls) == 1

    def test_seconds_end_a_call_that_has_drawn_nothing(self):
        script = Reply("late", gate=new_future())
        state, _ = run(lambda s: s.append(zipage.gen("x")), script, zipage.Budget(seconds=0.05))
        assert (state["x"], state.meta("x").stop_reason) == ("", "budget: seconds")

    def test_a_cancelled_call_is_cancelled_though_its_time_is_up_too(self):
        def body(s):
            branches = s.fork(1, budget=zipage.Budget(seconds=0.02))
            branches += zipage.gen("x")
            branches.cancel(reason="first")
            return branches[0].error()

        state, _ = run(body, Reply("late", gate=new_future()))
        assert isinstance(state.ret_value, zipage.RunCancelledError)

    def test_kv_tokens_bound_what_runs_at_one_time(self):
        def body(s):
            s += "12345678"
            with s.budget(kv_tokens=20) as account:
                branches = s.fork(3)
                branches += zipage.gen("x", max_tokens=6)
            branches[2].sync()  # the third context would be over the limit
            gate.set_result(None)
            branches.join()
            with s.budget(kv_tokens=20):
                s += zipage.gen("later", max_tokens=2)
            return account.reason

        gate = new_future()
        state, backend = run(body, Reply("abcdefghij", gate=gate))
        none, some, all_six = sorted(len(output.token_ids) for output in state.meta("x"))
        assert (none, all_six) == (0, 6)
        assert 3 <= some <= 5  # 4 KV tokens are left for two, and the last one drawn needs none
        reasons = [output.stop_reason for output in state.meta("x")]
        assert reasons.count("budget: kv_tokens") == 2
        assert state.ret_value is None  # it is free again, so nothing has run out
        assert state["later"] == "ab"
        assert len(backend.calls) == 3

    def test_all_kv_is_given_back_at_the_end(self):
        def body(s):
            with s.budget(kv_tokens=50) as account:
                s += "12345" + zipage.gen("x")
                s.sync()
                return account.kv_tokens

        assert run(body)[0].ret_value == 0


class TestWhatIsBuiltOnCalls:
    def test_a_vote_ends_with_the_votes_that_are_there(self):
        texts = iter(["a", "b" * 99, "b" * 99])

        def body(s):
            return zipage.vote(s, 3, zipage.gen("x", max_tokens=200))

        state, _ = run(body, lambda call: next(texts), zipage.Budget(tokens=30))
        result = state.ret_value
        assert result.winner == "a"
        assert result.counts == {"a": 1}
        assert result.reason == "budget: tokens"

    def test_typed_values_without_a_budget_are_none(self):
        def body(s):
            s += zipage.gen("x") + zipage.gen("n", type=int)

        state, _ = run(body, budget=zipage.Budget(calls=1))
        assert state["n"] is None


@pytest.mark.parametrize(
    "bad",
    [{}, {"tokens": 0}, {"calls": 1.5}, {"seconds": -1}, {"tokens": True}, {"seconds": 1e999}],
)
def test_budgets_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValueError, match="budget"):
        zipage.Budget(**bad)


def test_a_state_of_a_run_without_a_budget_has_no_stop_reason():
    assert run(lambda s: s.append(zipage.gen("x")))[0].stop_reason is None
