"""search: what it finds, what it keeps alive, what it gives up, and why it ends."""

import pytest

import zipage_lang as zipage
from zipage_lang.testing import ScriptedBackend, StatefulBackend

SECRET = "cab"


def run(body, backend=None, **options):
    backend = backend or StatefulBackend("x")
    return zipage.function(body).run(backend=backend, **options).ret_value


def letters(branch):
    return ["a", "b", "c"]


def num_right(branch):
    """Letters that agree with the secret, as a share."""
    return sum(a == b for a, b in zip(branch.text(), SECRET, strict=False)) / len(SECRET)


def is_found(branch):
    return branch.text() == SECRET


class TestBeam:
    def test_it_finds_the_best_line_level_by_level(self):
        result = run(
            lambda s: zipage.search(s, propose=letters, evaluate=num_right, width=2, depth=3)
        )
        assert result.branch.text() == SECRET
        assert (result.score, result.reason) == (1.0, "depth")
        assert [node.branch.text() for node in result.best.path] == ["c", "ca", "cab"]
        assert result.num_nodes == 3 + 6 + 6

    def test_losers_are_dropped_and_only_the_best_line_stays(self):
        def body(s):
            result = zipage.search(s, propose=letters, evaluate=num_right, width=1, depth=2)
            dropped = [node for node in nodes_of(result) if node.is_dropped]
            kept = [node for node in nodes_of(result) if not node.is_dropped]
            assert [node.branch.text() for node in kept] == ["c", "ca"]
            return [node.branch.error() for node in dropped]

        errors = run(body)
        assert len(errors) == 4
        assert all(isinstance(error, zipage.RunCancelledError) for error in errors)

    def test_a_node_that_is_done_and_best_ends_it(self):
        result = run(
            lambda s: zipage.search(
                s, propose=letters, evaluate=num_right, width=2, depth=9, is_done=is_found
            )
        )
        assert (result.branch.text(), result.reason) == (SECRET, "done")
        assert result.best.is_done

    def test_a_gen_proposes_width_samples_and_a_gen_judges_without_text(self):
        replies = iter(["s1", "s2", "score: 0.25", "0.75!"])

        def body(s):
            s += "Q"
            return zipage.search(
                s,
                propose=" " + zipage.gen("step"),
                evaluate=" Judge: " + zipage.gen("grade"),
                width=2,
                depth=1,
            )

        result = run(body, ScriptedBackend(lambda call: next(replies)))
        assert result.score == 0.75
        assert result.branch.text() in ("Q s1", "Q s2")
        assert "Judge" not in result.branch.text()

    def test_no_proposals_end_it_with_the_level_before(self):
        def propose(branch):
            return ["a"] if len(branch.text()) < 2 else []

        result = run(lambda s: zipage.search(s, propose=propose, evaluate=lambda b: 1.0, depth=9))
        assert (result.branch.text(), result.reason) == ("aa", "no children")

    def test_a_node_whose_evaluation_raises_is_left_out(self):
        def evaluate(branch):
            return 1 / (branch.text() != "b")

        result = run(
            lambda s: zipage.search(s, propose=letters, evaluate=evaluate, width=3, depth=1)
        )
        assert result.branch.text() == "a"
        failed = [node for node in nodes_of(result) if node.error is not None]
        assert [type(node.error) for node in failed] == [ZeroDivisionError]
        assert failed[0].is_dropped

    def test_an_error_in_every_evaluation_is_raised(self):
        with pytest.raises(ZeroDivisionError):
            run(lambda s: zipage.search(s, propose=letters, evaluate=lambda b: 1 / 0, depth=2))

    def test_a_missing_branch_is_refused_by_adopt(self):
        with pytest.raises(ValueError, match="its `reason` says why"):
            run(lambda s: s.adopt(None))

    def test_the_best_line_can_be_adopted(self):
        def body(s):
            s += "start:"
            result = zipage.search(s, propose=letters, evaluate=lambda b: 0.0, width=1, depth=2)
            s.adopt(result.branch)
            return s.text()

        assert run(body) == "start:aa"

    def test_async_programs_await_it(self):
        @zipage.function
        async def program(s):
            async def evaluate(branch):
                return (await branch.text()).count("c")

            result = await zipage.search(s, propose=letters, evaluate=evaluate, width=1, depth=2)
            return await result.branch.text()

        assert program.run(backend=ScriptedBackend()).ret_value == "cc"


class TestBestFirst:
    def test_it_goes_on_from_the_best_node_anywhere(self):
        result = run(
            lambda s: zipage.search(
                s,
                propose=letters,
                evaluate=num_right,
                select="best_first",
                depth=3,
                expansions=10,
                is_done=is_found,
            )
        )
        assert (result.branch.text(), result.reason) == (SECRET, "done")
        expanded = [node for node in nodes_of(result) if node.children]
        assert [node.step for node in expanded] == ["c", "a"]

    def test_expansions_bound_it(self):
        result = run(
            lambda s: zipage.search(
                s, propose=letters, evaluate=num_right, select="best_first", depth=9, expansions=2
            )
        )
        assert result.reason == "expansions"
        assert result.num_nodes == 6


class TestMcts:
    def search(self, s, **options):
        return zipage.search(
            s, propose=letters, evaluate=num_right, select="mcts", depth=3, **options
        )

    def test_many_rounds_find_the_secret_and_the_same_seed_finds_it_the_same_way(self):
        def body(s):
            result = self.search(s, expansions=60)
            visits = [(node.step, node.num_visits) for node in result.root.children]
            return result.branch.text(), visits

        text, visits = run(body, seed=3)
        assert text == SECRET
        assert max(visits, key=lambda item: item[1])[0] == "c"
        assert run(body, seed=3) == (text, visits)

    def test_rounds_are_counted_and_backed_up_to_the_root(self):
        result = run(lambda s: self.search(s, expansions=7))
        assert result.reason == "expansions"
        assert result.root.num_visits == 7
        assert sum(node.num_visits for node in result.root.children) == 7
        total = sum(node.value_sum for node in result.root.children)
        assert result.root.value_sum == pytest.approx(total)


@pytest.mark.parametrize("select", ["beam", "best_first", "mcts"])
class TestEveryStrategy:
    def test_nothing_is_held_for_what_was_dropped(self, select):
        held = []

        def body(s):
            s += "Q:"
            result = zipage.search(
                s,
                propose=zipage.gen("x", max_tokens=2),
                evaluate=lambda b: 0.5,
                select=select,
                width=3,
                depth=2,
            )
            result.branch.sync()
            held.extend(backend.held.values())
            return result.branch.token_ids()

        backend = StatefulBackend("ab")
        token_ids = run(body, backend)
        assert held
        for state in held:
            assert state == token_ids[: len(state)]  # only the best line and what is above it
        assert backend.held == {}

    def test_a_budget_ends_it_with_what_is_there(self, select):
        def body(s):
            return zipage.search(
                s,
                propose=zipage.gen("x", max_tokens=4),
                evaluate=lambda b: 0.5,
                select=select,
                width=2,
                depth=50,
                budget=zipage.Budget(tokens=30),
            )

        backend = StatefulBackend("abcdefgh")
        result = run(body, backend)
        assert result.reason == "budget: tokens"
        assert backend.num_running == 0


@pytest.mark.parametrize(
    "bad", [{"select": "dfs"}, {"width": 0}, {"depth": 1.5}, {"expansions": 0}, {"propose": 7}]
)
def test_bad_arguments_are_refused(bad):
    arguments = {"propose": letters, "evaluate": num_right, **bad}
    with pytest.raises(ValueError):
        run(lambda s: zipage.search(s, **arguments))


def nodes_of(result):
    found, todo = [], list(result.root.children)
    while todo:
        node = todo.pop(0)
        found.append(node)
        todo += node.children
    return found
