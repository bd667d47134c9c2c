import asyncio
import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

import zipage_lang as zipage
from zipage_lang.testing import Reply, ScriptedBackend


@zipage.function
async def ask(s, question):
    s += question + zipage.gen("a")
    return (await s["a"]).upper()


@zipage.function
def ask_blocking(s, question):
    s += question + zipage.gen("a")
    return s["a"].upper()


def test_an_async_body_awaits_its_values_and_run_blocks():
    state = ask.run("why", backend=ScriptedBackend("so"))
    assert (state.ret_value, state["a"], state.text()) == ("SO", "so", "whyso")


@pytest.mark.parametrize("program", [ask, ask_blocking])
def test_run_async_works_from_any_loop_for_both_kinds_of_body(program):
    async def main():
        backend = ScriptedBackend("so")
        states = await asyncio.gather(*(program.run_async("why", backend=backend) for _ in "abc"))
        return [state.ret_value for state in states]

    assert asyncio.run(main()) == ["SO"] * 3


def test_async_bodies_have_every_read():
    @zipage.function
    async def program(s):
        s += zipage.user("q") + zipage.assistant(zipage.gen("a", max_tokens=2))
        with pytest.raises(KeyError):
            s["nothing"]
        assert (await s.meta("a")).finish_reason == "length"
        assert (await s.text()).endswith("so<|im_end|>\n")
        assert (await s.messages())[-1] == {"role": "assistant", "content": "so"}
        assert len(await s.token_ids()) > 10
        await s.sync()
        assert await s.error() is None
        return "".join([piece async for piece in s.text_async_iter("a")])

    assert program.run(backend=ScriptedBackend("so long")).ret_value == "so"


def test_async_branches_fork_join_and_stream():
    @zipage.function
    async def program(s):
        s += "p"
        branches = s.fork(2)
        branches += lambda i: f"{i}" + zipage.gen("v")
        heard = [delta.text async for delta in branches.deltas()]
        await branches.join()
        return heard, await branches["v"], await s["v"], await branches[1]["v"]

    heard, group, joined, one = program.run(backend=ScriptedBackend("x")).ret_value
    assert ("".join(heard), group, joined, one) == ("xx", ["x", "x"], ["x", "x"], "x")


def test_an_async_body_sees_the_real_error():
    @zipage.function
    async def program(s):
        s += zipage.gen("a")
        with pytest.raises(RuntimeError, match="no blocks"):
            await s["a"]
        branches = s.fork(2)
        with pytest.raises(RuntimeError, match="no blocks"):
            await branches.join()
        return "handled"

    assert program.run(backend=ScriptedBackend(RuntimeError("no blocks"))).ret_value == "handled"


def test_an_error_of_an_async_body_is_raised_by_run():
    @zipage.function
    async def program(s):
        raise ZeroDivisionError("in the body")

    with pytest.raises(ZeroDivisionError):
        program.run(backend=ScriptedBackend())


def test_async_programs_nest_when_awaited():
    @zipage.function
    async def outer(s):
        s += "first "
        return await ask(s, "why")

    @zipage.function
    def blocking_outer(s):
        ask(s, "why")

    state = outer.run(backend=ScriptedBackend("so"))
    assert (state.text(), state.ret_value) == ("first whyso", "SO")
    with pytest.raises(TypeError, match="both be async"):
        blocking_outer.run(backend=ScriptedBackend("so"))


def test_blocking_on_the_loops_own_thread_is_an_error_not_a_deadlock():
    backend = ScriptedBackend("so")

    @zipage.function
    async def program(s):
        with pytest.raises(zipage.LoopThreadError, match="run_async"):
            ask_blocking.run("why", backend=backend)
        with pytest.raises(zipage.LoopThreadError):
            ask.run("why", backend=backend)
        with pytest.raises(zipage.LoopThreadError):
            ask.run_batch([("why",)], backend=backend)
        inner = ask.run("why", backend=backend, stream=True)
        for read in (lambda: inner["a"], inner.text, inner.sync, lambda: next(inner.text_iter())):
            with pytest.raises(zipage.LoopThreadError):
                read()
        return (await ask.run_async("why", backend=backend)).ret_value

    assert program.run(backend=backend).ret_value == "SO"


def test_a_finished_state_can_be_read_on_the_loop():
    backend = ScriptedBackend("so")

    @zipage.function
    async def program(s):
        state = await ask.run_async("why", backend=backend)
        return state["a"]

    assert program.run(backend=backend).ret_value == "so"


def test_batches_of_async_bodies_use_no_threads_of_their_own():
    threads = set()

    @zipage.function
    async def program(s, q):
        s += q + zipage.gen("a")
        await s["a"]
        threads.add(threading.get_ident())

    backend = ScriptedBackend("so")
    states = program.run_batch([("q",)] * 200, backend=backend)
    assert [state["a"] for state in states] == ["so"] * 200
    assert len(threads) == 1


def test_two_thousand_live_branches_need_no_thread():
    counts = []

    @zipage.function
    def program(s):
        s += "q"
        branches = s.fork(2000)
        before = threading.active_count()
        branches += zipage.gen("v", max_tokens=2)
        counts.extend(threading.active_count() for d in branches.deltas() if d.branch == 1999)
        branches.join()
        return before, len(branches["v"])

    all_here = Future()

    def reply(call):
        if len(backend.calls) == 2000:
            all_here.set_result(None)
        return Reply("ab", gate=all_here)

    backend = ScriptedBackend(reply)
    before, num_values = program.run(backend=backend).ret_value
    assert num_values == 2000
    assert backend.max_running == 2000
    assert max(counts) == before


def test_cancelling_a_reader_does_not_cancel_the_call():
    @zipage.function
    async def program(s):
        s += zipage.gen("a")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(s["a"], 0.01)
        return await s["a"]

    backend = ScriptedBackend(Reply("ab", token_delay_s=0.05))
    assert program.run(backend=backend).ret_value == "ab"


def test_cancelling_run_async_aborts_its_requests():
    async def main():
        backend = ScriptedBackend(Reply("abc", token_delay_s=0.05))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ask.run_async("why", backend=backend), 0.08)
        while backend.num_running or not backend.aborted_groups:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_importing_the_package_loads_no_torch_and_none_of_its_own_modules():
    code = (
        "import sys, zipage_lang as z; "
        "assert [m for m in sys.modules if m.startswith('zipage_lang.')] == []; "
        "[getattr(z, name) for name in z.__all__]; z.testing; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = zipage.nothing_such
