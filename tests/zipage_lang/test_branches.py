from concurrent.futures import Future

import pytest

import zipage_lang as zipage
from zipage_lang.testing import Reply, ScriptedBackend, WordTokenizer


def last_digit(call):
    return next(c for c in reversed(call.prompt) if c.isdigit())


def run(body, script=last_digit, **options):
    return zipage.function(body).run(backend=ScriptedBackend(script), **options)


def test_join_gathers_new_names_as_lists_in_branch_order():
    def body(s):
        s["old"] = "stays"
        s += "Q:"
        branches = s.fork(3)
        branches += lambda i: f"{i} " + zipage.gen("v") + zipage.gen("w")
        branches.join()

    state = run(body)
    assert state["v"] == ["0", "1", "2"]
    assert state["w"] == ["0", "1", "2"]
    assert [output.text for output in state.meta("v")] == ["0", "1", "2"]
    assert state["old"] == "stays"
    assert state.text() == "Q:"


def test_branches_take_one_expression_a_list_or_a_function():
    def body(s):
        branches = s.fork(2)
        branches += "both "
        branches += ["left ", "right "]
        branches += lambda i: f"{i}"
        return [branch.text() for branch in branches]

    assert run(body).ret_value == ["both left 0", "both right 1"]


def test_a_branch_can_be_appended_to_by_index_but_not_replaced():
    def body(s):
        branches = s.fork(2)
        branches[1] += "more"
        with pytest.raises(TypeError, match="append to it"):
            branches[0] = branches[1]
        return [branch.text() for branch in branches]

    assert run(body).ret_value == ["", "more"]


def test_a_list_of_another_length_is_refused():
    def body(s):
        branches = s.fork(2)
        branches += ["one"]

    with pytest.raises(ValueError, match="1 expressions for 2 branches"):
        run(body)


def test_groups_have_a_length_and_can_be_walked_and_indexed():
    def body(s):
        branches = s.fork(3)
        branches[-1]["mark"] = "last"
        assert [("mark" in branch) for branch in branches] == [False, False, True]
        return len(branches)

    assert run(body).ret_value == 3


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_fork_refuses_what_is_no_count(count):
    with pytest.raises(ValueError, match="whole number"):
        run(lambda s: s.fork(count))


def test_branches_share_the_exact_tokens_of_their_parent():
    @zipage.function
    def program(s):
        s += "One question"
        branches = s.fork(4)  # at once: the text before is still in the parent's queue
        branches += lambda i: f"ed {i}" + zipage.gen("v")
        branches.join()

    backend = ScriptedBackend("x", tokenizer=WordTokenizer())
    program.run(backend=backend)
    prefix = backend.encode("One question", add_special_tokens=False)
    assert [call.token_ids[:2] for call in backend.calls] == [prefix] * 4


def test_fork_waits_for_the_parents_running_call():
    def body(s):
        s += "Q" + zipage.gen("thought")
        branches = s.fork(2)
        branches += "?" + zipage.gen("v")
        gate.set_result(None)
        branches.join()
        return branches[1].text()

    gate = Future()
    state = run(body, [Reply("deep", gate=gate), "a", "b"])
    assert state.ret_value.startswith("Qdeep?")


def test_branches_read_the_parents_values():
    def body(s):
        s += zipage.gen("thought")
        (branch,) = s.fork(1)
        return branch["thought"]

    assert run(body, "deep").ret_value == "deep"


def test_a_second_round_under_the_same_name_loses_nothing():
    def body(s):
        first = s.fork(2)
        first += lambda i: f"{i}" + zipage.gen("v")
        first.join()
        s["round one"] = s["v"]
        second = s.fork(2)
        second += lambda i: f"{i + 5}" + zipage.gen("v")
        second.join()
        return first["v"], second["v"]

    state = run(body)
    assert state["v"] == ["5", "6"]
    assert state["round one"] == ["0", "1"]
    assert state.ret_value == (["0", "1"], ["5", "6"])


def test_a_second_join_of_one_group_brings_what_is_new():
    def body(s):
        branches = s.fork(2)
        branches += lambda i: f"{i}" + zipage.gen("v")
        branches.join()
        branches += lambda i: f"{i + 5}" + zipage.gen("w")
        branches.join()

    state = run(body)
    assert (state["v"], state["w"]) == (["0", "1"], ["5", "6"])


def test_a_name_that_one_branch_has_not_keeps_its_place():
    def body(s):
        branches = s.fork(3)
        branches[1] += "7" + zipage.gen("v")
        branches.join()

    assert run(body)["v"] == [None, "7", None]


def test_branches_can_be_forked_again():
    def body(s):
        outer = s.fork(2)
        for number, branch in enumerate(outer):
            inner = branch.fork(2)
            inner += lambda i, n=number: f"{2 * n + i}" + zipage.gen("v")
            inner.join()
        outer.join()

    assert run(body)["v"] == [["0", "1"], ["2", "3"]]


def test_fork_inside_an_open_message_goes_on_in_it():
    def body(s):
        s += zipage.user("hi")
        with s.assistant():
            s += "Let me think. "
            branches = s.fork(2)
            branches += lambda i: f"{i}" + zipage.gen("v") + zipage.assistant_end()
        return [branch.messages()[-1]["content"] for branch in branches]

    assert run(body).ret_value == ["Let me think. 00", "Let me think. 11"]


class TestConcat:
    def test_texts_since_the_fork_are_appended(self):
        def body(s):
            s += "Start"
            branches = s.fork(2)
            branches += lambda i: f" {i}:" + zipage.gen("v")
            branches.join("concat")
            s += " end"

        state = run(body)
        assert state.text() == "Start 0:0 1:1 end"
        assert "v" not in state

    def test_tokens_are_those_of_the_branches(self):
        @zipage.function
        def program(s):
            s += "ab"
            branches = s.fork(2)
            branches += zipage.gen("v")
            branches.join("concat")
            s += zipage.gen("w")

        backend = ScriptedBackend("cd", tokenizer=WordTokenizer())
        program.run(backend=backend)
        ids = [backend.encode(word, add_special_tokens=False)[0] for word in ("ab", "cd", "cd")]
        assert backend.calls[-1].token_ids == ids
        assert backend.calls[-1].kv.protected_len == 1

    def test_messages_of_the_branches_become_the_parents(self):
        def body(s):
            s += zipage.system("sys")
            branches = s.fork(2)
            branches += lambda i: zipage.user(f"q{i}") + zipage.assistant(zipage.gen("v"))
            branches.join("concat")

        contents = [message["content"] for message in run(body).messages()]
        assert contents == ["sys", "q0", "0", "q1", "1"]

    def test_unknown_modes_are_refused(self):
        with pytest.raises(ValueError, match="join mode 'sum'"):
            run(lambda s: s.fork(1).join("sum"))
        with pytest.raises(ValueError, match="on_error"):
            run(lambda s: s.fork(1).join(on_error="ignore"))


class TestFailedBranch:
    ERROR = RuntimeError("branch one fails")

    def script(self, call):
        return self.ERROR if last_digit(call) == "1" else last_digit(call)

    def run(self, **how):
        def body(s):
            branches = s.fork(3)
            branches += lambda i: f"{i}" + zipage.gen("v")
            s["group"] = branches
            branches.join(**how)

        return run(body, self.script)

    def test_join_raises_its_error_and_says_which_branch(self):
        with pytest.raises(RuntimeError) as raised:
            self.run()
        assert raised.value is self.ERROR
        assert "in branch 1 of 3" in raised.value.__notes__

    def test_keep_puts_the_error_in_its_place(self):
        assert self.run(on_error="keep")["v"] == ["0", self.ERROR, "2"]

    def test_drop_leaves_the_branch_out(self):
        assert self.run(on_error="drop")["v"] == ["0", "2"]

    def test_reading_the_branch_raises_its_error_and_others_are_fine(self):
        group = self.run(on_error="drop")["group"]
        assert group[0]["v"] == "0"
        with pytest.raises(RuntimeError) as raised:
            group[1]["v"]
        assert raised.value is self.ERROR
        assert group[1].error() is self.ERROR
        assert group[2].error() is None

    def test_concat_skips_a_dropped_branch(self):
        def body(s):
            branches = s.fork(3)
            branches += lambda i: f"{i}" + zipage.gen("v")
            branches.join("concat", on_error="drop")

        assert run(body, self.script).text() == "0022"

    def test_a_failed_parent_fails_its_branches_with_its_error(self):
        def body(s):
            s += "1" + zipage.gen("v")
            branches = s.fork(2)
            branches += zipage.gen("w")
            return [branch.error() for branch in branches]

        assert run(body, self.script).ret_value == [self.ERROR, self.ERROR]
