"""Branches as they end, and branches that are given up; thousands of them on one thread."""

import asyncio
import gc
import threading
import tracemalloc

import pytest

import zipage_lang as zipage
from zipage_lang.loops import new_future
from zipage_lang.testing import Reply, ScriptedBackend, StatefulBackend

NUM_MANY = 2000
MAX_BYTES_PER_BRANCH = 20_000  # of the client, while its call runs
MAX_LOOPS_TO_CANCEL = 12  # turns of the event loop


def run(body, backend, **options):
    return zipage.function(body).run(backend=backend, **options)


def by_last_digit(gates):
    """Branch i's reply waits for gates[i]."""

    def script(call):
        index = int(next(c for c in reversed(call.prompt) if c.isdigit()))
        return Reply(f"r{index}", gate=gates[index])

    return script


class TestAsCompleted:
    def test_branches_come_as_they_end(self):
        gates = [new_future() for _ in range(3)]

        def body(s):
            branches = s.fork(3)
            branches += lambda i: f"{i}" + zipage.gen("x")
            gates[1].set_result(None)
            seen = []
            for branch in branches.as_completed():
                seen.append(branch["x"])
                left = [gate for gate in (gates[2], gates[0]) if not gate.done()]
                if left:
                    left[0].set_result(None)
            return seen

        assert run(body, ScriptedBackend(by_last_digit(gates))).ret_value == ["r1", "r2", "r0"]

    def test_failed_and_cancelled_branches_come_too(self):
        def body(s):
            branches = s.fork(3)
            branches += lambda i: f"{i}" + zipage.gen("x")
            branches[2].cancel("not wanted")
            return sorted(branches.states.index(b) for b in branches.as_completed()), branches

        gates = [new_future() for _ in range(3)]
        for gate in gates[:2]:
            gate.set_result(None)
        seen, branches = run(body, ScriptedBackend(by_last_digit(gates))).ret_value
        assert seen == [0, 1, 2]
        assert branches[2].error().reason == "not wanted"

    def test_async_programs_iterate_with_async_for_and_may_cancel_the_rest(self):
        gates = [new_future() for _ in range(3)]

        @zipage.function
        async def program(s):
            branches = s.fork(3)
            branches += lambda i: f"{i}" + zipage.gen("x")
            gates[1].set_result(None)
            async for branch in branches.as_completed():
                branches.cancel(reason="one is enough")
                await branches.join(on_error="drop")
                return await branch["x"], await s["x"]

        state = program.run(backend=ScriptedBackend(by_last_digit(gates)))
        assert state.ret_value == ("r1", ["r1"])


class TestCancel:
    def test_the_request_is_aborted_and_readers_are_told_why(self):
        def body(s):
            branches = s.fork(2)
            branches += lambda i: f"{i}" + zipage.gen("x") + zipage.gen("later")
            branches[0].cancel("too slow")
            for name in ("x", "later"):
                with pytest.raises(zipage.RunCancelledError, match="too slow"):
                    branches[0][name]
            running = backend.num_running
            gates[1].set_result(None)
            return running, branches[1]["x"]

        gates = [new_future(), new_future()]
        backend = ScriptedBackend(by_last_digit(gates))
        assert run(body, backend).ret_value[1] == "r1"
        assert backend.num_running == 0

    def test_values_that_are_there_stay(self):
        def body(s):
            (branch,) = s.fork(1)
            branch += zipage.gen("x")
            value = branch["x"]
            branch.cancel()
            branch += zipage.gen("y")
            with pytest.raises(zipage.RunCancelledError):
                branch["y"]
            return value, branch["x"]

        assert run(body, ScriptedBackend("yes")).ret_value == ("yes", "yes")

    def test_a_branch_whose_fork_was_not_reached_fails_at_once(self):
        def body(s):
            s += zipage.gen("slow")
            (branch,) = s.fork(1)
            branch += zipage.gen("x")
            branch.cancel("never mind")
            with pytest.raises(zipage.RunCancelledError, match="never mind"):
                branch["x"]
            gate.set_result(None)
            return s["slow"]

        gate = new_future()
        assert run(body, ScriptedBackend(Reply("ok", gate=gate))).ret_value == "ok"

    def test_branches_behind_a_fork_that_was_not_reached_fail_at_once_too(self):
        def body(s):
            s += zipage.gen("slow")
            (outer,) = s.fork(1)
            inner = outer.fork(2)
            inner += zipage.gen("x")
            outer.cancel("never mind")
            reasons = [branch.error().reason for branch in inner]
            gate.set_result(None)
            return reasons, s["slow"]

        gate = new_future()
        backend = ScriptedBackend(Reply("ok", gate=gate))
        assert run(body, backend).ret_value == (["never mind"] * 2, "ok")
        assert len(backend.calls) == 1

    def test_branches_forked_while_their_parent_is_cancelled_are_cancelled_with_it(self):
        def body(s):
            (outer,) = s.fork(1)
            groups = []
            for round_index in range(50):
                inner = outer.fork(1)
                inner += zipage.gen("x")
                groups.append(inner)
                if round_index == 25:
                    outer.cancel("enough")
            return {branch.error().reason for inner in groups for branch in inner}

        backend = ScriptedBackend(Reply("x", gate=new_future()))
        assert run(body, backend).ret_value == {"enough"}
        assert backend.num_running == 0

    def test_branches_of_a_cancelled_branch_are_cancelled_with_it(self):
        def body(s):
            (outer,) = s.fork(1)
            inner = outer.fork(2)
            inner += zipage.gen("x")
            outer.cancel("all of it")
            return [branch.error().reason for branch in inner]

        backend = ScriptedBackend(Reply("x", gate=new_future()))
        assert run(body, backend).ret_value == ["all of it"] * 2
        assert backend.num_running == 0

    def test_cancelling_all_leaves_those_that_ended_as_they_are(self):
        gates = [new_future() for _ in range(3)]
        gates[0].set_result(None)

        def body(s):
            branches = s.fork(3)
            branches += lambda i: f"{i}" + zipage.gen("x")
            first = next(branches.as_completed())
            branches.cancel(reason="enough")
            branches.join(on_error="drop")
            return first.error(), s["x"]

        assert run(body, ScriptedBackend(by_last_digit(gates))).ret_value == (None, ["r0"])

    def test_the_run_itself_goes_on(self):
        def body(s):
            s += "Q"
            (branch,) = s.fork(1)
            branch += zipage.gen("x")
            branch.cancel()
            branch.sync()
            gate.set_result(None)
            s += zipage.gen("y")
            return s["y"]

        gate = new_future()
        assert run(body, ScriptedBackend(Reply("fine", gate=gate))).ret_value == "fine"


class TestMany:
    def many(self, use):
        """2,000 branches whose calls all run and wait; `use(branches, backend)` on the loop."""
        all_here = new_future()
        gate = new_future()

        def reply(call):
            if len(backend.calls) == NUM_MANY:
                all_here.set_result(None)
            return Reply("ab", gate=gate)

        @zipage.function
        async def program(s):
            s += "one prompt"
            branches = s.fork(NUM_MANY)
            branches += zipage.gen("x", max_tokens=2)
            await asyncio.wrap_future(all_here)
            used = await use(branches)
            gate.set_result(None)
            await branches.join(on_error="drop")
            return used, len(await s["x"])

        backend = StatefulBackend(reply)
        threads = threading.active_count()
        result = program.run(backend=backend).ret_value
        assert threading.active_count() <= threads + 1  # the one shared loop
        assert backend.held == {}
        return result

    def test_a_live_branch_takes_a_bounded_amount_of_memory(self):
        async def use(branches):
            return tracemalloc.get_traced_memory()[0], len(asyncio.all_tasks())

        gc.collect()
        tracemalloc.start()
        try:
            (num_bytes, num_tasks), num_values = self.many(use)
        finally:
            tracemalloc.stop()
        assert num_values == NUM_MANY
        assert num_bytes / NUM_MANY < MAX_BYTES_PER_BRANCH
        assert num_tasks <= NUM_MANY + 5  # one each

    def test_cancelling_one_of_many_takes_a_few_turns_of_the_loop(self):
        async def use(branches):
            num_loops = 0
            branches[7].cancel("this one")
            reading = asyncio.ensure_future(branches[7].error())
            while not reading.done():
                await asyncio.sleep(0)
                num_loops += 1
            return num_loops

        num_loops, num_values = self.many(use)
        assert num_loops <= MAX_LOOPS_TO_CANCEL
        assert num_values == NUM_MANY - 1

    def test_all_can_be_cancelled_at_once(self):
        async def use(branches):
            branches.cancel(branches.states[1:], reason="one stays")
            await branches[NUM_MANY - 1].sync()

        assert self.many(use)[1] == 1
