"""vote and best_of: the same winner as without the early stop, and little is drawn in vain."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zipage_lang as zipage
from zipage_lang.testing import Reply, ScriptedBackend
from zipage_lang.voting import Ballot

LOOPS_PER_STEP = 16  # a real step takes far longer than one turn of the event loop


class SteppedBackend(ScriptedBackend):
    """All that runs draws one token in each step, as in an engine; steps are counted."""

    def __init__(self, script):
        super().__init__(script)
        self.num_steps = 0
        self._next = None

    async def _sample(self, call, reply):
        async for output in super()._sample(call, reply):
            await self._step()
            yield output

    async def _step(self):
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
            self._stepping = asyncio.ensure_future(self._end_step())
        await asyncio.shield(self._next)

    async def _end_step(self):
        for _ in range(LOOPS_PER_STEP):
            await asyncio.sleep(0)
        self.num_steps += 1
        step, self._next = self._next, None
        step.set_result(None)


def replies(texts):
    """One reply for each call, in the order in which the branches call."""
    waiting = list(texts)
    return lambda call: waiting.pop(0)


def run(body, backend):
    return zipage.function(body).run(backend=backend).ret_value


def full_winner(answers):
    """The winner of a vote that nobody stops; ties go to the earliest first vote."""
    votes = [answer for answer in answers if answer is not None]
    return max(votes, key=lambda answer: (votes.count(answer), -votes.index(answer)), default=None)


answer_lists = st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=9)


@given(st.data(), answer_lists)
def test_a_ballot_stopped_early_names_the_winner_of_the_full_vote(data, answers):
    order = data.draw(st.permutations(range(len(answers))))
    ballot = Ballot(len(answers), None)
    for branch in order:
        ballot.cast(branch, answers[branch])
        if ballot.decision is not None:
            break
    winner = ballot.ranking[0][0] if ballot.ranking else None
    assert winner == full_winner(answers)


@given(st.data(), answer_lists)
def test_a_ballot_is_never_over_while_the_winner_could_change(data, answers):
    order = data.draw(st.permutations(range(len(answers))))
    ballot = Ballot(len(answers), None)
    for branch in order:
        ballot.cast(branch, answers[branch])
        if ballot.decision is not None:
            counts = [*sorted((len(v) for _, v in ballot.ranking), reverse=True), 0]
            assert counts[1] + ballot.num_running < counts[0]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_vote_of_32_says_the_same_as_the_full_vote_and_stops_within_two_steps(data):
    answers = data.draw(st.lists(st.sampled_from("abc"), min_size=32, max_size=32))
    ends = data.draw(st.permutations(range(32)))  # branch i answers in step 3 * ends[i] + 1
    texts = [" " * 3 * ends[i] + answers[i] for i in range(32)]
    backend = SteppedBackend(replies(texts))

    def program(s):
        return zipage.vote(s, 32, zipage.gen("x", max_tokens=200), key=str.strip)

    result = run(program, backend)
    assert result.winner == full_winner(answers)
    in_order = [answers[ends.index(place)] for place in range(32)]
    ballot = Ballot(32, None)
    num_needed = next(i for i, a in enumerate(in_order) if cast(ballot, i, a) or i == 31) + 1
    assert result.num_stopped == 32 - num_needed
    decided_in_step = 3 * (num_needed - 1) + 2  # the end of sequence is a token of its own
    assert backend.num_steps <= decided_in_step + 2
    assert backend.num_running == 0


def cast(ballot, branch, answer):
    ballot.cast(branch, answer)
    return ballot.decision


def test_counts_answers_and_reason_are_told():
    result = run(
        lambda s: zipage.vote(s, 4, zipage.gen("x")), ScriptedBackend(["a", "b", "a", "b"])
    )
    assert (result.winner, result.counts, result.reason) == ("a", {"a": 2, "b": 2}, "all ended")
    assert result.answers == ["a", "b", "a", "b"]
    assert result.num_stopped == 0
    assert result.branch is result.branches[0]


def test_quorum_ends_a_vote_that_could_still_turn():
    gate = Reply("b" * 50, token_delay_s=0.01)
    backend = ScriptedBackend(replies(["a", "a", gate, gate, gate, gate]))
    result = run(lambda s: zipage.vote(s, 6, zipage.gen("x"), quorum=2), backend)
    assert (result.winner, result.reason, result.num_stopped) == ("a", "quorum", 4)
    with pytest.raises(zipage.RunCancelledError, match="the vote is decided"):
        result.branches[3]["x"]


def test_key_says_which_answers_are_alike_and_none_of_it_is_no_vote():
    def key(text):
        digits = "".join(c for c in text if c.isdigit())
        return int(digits) if digits else None

    backend = ScriptedBackend(["7", "42.", "none", "42"])
    result = run(lambda s: zipage.vote(s, 4, zipage.gen("x"), key=key), backend)
    assert (result.winner, result.counts) == (42, {42: 2, 7: 1})
    assert result.branch["x"] == "42."


def test_bodies_may_be_functions_that_read_async_functions_and_programs():
    @zipage.function
    def inner(s, word="x"):
        s += word + zipage.gen("x")
        return s["x"].upper()

    def reads(branch):
        branch += zipage.gen("x")
        return branch["x"] + "!"

    async def awaits(branch):
        branch += zipage.gen("x")
        return await branch["x"] + "?"

    for body, winner in ((inner, "A"), (reads, "a!"), (awaits, "a?")):
        assert run(lambda s, b=body: zipage.vote(s, 3, b).winner, ScriptedBackend("a")) == winner


def test_vote_is_awaited_in_async_programs_and_takes_no_thread():
    @zipage.function
    async def program(s):
        plain = await zipage.vote(s, 3, lambda branch: branch.append(zipage.gen("x"))["x"])
        best = await zipage.best_of(s, 3, zipage.gen("y"), score=score)
        await s.adopt(best.branch)
        return plain.winner, best.score, await s.text()

    async def score(branch):
        return len(await branch["y"])

    assert program.run(backend=ScriptedBackend("abc")).ret_value == ("abc", 3.0, "abc")


def test_a_branch_that_raises_does_not_vote_and_is_told():
    failure = RuntimeError("no blocks")
    backend = ScriptedBackend(replies(["a", failure, "a"]))
    result = run(lambda s: zipage.vote(s, 3, zipage.gen("x")), backend)
    assert result.winner == "a"
    assert result.errors == [None, failure, None] or result.num_stopped == 1


def test_a_vote_where_all_raise_raises():
    with pytest.raises(RuntimeError, match="no blocks") as raised:
        run(
            lambda s: zipage.vote(s, 2, zipage.gen("x")), ScriptedBackend(RuntimeError("no blocks"))
        )
    assert "all 2 branches" in raised.value.__notes__[0]


@pytest.mark.parametrize("bad", [{"quorum": 9}, {"quorum": 0}, {"n": 0}, {"body": 7}])
def test_bad_arguments_are_refused(bad):
    arguments = {"n": 3, "body": zipage.gen("x"), **bad}
    with pytest.raises(ValueError):
        run(lambda s: zipage.vote(s, **arguments), ScriptedBackend("a"))


def test_answers_that_cannot_be_counted_ask_for_a_key():
    with pytest.raises(ValueError, match="give key"):
        run(lambda s: zipage.vote(s, 2, lambda branch: [1]), ScriptedBackend())


def test_a_body_without_a_named_gen_is_refused():
    with pytest.raises(ValueError, match="name its gen"):
        run(lambda s: zipage.vote(s, 2, zipage.gen()), ScriptedBackend("a"))


def test_adopting_the_winner_appends_its_exact_tokens_and_its_values():
    def program(s):
        s += "Q:"
        result = zipage.vote(s, 3, " A:" + zipage.gen("x"))
        s.adopt(result.branch)
        s += "." + zipage.gen("y")
        return s["x"], result.branch.token_ids()

    backend = ScriptedBackend("42")
    state = zipage.function(program).run(backend=backend)
    value, token_ids = state.ret_value
    assert value == "42"
    assert state.text() == "Q: A:42.42"
    assert backend.calls[-1].token_ids[: len(token_ids)] == token_ids


class TestBestOf:
    def test_the_highest_score_wins_and_ties_go_to_the_first(self):
        backend = ScriptedBackend(["aa", "bbb", "ccc"])
        result = run(
            lambda s: zipage.best_of(s, 3, zipage.gen("x"), score=lambda b: len(b["x"])), backend
        )
        assert (result.index, result.score, result.answer) == (1, 3.0, "bbb")
        assert result.scores == [2.0, 3.0, 3.0]
        assert result.reason == "all ended"

    def test_the_threshold_stops_the_rest(self):
        slow = Reply("c" * 50, token_delay_s=0.01)
        backend = ScriptedBackend(replies(["aaaa", slow, slow]))
        result = run(
            lambda s: zipage.best_of(
                s, 3, zipage.gen("x"), score=lambda b: len(b["x"]), threshold=4
            ),
            backend,
        )
        assert (result.index, result.num_stopped, result.reason) == (0, 2, "threshold")
        assert result.scores == [4.0, None, None]
        assert backend.num_running == 0

    def test_logprob_is_the_mean_over_the_tokens_a_branch_drew(self):
        backend = ScriptedBackend(
            ["a", "bb"],
            token_logprob=lambda context, token: {"a": -3.0, "b": -1.0}.get(token, -1.0),
        )
        result = run(lambda s: zipage.best_of(s, 2, zipage.gen("x")), backend)
        assert result.index == 1
        assert result.scores == [-2.0, -1.0]  # the end of sequence is a token too
        assert all(call.sampling.logprobs == 0 for call in backend.calls)

    def test_a_judge_reads_the_branch_and_leaves_no_text(self):
        backend = ScriptedBackend(["3", "9", "I say 3.5/10", "9/10"])
        result = run(
            lambda s: zipage.best_of(s, 2, zipage.gen("x"), score=" Grade: " + zipage.gen("grade")),
            backend,
        )
        assert result.scores in ([3.5, 9.0], [9.0, 3.5])
        assert [branch.text() for branch in result.branches] == ["3", "9"]

    def test_a_branch_without_a_score_is_left_out_and_none_at_all_raises(self):
        def score(branch):
            return {"a": 1.0}[branch["x"]]

        backend = ScriptedBackend(replies(["b", "a"]))
        result = run(lambda s: zipage.best_of(s, 2, zipage.gen("x"), score=score), backend)
        assert result.index == 1
        assert isinstance(result.errors[0], KeyError)
        with pytest.raises(KeyError):
            run(lambda s: zipage.best_of(s, 2, zipage.gen("x"), score=score), ScriptedBackend("b"))
