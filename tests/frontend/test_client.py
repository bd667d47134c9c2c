"""The client against a scripted engine process: tokens only. Knows nothing of text."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zipage_lang.frontend.client import EngineClient
from zipage_lang.frontend.errors import EngineClosedError, EngineDiedError, EngineStartError
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.messages import AddRequest, Fork, Stop
from zipage_lang.runtime.sampling_params import SamplingParams


def request(token_ids, request_id="r", **sampling):
    return AddRequest(
        request_id=request_id, token_ids=token_ids, sampling=SamplingParams(**sampling)
    )


async def tokens_of(stream):
    return [token_id async for output in stream for token_id in output.token_ids]


def config(model):
    return EngineConfig.from_options(model=model)


def is_running(pid):
    """False for a process that has ended, whether or not somebody has taken note of it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def running_children():
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split() if is_running(pid)}


def test_ready_tells_what_the_engine_is(with_client, script):
    async def use(client):
        return client.ready

    assert with_client(use).max_model_len == script.MAX_MODEL_LEN


def test_outputs_come_in_order_and_end_with_one_final(with_client, script):
    async def use(client):
        return [output async for output in client.add(request([5, 6, 7]))]

    outputs = with_client(use)
    assert [output.token_ids for output in outputs] == [[5], [6], [7], [script.EOS]]
    assert [output.is_final for output in outputs] == [False, False, False, True]


def test_samples_and_requests_do_not_mix(with_client, script):
    async def use(client):
        streams = [client.add(request([10 + i] * 5, f"r{i}", n=2)) for i in range(20)]
        return await asyncio.gather(*map(tokens_of, streams))

    for index, tokens in enumerate(with_client(use)):
        assert sorted(tokens) == [script.EOS] * 2 + [10 + index] * 10


def test_a_request_id_in_use_is_refused(with_client, script):
    async def use(client):
        client.add(request([script.STALL]))
        with pytest.raises(ValueError, match="request_id='r' is in use"):
            client.add(request([1]))

    with_client(use)


def test_a_request_over_the_message_limit_is_refused_at_once(with_client):
    async def use(client):
        with pytest.raises(ValueError, match="over the limit of"):
            client.add(request([2**40] * 8_000_000))
        return await tokens_of(client.add(request([5])))

    assert with_client(use) == [5, 0]


def test_fork_gives_a_stream_per_child(with_client):
    async def use(client):
        children = [request([3], "a"), request([4], "b")]
        streams = client.fork(Fork(parent_id="p", children=children))
        tokens = [await tokens_of(stream) for stream in streams]
        return tokens, await client.stats()

    tokens, stats = with_client(use)
    assert tokens == [[3, 0], [4, 0]]
    assert stats["last_parent"] == "p"


def test_stop_ends_a_sample_with_a_final_output(with_client, script):
    async def use(client):
        stream = client.add(request([script.SLOW, 5], max_tokens=10_000))
        first = await anext(stream)
        client.stop(Stop(request_id="r", sample_index=0, num_output_tokens=1))
        *_, last = [output async for output in stream]
        return first, last

    first, last = with_client(use)
    assert not first.is_final
    assert last.finish_reason == "stop"
    assert last.usage.completion_tokens == 1


def test_abort_by_id_and_by_group_ends_the_streams(with_client, script):
    async def use(client):
        by_id = client.add(request([script.SLOW, 5], "a", max_tokens=10_000))
        grouped = AddRequest(
            request_id="b",
            token_ids=[script.SLOW, 5],
            sampling=SamplingParams(max_tokens=10_000),
            group_id="g",
        )
        by_group = client.add(grouped)
        client.abort(["a"], ["g"])
        return [[output async for output in stream][-1] for stream in (by_id, by_group)]

    assert [output.finish_reason for output in with_client(use)] == ["abort", "abort"]


def test_closing_a_stream_early_aborts_the_request(with_client, script):
    async def use(client):
        stream = client.add(request([script.SLOW, 5], max_tokens=10_000))
        await anext(stream)
        stream.close()
        stream.close()
        return await client.stats()

    stats = with_client(use)
    assert stats["Abort"] == 1
    assert stats["running"] == 0


def test_closing_an_ended_stream_tells_the_engine_nothing(with_client):
    async def use(client):
        stream = client.add(request([5]))
        await tokens_of(stream)
        stream.close()
        return await client.stats()

    assert "Abort" not in with_client(use)


def test_release_and_flush_reach_the_engine(with_client):
    async def use(client):
        client.release(["a", "b"])
        return await client.flush_cache()

    stats = with_client(use)
    assert stats["last_released"] == "a,b"
    assert stats["FlushCache"] == 1


def test_malformed_engine_messages_are_counted_and_dropped(with_client, script):
    async def use(client):
        tokens = await tokens_of(client.add(request([script.GARBAGE, 5, 6])))
        return tokens, client.num_malformed

    tokens, num_malformed = with_client(use)
    assert tokens == [5, 6, script.EOS]
    assert num_malformed == 3


@pytest.mark.parametrize(
    ("opcode", "reason"),
    [
        ("EXIT", r"exit code 7; its last lines:\n.*the card fell out"),
        ("KILL", "signal SIGKILL"),
        ("FAIL", "out of memory; lower num_blocks"),
    ],
)
def test_a_dead_engine_fails_every_waiting_call_within_a_second(
    with_client, script, opcode, reason
):
    async def use(client):
        waiting = [client.add(request([script.STALL], f"r{i}")) for i in range(5)]
        calls = [asyncio.ensure_future(tokens_of(stream)) for stream in waiting]
        await asyncio.sleep(0)
        client.add(request([getattr(script, opcode), 5], "last"))
        await client._link.wait_end()
        done, pending = await asyncio.wait(calls, timeout=1.0)
        assert len(done) == 5
        assert not pending
        for call in calls:
            with pytest.raises(EngineDiedError, match=reason) as caught:
                call.result()
            assert caught.value.retryable
        with pytest.raises(EngineDiedError, match=reason):
            client.add(request([1], "later"))
        with pytest.raises(EngineDiedError, match=reason):
            await client.stats()

    with_client(use)


def test_killing_the_engine_fails_a_waiting_stats_call(with_client):
    async def use(client):
        os.kill(client.pid, signal.SIGSTOP)
        call = asyncio.ensure_future(client.stats())
        await asyncio.sleep(0.05)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="SIGKILL"):
            await asyncio.wait_for(call, 1.0)

    with_client(use)


def test_what_the_engine_sent_before_its_end_still_arrives(with_client, script):
    async def use(client):
        return await tokens_of(client.add(request([script.LAST_WORDS])))

    assert with_client(use) == [5]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("fails", "model 'fails' is not known; try smollm2-135m"),
        ("crashes", r"exit code 3; its last lines:\n.*Segmentation fault in weights"),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_nothing_behind(
    command, tmp_path, monkeypatch, model, reason
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(EngineStartError, match=reason):
        asyncio.run(EngineClient.start(config(model), command=command))
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_takes_too_long_is_given_up(command):
    before = running_children()
    with pytest.raises(EngineStartError, match=r"not ready in 0\.5 s"):
        asyncio.run(EngineClient.start(config("silent"), command=command, start_timeout_s=0.5))
    assert running_children() <= before


def test_a_command_that_does_not_exist_is_a_start_error():
    with pytest.raises(EngineStartError, match="could not be started"):
        asyncio.run(EngineClient.start(EngineConfig(), command=["/no/such/program"]))


def test_close_ends_process_and_folder_and_may_be_repeated(command, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def work():
        starting = asyncio.ensure_future(EngineClient.start(EngineConfig(), command=command))
        await asyncio.sleep(0)
        (folder,) = tmp_path.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        client = await starting
        await asyncio.gather(client.close(), client.close())
        await client.close()
        return client

    client = asyncio.run(work())
    assert not is_running(client.pid)
    assert list(tmp_path.iterdir()) == []


def test_a_long_temporary_path_does_not_break_the_sockets(command, tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))

    async def work():
        client = await EngineClient.start(EngineConfig(), command=command)
        tokens = await tokens_of(client.add(request([5])))
        await client.close()
        return tokens

    assert asyncio.run(work()) == [5, 0]
    assert list(deep.iterdir()) == []


def test_a_closed_client_fails_what_waits_and_what_comes(with_client, script):
    async def use(client):
        waiting = asyncio.ensure_future(tokens_of(client.add(request([script.STALL]))))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(EngineClosedError, match="start a new one"):
            await waiting
        with pytest.raises(EngineClosedError, match="start a new one"):
            client.add(request([1], "later"))

    with_client(use)


def test_an_engine_that_ignores_shutdown_is_killed(command, script, monkeypatch):
    monkeypatch.setattr("zipage_lang.frontend.client.SHUTDOWN_GRACE_S", 0.3)

    async def work():
        client = await EngineClient.start(EngineConfig(), command=command)
        await tokens_of(client.add(request([script.STUBBORN, 5])))
        await client.close()
        return client

    assert not is_running(asyncio.run(work()).pid)


LEAVE_OPEN = """
import asyncio, sys
from zipage_lang.frontend.client import EngineClient
from zipage_lang.runtime.config import EngineConfig

async def work():
    client = await EngineClient.start(EngineConfig(), command=sys.argv[1:])
    print(client.pid, client._link._sockets.folder, flush=True)
    return client

client = asyncio.run(work())
"""


def test_an_interpreter_that_just_ends_leaves_no_process_and_no_folder(command):
    done = subprocess.run(
        [sys.executable, "-P", "-c", LEAVE_OPEN, *command],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    pid, folder = done.stdout.split()
    deadline = time.monotonic() + 5
    while is_running(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(int(pid))
    assert not Path(folder).exists()
    assert done.stderr == ""
