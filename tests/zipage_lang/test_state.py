from concurrent.futures import Future

import pytest

import zipage_lang as zipage
from zipage_lang.testing import Reply, ScriptedBackend


def run(*parts, script="x", **options):
    @zipage.function
    def program(s):
        for part in parts:
            s += part

    return program.run(backend=ScriptedBackend(script), **options)


def test_a_value_is_waited_for_alone():
    """`a` is read while the call behind it hangs."""
    gate = Future()

    @zipage.function
    def program(s):
        s += "1" + zipage.gen("a") + "2" + zipage.gen("b")
        first = s["a"]
        gate.set_result(None)
        return first, s["b"]

    backend = ScriptedBackend(["first", Reply("second", gate=gate)])
    assert program.run(backend=backend).ret_value == ("first", "second")


def test_unknown_name_is_a_key_error_at_once_even_while_calls_hang():
    gate = Future()

    @zipage.function
    def program(s):
        s += zipage.gen("a")
        with pytest.raises(KeyError, match="nothing"):
            s["nothing"]
        assert "a" in s
        assert "nothing" not in s
        gate.set_result(None)

    assert program.run(backend=ScriptedBackend(Reply("x", gate=gate)))["a"] == "x"


def test_a_failed_call_raises_its_own_error_where_it_is_read():
    error = RuntimeError("out of blocks")
    state = run("p", zipage.gen("a"), script=error)
    for read in (lambda: state["a"], lambda: state.meta("a"), state.text, state.messages):
        with pytest.raises(RuntimeError) as raised:
            read()
        assert raised.value is error
    assert state.error() is error


def test_what_comes_after_a_failed_call_fails_with_the_same_error():
    error = RuntimeError("out of blocks")
    state = run(zipage.gen("a"), zipage.gen("b"), zipage.select("c", ["x", "y"]), script=error)
    for name in "abc":
        with pytest.raises(RuntimeError) as raised:
            state[name]
        assert raised.value is error


def test_values_before_a_failure_stay_readable():
    state = run(zipage.gen("a"), zipage.gen("b"), script=["fine", RuntimeError("late")])
    assert state["a"] == "fine"
    assert state.meta("a").finish_reason == "stop"


def test_sync_waits_and_raises_nothing():
    state = run(zipage.gen("a"), script=RuntimeError("late"))
    state.sync()


def test_unnamed_gens_go_into_the_text_and_share_no_slot():
    state = run("1", zipage.gen(), "2", zipage.gen(max_tokens=1), script=["one", "two"])
    assert state.text() == "1one2t"
    assert None not in state
    assert "" not in state


def test_an_unnamed_call_that_fails_is_seen():
    state = run("1", zipage.gen(), script=RuntimeError("lost"))
    with pytest.raises(RuntimeError, match="lost"):
        state.text()


def test_gen_with_n_gives_a_list_and_goes_on_from_the_first():
    script = [["one", "two", "three"], ["next"]]
    state = run(
        "p", zipage.gen("a", n=3), "|", zipage.gen("b"), script=["one", "two", "three", "next"]
    )
    assert state["a"] == script[0]
    assert state.text() == "pone|next"
    assert [output.text for output in state.meta("a")] == script[0]


def test_a_name_generated_again_holds_the_last_value():
    state = run(zipage.gen("a"), zipage.gen("a"), script=["first", "second"])
    assert state["a"] == "second"


def test_values_can_be_assigned():
    @zipage.function
    def program(s):
        s["x"] = 3
        return s["x"], "x" in s

    assert program.run(backend=ScriptedBackend()).ret_value == (3, True)


def test_appending_none_raises_where_it_is_done():
    with pytest.raises(ValueError, match="None"):
        run(None)


def test_meta_holds_usage_and_finish_reason():
    meta = run("abc", zipage.gen("a", max_tokens=2), script="long text").meta("a")
    assert (meta.finish_reason, meta.usage.prompt_tokens, meta.usage.completion_tokens) == (
        "length",
        3,
        2,
    )


def test_token_ids_spell_the_text():
    backend = ScriptedBackend()
    state = run("abc", zipage.gen("a"), "d", script="xyz")
    assert backend.decode(state.token_ids(), skip_special_tokens=True) == "abcxyzd"


class TestSelect:
    @staticmethod
    def likes(word):
        """Every token of `word` is likely, all others are not."""
        return lambda context, token: -0.1 if (context + token).split("=")[-1] in word else -5.0

    def run(self, method="token_length_normalized", likes="dog"):
        @zipage.function
        def program(s):
            s += "pet=" + zipage.select("pet", ["cat", "dog"], method) + "!" + zipage.gen("after")

        backend = ScriptedBackend("x", token_logprob=self.likes(likes))
        return program.run(backend=backend), backend

    def test_the_likeliest_choice_is_appended_and_stored(self):
        state, _ = self.run()
        assert state["pet"] == "dog"
        assert state.text() == "pet=dog!x"

    def test_choices_are_scored_as_token_ids_behind_the_exact_prefix(self):
        _, backend = self.run()
        prefix = backend.encode("pet=", add_special_tokens=False)
        choices = [backend.encode(c, add_special_tokens=False) for c in ("cat", "dog")]
        assert [call.token_ids for call in backend.calls[:2]] == [prefix + c for c in choices]
        assert backend.calls[2].token_ids[: len(prefix) + 3] == prefix + choices[1]

    def test_choices_are_scored_in_one_batch(self):
        _, backend = self.run()
        assert backend.max_running == 2

    def test_meta_holds_scores_and_distribution(self):
        meta = self.run()[0].meta("pet")
        assert meta.index == 1
        assert meta.scores == pytest.approx([-5.0, -0.1])
        assert sum(meta.distribution) == pytest.approx(1.0)
        assert meta.logprobs[1] == [-0.1] * 3
        assert meta.is_exact

    def test_unconditional_scores_ask_for_the_choices_alone(self):
        state, backend = self.run("unconditional_likelihood_normalized")
        alone = [backend.encode(c, add_special_tokens=False) for c in ("cat", "dog")]
        assert [call.token_ids for call in backend.calls[2:4]] == alone
        assert len(state.meta("pet").unconditional_logprobs) == 2

    def test_a_failed_score_raises_its_own_error(self):
        state = run("p", zipage.select("c", ["a", "b"]), script=RuntimeError("no scores"))
        with pytest.raises(RuntimeError, match="no scores"):
            state["c"]


class TestKV:
    def test_the_innermost_wins_field_by_field(self):
        @zipage.function
        def program(s):
            s += "p"
            branches = s.fork(1, kv=zipage.KV(budget=64, interval=16))
            branches += zipage.gen("a", kv=zipage.KV(budget=32))

        backend = ScriptedBackend("x")
        program.run(backend=backend, kv=zipage.KV(policy="zipage", budget=128))
        assert backend.calls[0].kv == zipage.KV(
            policy="zipage", budget=32, interval=16, protected_len=1
        )

    def test_an_explicit_protected_len_is_kept(self):
        @zipage.function
        def program(s):
            s += "long prompt" + zipage.gen("a")

        backend = ScriptedBackend("x")
        program.run(backend=backend, kv=zipage.KV(protected_len=2))
        assert backend.calls[0].kv.protected_len == 2

    def test_what_is_no_kv_is_refused_where_it_is_appended(self):
        with pytest.raises(ValueError, match=r"zipage\.KV"):
            run(zipage.gen("a", kv={"budget": 3}))

    def test_kv_of_a_fork_does_not_reach_the_parent(self):
        @zipage.function
        def program(s):
            s.fork(1, kv=zipage.KV(budget=64))
            s += zipage.gen("a")

        backend = ScriptedBackend("x")
        program.run(backend=backend)
        assert backend.calls[0].kv.budget is None
