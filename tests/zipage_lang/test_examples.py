"""The programs of examples/ on a scripted model whose answers are known: exact winners."""

import importlib.util
import io
import itertools
import re
from concurrent.futures import Future
from fractions import Fraction
from pathlib import Path

import pytest
from rich.console import Console

import zipage_lang as zipage
from zipage_lang.testing import Reply, ScriptedBackend, StatefulBackend, WordTokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_scoring(call):
    """Whether it asks for the logprobs of a choice; what is drawn does not matter then."""
    return call.sampling.prompt_logprobs is not None


class TestSelfConsistency:
    example = load("self_consistency")

    @pytest.mark.parametrize(
        ("chain", "answer"),
        [
            ("3 + 2 = 5. The answer is 5.", "5"),
            ("The answer is: 1,024 pages", "1024"),
            ("The answer is 7. No, the answer is 8.", "8"),
            ("I do not know", None),
        ],
    )
    def test_answer_is_the_last_one_a_chain_names(self, chain, answer):
        assert self.example.answer_in(chain) == answer

    def run(self, replies, seen=None):
        def watch(chain, num_tokens):
            (seen if seen is not None else {})[chain] = num_tokens

        backend = ScriptedBackend(replies)
        state = self.example.self_consistency.run("Q?", len(replies), watch, backend=backend)
        return state.ret_value

    def test_the_most_frequent_answer_wins_and_tokens_are_reported_on_the_way(self):
        seen = {}
        result = self.run(["The answer is 10.", "The answer is 8.", "The answer is 10."], seen)
        assert (result.winner, result.counts) == ("10", {"10": 2, "8": 1})
        outputs = [branch.meta("chain") for branch in result.branches]
        assert seen == {i: o.usage.completion_tokens for i, o in enumerate(outputs)}
        console = Console(width=90, file=io.StringIO())
        console.print(self.example.table_of(result, seen, seconds=2.0))
        table = console.file.getvalue()
        assert f"{sum(seen.values()) / 2.0:.1f}" in table
        assert "stopped" not in table

    def test_chains_that_can_change_nothing_are_stopped_and_the_table_says_so(self):
        endless = Reply("Let me think. " * 1000, token_delay_s=0.01)
        replies = ["The answer is 4."] * 3 + [endless, endless]
        result = self.run(replies)
        assert (result.winner, result.num_stopped, result.reason) == ("4", 2, "lead")
        console = Console(width=90, file=io.StringIO())
        console.print(self.example.table_of(result, {}, seconds=1.0))
        assert console.file.getvalue().count("stopped") == 2

    def test_a_chain_without_an_answer_has_no_vote(self):
        result = self.run(["Hm.", "Who knows?", "The answer is 3."])
        assert result.counts == {"3": 1}


def makes_24(numbers):
    """Whether some order of the four operations does it, by trying all."""
    if len(numbers) == 1:
        return numbers[0] == 24
    for left, right in itertools.permutations(range(len(numbers)), 2):
        a, b = numbers[left], numbers[right]
        rest = [x for i, x in enumerate(numbers) if i not in (left, right)]
        results = [a + b, a - b, a * b, *([a / b] if b else [])]
        if any(makes_24([*rest, result]) for result in results):
            return True
    return False


class TestGameOf24:
    example = load("game_of_24")

    def proposals(self, call):
        """Sample by sample all steps there are, right or not; a perfect model would know more."""
        if is_scoring(call):
            return ""
        numbers = self.example.numbers_left(call.prompt)
        steps = [f"{a} {o} {b} =" for a, b in itertools.product(numbers, numbers) for o in "*-+/"]
        right = [step for step in steps if self.leads_on(numbers, step)]
        wrong = [step for step in steps if step not in right]
        return [*wrong[:8], *right, *wrong][call.sample_index]

    def leads_on(self, numbers, step):
        line = self.example.worked_out(numbers, step)
        return line is not None and makes_24(self.example.numbers_left(line))

    def verdict(self, context, token):
        """The log-probability of a verdict by the truth; each byte of it is a token."""
        judged = re.search(r"\n([-\d/ ]+):[a-z ]*$", context)
        truth = makes_24([Fraction(x) for x in judged[1].split()]) if judged else False
        wanted = " sure" if truth else " impossible"
        said = context.rpartition(":")[2] + token
        return -0.01 if wanted.startswith(said) else -5.0

    def search(self, numbers):
        backend = StatefulBackend(self.proposals, token_logprob=self.verdict)
        return self.example.game_of_24.run(numbers, backend=backend), backend

    def test_it_finds_the_solution_that_the_model_sees_and_code_confirms(self):
        state, backend = self.search([4, 9, 10, 13])
        found = state.ret_value
        assert (found.best.is_done, found.reason) == (True, "done")
        lines = [node.step for node in found.best.path]
        assert [len(self.example.numbers_left(line)) for line in lines] == [3, 2, 1]
        assert lines[-1].endswith("= 24 (left: 24)\n")
        assert all(node.score > 0.9 for node in found.best.path)
        assert backend.num_running == 0
        assert not backend.held

    def test_it_says_so_where_there_is_no_solution(self, capsys):
        state, _ = self.search([1, 1, 1, 1])
        assert not state.ret_value.best.is_done
        self.example.report(state.ret_value)
        assert "not solved" in capsys.readouterr().out

    def test_no_more_than_the_breadth_of_a_level_is_grown(self):
        state, _ = self.search([2, 3, 5, 12])
        for depth in (1, 2):
            level = [n for n in self.below(state.ret_value.root) if n.depth == depth]
            assert sum(bool(node.children) for node in level) <= self.example.BREADTH

    def below(self, node):
        return [n for child in node.children for n in (child, *self.below(child))]

    @pytest.mark.parametrize(
        ("step", "line"),
        [
            ("10 - 4 =", "10 - 4 = 6 (left: 6 9 13)\n"),
            ("4 / 10 =", "4 / 10 = 2/5 (left: 2/5 9 13)\n"),
            ("4 * 4 =", None),  # there is only one 4
            ("4 * 5 =", None),
            ("four times ten", None),
        ],
    )
    def test_steps_are_worked_out_by_code(self, step, line):
        numbers = [Fraction(number) for number in (4, 9, 10, 13)]
        assert self.example.worked_out(numbers, step) == line

    def test_nothing_is_divided_by_zero(self):
        assert self.example.worked_out([Fraction(4), Fraction(0)], "4 / 0 =") is None


class TestBestOfJudge:
    example = load("best_of_judge")
    DRAFTS = ("A bell.", "Ring, and the road is yours!", "Buy it now please.")

    def run(self, good_enough=None):
        grades = dict(zip(self.DRAFTS, "253", strict=True))

        def logprob(context, token):
            given = next((grade for draft, grade in grades.items() if draft in context), "")
            return 0.0 if token == given else -9.0

        drafts = iter(self.DRAFTS)

        def reply(call):
            return "" if is_scoring(call) else Reply(next(drafts), token_delay_s=0.001)

        backend = ScriptedBackend(reply, tokenizer=WordTokenizer(), token_logprob=logprob)
        return self.example.slogan.run("bells", 3, good_enough, backend=backend)

    def test_the_best_graded_draft_is_kept_and_the_judges_talk_is_not(self, capsys):
        state = self.run()
        assert state.ret_value.index == 1
        assert [round(score) for score in state.ret_value.scores] == [2, 5, 3]
        assert state["slogan"] == self.DRAFTS[1]
        assert state.messages()[-1] == {"role": "assistant", "content": self.DRAFTS[1]}
        assert "Grade" not in state.text()
        self.example.report(state)
        assert f"The best: {self.DRAFTS[1]}" in capsys.readouterr().out

    def test_a_draft_that_is_good_enough_ends_it(self):
        result = self.run(good_enough=1.5).ret_value
        assert result.reason == "threshold"
        assert result.score >= 1.5
        assert result.num_stopped == sum(score is None for score in result.scores) > 0


class TestSkeletonOfThought:
    example = load("skeleton_of_thought")

    def test_points_are_written_side_by_side_and_joined_in_order(self, capsys):
        all_here = Future()
        texts = {
            "Keep it dry:": " Water spoils it.",
            "Wrap it well:": " Paper\nis best.\n\nAnd more",
            "Eat it soon:": " It is never as good again.",
        }

        def script(call):
            for prompt, text in texts.items():
                if call.prompt.endswith(prompt):
                    if backend.num_running == len(texts):
                        all_here.set_result(None)
                    return Reply(text, gate=all_here)
            return "1. Keep it dry\n2. Wrap it well\n3. Eat it soon\n"

        backend = StatefulBackend(script)
        state = self.example.skeleton_of_thought.run("Bread?", backend=backend)
        assert state.ret_value == ["Keep it dry", "Wrap it well", "Eat it soon"]
        assert backend.max_running == 3
        assert state.messages()[-1]["content"] == (
            "Keep it dry: Water spoils it.\nWrap it well: Paper is best.\n"
            "Eat it soon: It is never as good again."
        )
        assert [m["role"] for m in state.messages()].count("user") == 2  # the branches' are gone
        self.example.report(state)
        assert "3 points at once" in capsys.readouterr().out

    @pytest.mark.parametrize("text", ["1. Keep it\n2. Wrap it\n3. Eat it\n"])
    def test_an_outline_that_is_read_is_one_that_may_be_written(self, text):
        assert re.fullmatch(self.example.OUTLINE, text)
        assert self.example.points_of(text) == ["Keep it", "Wrap it", "Eat it"]


class TestExtraction:
    example = load("extraction")

    def test_values_and_errors_stand_in_their_places(self, capsys):
        good = '{"product": "phone", "urgent": false, "days": 2}'
        script = {
            re.compile("scratch"): good,
            re.compile("smoke everywhere"): '{"product": "toaster", "urgent": true, "days": 0}',
            re.compile("long story"): '{"product": "router", "urgent": true, "days": ' + "1 " * 60,
        }
        messages = ["A scratch", "", "smoke everywhere", "a long story", "Another scratch"]
        backend = ScriptedBackend(script, tokenizer=WordTokenizer())
        results = self.example.extract_all(messages, backend)
        ticket = self.example.Ticket(product="phone", urgent=False, days=2)
        assert results[0] == results[4] == ticket
        kinds = [type(result) for result in results[1:4]]
        assert kinds == [ValueError, zipage.ParseError, zipage.ParseError]
        assert "cut off by max_tokens" in str(results[3])
        self.example.report(messages, results)
        assert "2 tickets, 3 errors" in capsys.readouterr().out


class TestLongThought:
    example = load("long_thought")

    def test_the_likeliest_second_thought_is_kept_and_gone_on_from(self, tmp_path, capsys):
        second = iter([" red", " green", " blue"])

        def reply(call):
            if call.prompt.endswith("Second thought:"):
                return next(second)
            return " one" if call.prompt.endswith("First thought:") else " three"

        def logprob(context, token):
            return -0.1 if " green".startswith(context.rpartition(":")[2] + token) else -2.0

        backend = StatefulBackend(reply, token_logprob=logprob)
        kv = zipage.KV(mode="fixed", budget=8, interval=4)
        trace = tmp_path / "long.jsonl"
        state = self.example.long_thought.run("Q?", 3, 8, backend=backend, kv=kv, trace=trace)
        assert state.text() == (
            "Question: Q?\nFirst thought: one\nSecond thought: green\nThird thought: three"
        )
        assert all(call.kv.budget == 8 for call in backend.calls)
        assert '"call_start"' in trace.read_text()
        self.example.report(state)
        printed = capsys.readouterr().out
        assert printed.count("second") == 3
        assert "Third thought: three" in printed
