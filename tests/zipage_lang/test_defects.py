"""Each defect that was found in SGLang's frontend, and that it is not here."""

import os
import threading
from concurrent.futures import Future

import pytest

import zipage_lang as sgl
from zipage_lang.testing import Reply, ScriptedBackend, StatefulBackend


def branches_of(num_branches, part, *, backend, on_error="raise"):
    @sgl.function
    def program(s):
        s += "prefix"
        forks = s.fork(num_branches)
        forks += part
        forks.join(on_error=on_error)

    return program.run(backend=backend)


class TestForkPrefix:
    """Fork's prefix was usually not computed before the branches raced for it."""

    @pytest.mark.parametrize("num_branches", [2, 16])
    def test_text_right_before_a_fork_is_computed_once(self, num_branches):
        backend = StatefulBackend("x")
        prefix = "p" * 200

        @sgl.function
        def program(s):
            s += prefix  # still queued when the fork is asked for
            forks = s.fork(num_branches)
            forks += sgl.gen("v")
            forks.join()

        program.run(backend=backend)
        assert backend.num_computed_tokens < len(prefix) + 2 * num_branches

    def test_all_branches_send_the_same_prefix_of_tokens(self):
        backend = ScriptedBackend("x")
        branches_of(4, lambda i: str(i) + sgl.gen("v"), backend=backend)
        heads = {tuple(call.token_ids[: len("prefix")]) for call in backend.calls}
        assert len(heads) == 1


class TestSecondJoin:
    """A second join on the same name lost the second round."""

    def test_two_rounds_of_the_same_name_lose_nothing(self):
        @sgl.function
        def program(s):
            rounds = []
            for number in "12":
                forks = s.fork(2)
                forks += lambda i, number=number: f"{number}{i}" + sgl.gen("v")
                forks.join()
                rounds.append(forks)
            return rounds[0]["v"], s["v"]

        script = {"10": "a", "11": "b", "20": "c", "21": "d"}
        first, last = program.run(backend=ScriptedBackend(script)).ret_value
        assert (first, last) == (["a", "b"], ["c", "d"])


class TestFailedBranch:
    """A failed branch vanished from the join: fewer values, no index, no error."""

    def run(self, on_error):
        script = {"0": "zero", "1": RuntimeError("branch one broke"), "2": "two"}
        part = lambda i: str(i) + sgl.gen("v")  # noqa: E731
        return branches_of(3, part, backend=ScriptedBackend(script), on_error=on_error)

    def test_by_default_the_join_raises_and_names_the_branch(self):
        with pytest.raises(RuntimeError, match="branch one broke") as raised:
            self.run("raise")
        assert raised.value.__notes__ == ["in branch 1 of 3"]

    def test_kept_errors_stand_at_their_index(self):
        zero, error, two = self.run("keep")["v"]
        assert (zero, two) == ("zero", "two")
        assert isinstance(error, RuntimeError)

    def test_only_who_asks_for_it_drops_them(self):
        assert self.run("drop")["v"] == ["zero", "two"]


class TestSilentErrors:
    """A failed request left a state to be inspected; a raising body lost the whole batch."""

    def test_the_cause_is_raised_where_the_value_is_read(self):
        program = sgl.function(lambda s: s.append(sgl.gen("a")))
        state = program.run(backend=ScriptedBackend(RuntimeError("engine broke")))
        with pytest.raises(RuntimeError, match="engine broke"):
            state["a"]
        with pytest.raises(RuntimeError, match="engine broke"):
            state.text()

    def test_a_failed_gen_is_no_key_error(self):
        program = sgl.function(lambda s: s.append(sgl.gen("a")))
        state = program.run(backend=ScriptedBackend(ValueError("too long")))
        with pytest.raises(ValueError, match="too long"):
            state["a"]

    def test_one_raising_body_loses_no_other_result(self):
        @sgl.function
        def program(s, q):
            s += q + sgl.gen("a")
            if q == "bad":
                raise ValueError("my own mistake")

        backend = ScriptedBackend("fine")
        items = [("a",), ("bad",), ("c",)]
        first, second, third = program.run_batch(items, backend=backend, return_exceptions=True)
        assert (first["a"], third["a"]) == ("fine", "fine")
        assert isinstance(second, ValueError)
        with pytest.raises(sgl.BatchError) as raised:
            program.run_batch(items, backend=backend)
        assert raised.value.results[2]["a"] == "fine"


class TestBind:
    """Bound values beat those of the call, broke positional calls and leaked into the items."""

    PROGRAM = sgl.function(lambda s, a, b: s.append(f"{a}-{b}"))

    def test_a_call_overrides_a_bound_value(self):
        state = self.PROGRAM.bind(b="bound").run("x", b="called", backend=ScriptedBackend())
        assert state.text() == "x-called"

    def test_positions_count_what_is_not_bound(self):
        state = self.PROGRAM.bind(a="bound").run("y", backend=ScriptedBackend())
        assert state.text() == "bound-y"

    def test_the_callers_items_stay_as_they_are(self):
        items = [{"a": "x"}]
        states = self.PROGRAM.bind(b="bound").run_batch(items, backend=ScriptedBackend())
        assert (states[0].text(), items) == ("x-bound", [{"a": "x"}])


class TestUnnamedGens:
    """Gens without a name shared one slot."""

    def test_unnamed_gens_store_nothing_and_disturb_nobody(self):
        program = sgl.function(lambda s: s.append(sgl.gen() + sgl.gen("a") + sgl.gen()))
        state = program.run(backend=ScriptedBackend(["one", "two", "three"]))
        assert (state["a"], state.text()) == ("two", "onetwothree")
        assert None not in state

    def test_an_error_of_an_unnamed_gen_is_seen(self):
        program = sgl.function(lambda s: s.append(sgl.gen() + sgl.gen("a")))
        state = program.run(backend=ScriptedBackend(RuntimeError("broke")))
        with pytest.raises(RuntimeError, match="broke"):
            state["a"]

    def test_errors_come_the_same_way_streamed_or_not(self):
        program = sgl.function(lambda s: s.append(sgl.gen("a")))
        for stream in (False, True):
            state = program.run(backend=ScriptedBackend(RuntimeError("broke")), stream=stream)
            with pytest.raises(RuntimeError, match="broke"):
                state["a"]


class TestTracing:
    """Tracing was a switch of the whole process, and failed for f-strings."""

    def test_programs_with_f_strings_batch_and_cache_from_many_threads(self):
        program = sgl.function(lambda s, q: s.append(f"Q: {q} A:" + sgl.gen("a")))
        backend = ScriptedBackend("x")
        results = {}

        def work(index):
            program.cache("same", backend=backend)
            results[index] = program.run(str(index), backend=backend)["a"]

        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == dict.fromkeys(range(8), "x")


class TestChatTemplates:
    """Templates came from a registry matched on the path; unknown models got a wrong one."""

    def test_whatever_template_the_model_brings_is_used(self):
        def render(messages, add_generation_prompt):
            told = "".join(f"[{m['role'][0]}:{m['content']}]" for m in messages)
            return told + ("[a:" if add_generation_prompt else "")

        backend = ScriptedBackend("yes", render=render)
        program = sgl.function(lambda s: s.append(sgl.user("hi") + sgl.assistant(sgl.gen("a"))))
        program.run(backend=backend)
        assert backend.calls[0].prompt == "[u:hi][a:"

    def test_the_package_names_no_model_families_for_templates(self):
        folder = os.path.dirname(sgl.__file__)
        with open(os.path.join(folder, "chat.py")) as source:
            assert "qwen" not in source.read().lower()


class TestSharedState:
    """Backends changed the program's messages and kept one program's data on a shared object."""

    def test_the_system_message_is_there_in_every_turn(self, tiny_server):
        def reply(body):
            yield {"choices": [{"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}]}

        tiny_server.routes["/v1/chat/completions"] = reply
        backend = sgl.OpenAIBackend("small", url=tiny_server.url + "/v1", chat=True)

        @sgl.function
        def program(s):
            s += sgl.system("be brief")
            for turn in "12":
                s += sgl.user(turn) + sgl.assistant(sgl.gen(turn))

        state = program.run(backend=backend)
        bodies = tiny_server.bodies("/v1/chat/completions")
        assert [body["messages"][0]["role"] for body in bodies] == ["system", "system"]
        assert [m["role"] for m in state.messages()].count("system") == 1

    def test_programs_side_by_side_share_nothing_on_the_backend(self):
        gate = Future()
        script = {"a": Reply("one", gate=gate), "b": "two"}
        backend = ScriptedBackend(script)
        program = sgl.function(lambda s, q: s.append(q + sgl.gen("v")))
        slow = program.run("a", backend=backend, stream=True)
        assert program.run("b", backend=backend)["v"] == "two"
        gate.set_result(None)
        assert slow["v"] == "one"
