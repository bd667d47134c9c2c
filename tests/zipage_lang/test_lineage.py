"""What each request starts from in the engine, and what is held there for how long."""

import zipage_lang as zipage
from zipage_lang.loops import new_future
from zipage_lang.testing import Reply, StatefulBackend


def run(body, backend, **options):
    return zipage.function(body).run(backend=backend, **options)


def test_16_branches_compute_a_prompt_of_1000_tokens_once():
    def body(s):
        s += "p" * 1000  # right before the fork
        branches = s.fork(16)
        branches += lambda i: f"{i:02d}" + zipage.gen("x")
        branches.join()

    backend = StatefulBackend("answer")
    run(body, backend)
    assert backend.num_computed_tokens == 1000 + 16 * 2
    assert backend.num_states_computed == 1


def test_branches_that_draw_at_once_compute_nothing_more():
    def body(s):
        s += "p" * 1000
        branches = s.fork(16)
        branches += zipage.gen("x")
        branches.join()

    backend = StatefulBackend("answer")
    run(body, backend)
    assert backend.num_computed_tokens == 1000


def test_three_forks_deep_and_four_wide_compute_each_shared_token_once():
    def grow(branch, level):
        for index, child in enumerate(branch.fork(4)):
            child += f"{level}{index}" + zipage.gen("x", max_tokens=3)
            if level < 3:
                grow(child, level + 1)

    def body(s):
        s += "p" * 100
        grow(s, 1)

    backend = StatefulBackend("abc")
    run(body, backend)
    num_nodes = 4 + 16 + 64
    assert backend.num_computed_tokens == 100 + 2 * num_nodes
    assert backend.num_drawn_tokens == 3 * num_nodes
    assert backend.held == {}


def test_the_next_call_starts_from_the_end_of_the_one_before():
    def body(s):
        s += "first" + zipage.gen("x") + "second" + zipage.gen("y")

    backend = StatefulBackend("12")
    run(body, backend)
    assert backend.num_computed_tokens == len("first") + len("second")


def test_one_state_is_held_for_each_live_state_and_none_after_the_run():
    def body(s):
        s += zipage.gen("x") + zipage.gen("y") + zipage.gen("z")
        s.sync()
        return len(backend.held)

    backend = StatefulBackend("12")
    assert run(body, backend).ret_value == 1
    assert backend.held == {}


def test_the_fork_is_held_until_the_last_branch_has_begun():
    def body(s):
        s += "prompt"
        branches = s.fork(2)
        branches[0] += "0" + zipage.gen("x")
        branches[0].sync()
        while_one_waits = list(backend.held.values())
        branches[1] += "1" + zipage.gen("x")
        branches.join()
        s.sync()
        return while_one_waits, len(backend.held)

    backend = StatefulBackend("a")
    (waiting, num_after_join) = run(body, backend).ret_value
    assert backend.encode("prompt", add_special_tokens=False) in waiting
    assert num_after_join == 0
    assert backend.num_computed_tokens == len("prompt") + 2


def test_a_cancelled_branch_holds_nothing():
    def body(s):
        s += "prompt" + zipage.gen("x")
        branches = s.fork(2)
        branches += zipage.gen("y")
        branches.join()
        branches += zipage.gen("z")
        branches[0].sync()
        branches[1].sync()
        num_before = len(backend.held)
        branches[0].cancel()
        branches[0].sync()
        return num_before - len(backend.held)

    backend = StatefulBackend("a")
    assert run(body, backend).ret_value == 1


def test_a_branch_that_nobody_has_any_more_holds_nothing():
    def body(s):
        s += "prompt" + zipage.gen("x")
        s.sync()
        num_before = len(backend.held)
        (branch,) = s.fork(1)
        branch += zipage.gen("y")
        branch.sync()
        num_with = len(backend.held)
        del branch
        s += "more"
        s.sync()
        return num_with - num_before, len(backend.held) - num_before

    backend = StatefulBackend("a")
    assert run(body, backend).ret_value == (1, 0)


def test_samples_and_choices_start_from_the_state_and_leave_the_tree_to_go_on():
    def body(s):
        s += "prompt" + zipage.gen("x") + zipage.select("pick", ["a", "b"])
        s += "text longer than a block" + zipage.gen("many", n=2) + zipage.gen("last")

    backend = StatefulBackend("12")
    state = run(body, backend)
    assert state["many"] == ["12", "12"]
    assert backend.held == {}


def test_adopted_text_goes_on_from_the_branchs_state():
    def body(s):
        s += "prompt"
        (branch,) = s.fork(1)
        branch += "thought" + zipage.gen("x")
        s.adopt(branch)
        s += "so" + zipage.gen("y")

    backend = StatefulBackend("12")
    run(body, backend)
    assert backend.num_computed_tokens == len("promptthought") + len("so")


def test_a_run_that_is_given_up_holds_nothing():
    def body(s):
        s += "a" + zipage.gen("x")
        s.sync()
        raise ZeroDivisionError

    backend = StatefulBackend("12")
    try:
        run(body, backend)
    except ZeroDivisionError:
        zipage.function(lambda s: s.append(zipage.gen("x"))).run(backend=backend)
    assert backend.held == {}


def test_a_streamed_run_holds_nothing_when_it_is_over(until):
    backend = StatefulBackend(["ab", "ab"])
    program = zipage.function(lambda s: s.append(zipage.gen("x")))
    state = program.run(backend=backend, stream=True)
    assert "".join(state.text_iter("x")) == "ab"
    until(lambda: backend.held == {}, "the release behind the last text")


def test_branches_cancelled_while_their_fork_is_computed_leave_nothing():
    def body(s):
        s += "prompt"
        branches = s.fork(3)
        branches += zipage.gen("x")
        branches.cancel(branches.states, reason="no")
        return [branch.error().reason for branch in branches]

    backend = StatefulBackend(Reply("x", gate=new_future()))
    assert run(body, backend).ret_value == ["no"] * 3
    assert backend.held == {}
