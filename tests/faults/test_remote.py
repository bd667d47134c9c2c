"""An engine joined over TCP: CURVE keys or nothing, one client at a time, no trace of who left."""

import asyncio
import re
import signal
import stat
import threading

import pytest
import zmq

from zipage_lang.frontend import remote_link
from zipage_lang.frontend.async_llm import AsyncLLM
from zipage_lang.frontend.client import EngineClient
from zipage_lang.frontend.errors import EngineDiedError, EngineStartError
from zipage_lang.runtime import curve_keys, messages
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.curve_keys import make_keys, read_client_keys, read_engine_keys
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.engine_process import EngineProcess
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.remote_line import RemoteLine
from zipage_lang.runtime.sampling_params import SamplingParams

PROBE = [5, 9, 12, 7]
SHORT = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LONG = SHORT.replace(max_tokens=300)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """The folders of an engine and of its client."""
    return make_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def engine():
    options = {"num_blocks": 120, "max_running": 4, "swap_space": 0.01, "num_threads": 1}
    return Engine(EngineConfig.from_options(model="zipage-tiny-reasoner", **options))


@pytest.fixture
def serve(engine, keys):
    """Runs `await use(address)` while the engine listens in a thread."""

    def run(use, lease_s=60.0):
        line = RemoteLine("tcp://127.0.0.1:0", str(keys[0]), lease_s=lease_s)
        process = EngineProcess(engine, line)
        thread = threading.Thread(target=process.run, daemon=True)
        thread.start()
        try:
            return asyncio.run(asyncio.wait_for(use(line.address), 90))
        finally:
            process.stop()
            thread.join(30)
            assert not thread.is_alive()
            line.close()
            engine.forget_all()
            engine.scheduler.check_invariants()

    return run


async def tokens_of(client, request_id="probe", sampling=SHORT):
    request = AddRequest(request_id=request_id, token_ids=PROBE, sampling=sampling)
    return [token async for output in client.add(request) for token in output.token_ids]


def test_clients_come_and_go_and_the_engine_stays(serve, keys):
    async def use(address):
        tokens = []
        for _ in range(3):
            client = await EngineClient.connect(address, keys[1])
            tokens.append(await tokens_of(client))
            await client.close()
        return tokens

    first, *others = serve(use)
    assert len(first) == 8
    assert others == [first, first]


def test_text_goes_both_ways_with_the_models_own_tokenizer(serve, keys):
    async def use(address):
        async with await AsyncLLM.connect(address, keys[1]) as llm:
            (output,) = await llm.complete("Q: 1+1=?\n", SHORT)
            return output

    assert len(serve(use).text) > 0


def test_a_second_client_is_refused_and_the_first_goes_on(serve, keys):
    async def use(address):
        first = await EngineClient.connect(address, keys[1])
        call = asyncio.ensure_future(tokens_of(first, sampling=LONG))
        with pytest.raises(EngineStartError, match="has a client already"):
            await EngineClient.connect(address, keys[1])
        tokens = await call
        await first.close()
        return tokens

    assert len(serve(use)) == 300


def test_an_unknown_key_is_not_let_in(serve, tmp_path, keys):
    """The stranger knows the engine's public key, but is not in its list."""
    stranger = make_keys(tmp_path)[1]
    (stranger / "engine.key").write_bytes((keys[1] / "engine.key").read_bytes())

    async def use(address):
        with pytest.raises(EngineStartError, match="refuses the keys in"):
            await EngineClient.connect(address, stranger)
        client = await EngineClient.connect(address, keys[1])
        tokens = await tokens_of(client)
        await client.close()
        return tokens

    assert len(serve(use)) == 8


def test_a_false_engine_is_not_talked_to(serve, tmp_path, keys, monkeypatch):
    """Who listens there does not have the key that the client was given."""
    monkeypatch.setattr(remote_link, "CONNECT_TIMEOUT_S", 2.0)
    _, client_folder = make_keys(tmp_path)

    async def use(address):
        with pytest.raises(EngineStartError, match=r"its key is not the one in|refuses the keys"):
            await EngineClient.connect(address, client_folder)

    serve(use)


def test_plain_tcp_is_not_spoken(serve, keys):
    """A socket without CURVE gets no word out of the engine, and hinders nobody."""

    async def use(address):
        context = zmq.Context()
        plain = context.socket(zmq.DEALER)
        plain.connect(address)
        for _ in range(1000):
            plain.send(messages.encode(messages.Hello()))
        assert not plain.poll(500)
        client = await EngineClient.connect(address, keys[1])
        tokens = await tokens_of(client)
        await client.close()
        context.destroy(0)
        return tokens

    assert len(serve(use)) == 8


@pytest.mark.parametrize("address", ["tcp://nohost", "http://a:1", "tcp://:1", "tcp://h:99999", ""])
def test_an_address_that_is_none_is_refused(address, keys):
    with pytest.raises(ValueError, match="must be tcp://host:port"):
        RemoteLine(address, str(keys[0]))
    with pytest.raises(ValueError, match="must be tcp://host:port"):
        remote_link.RemoteLink(address, keys[1])


def test_a_client_without_keys_is_told_that_plain_tcp_is_not_spoken():
    with pytest.raises(ValueError, match="needs CURVE keys: plain TCP is not spoken"):
        remote_link.RemoteLink("tcp://127.0.0.1:1", None)


def test_nobody_there_is_an_error_in_bounded_time(keys, monkeypatch):
    monkeypatch.setattr(remote_link, "CONNECT_TIMEOUT_S", 0.3)
    with pytest.raises(EngineStartError, match="nothing answers at tcp://127"):
        asyncio.run(asyncio.wait_for(EngineClient.connect("tcp://127.0.0.1:9", keys[1]), 60))


def test_what_a_vanished_client_held_is_given_up_within_its_lease(serve, engine, keys):
    """It holds a state and sends nothing: no connection breaks, nothing is heard of it."""

    async def use(address):
        context = zmq.Context()
        silent = _plain_client(context, address, keys[1])
        silent.send(messages.encode(messages.Hello()))
        assert isinstance(_next(silent), messages.Ready)
        held = AddRequest(request_id="kept", token_ids=PROBE, sampling=SHORT, hold=True)
        silent.send(messages.encode(held))
        while not getattr(_next(silent), "items", [None])[-1].is_final:
            pass
        assert engine.scheduler.held_ids == ["kept"]
        while engine.scheduler.held_ids:
            await asyncio.sleep(0.02)
        silent.send(messages.encode(held))
        assert "let go of this client" in _next(silent).error
        context.destroy(0)
        client = await EngineClient.connect(address, keys[1])
        await client.close()

    serve(use, lease_s=1.0)


def test_the_next_client_hears_nothing_of_the_ones_before(serve, engine, keys):
    """Their ids may be the same: neither tokens nor ends of the first may reach the second."""

    async def use(address):
        context = zmq.Context()
        first = _plain_client(context, address, keys[1])
        first.send(messages.encode(messages.Hello()))
        assert isinstance(_next(first), messages.Ready)
        num_aborted = engine.stats()["num_aborted"]
        endless = AddRequest(request_id="probe", token_ids=PROBE, sampling=LONG)
        first.send(messages.encode(endless))
        _next(first)
        context.destroy(0)  # the connection breaks while it runs
        while engine.has_work:
            await asyncio.sleep(0.01)
        assert engine.stats()["num_aborted"] == num_aborted + 1
        client = await EngineClient.connect(address, keys[1])
        tokens = await tokens_of(client)
        stats = await client.stats()
        await client.close()
        return tokens, stats

    tokens, stats = serve(use)
    assert len(tokens) == 8
    assert stats["num_running"] == 0


def _plain_client(context, address, folder):
    """A client's socket with keys, but nothing that asks for signs of life."""
    keys = read_client_keys(folder)
    socket = context.socket(zmq.DEALER)
    socket.curve_serverkey = keys.engine
    socket.curve_publickey, socket.curve_secretkey = keys.own.public, keys.own.secret
    socket.connect(address)
    return socket


def _next(socket):
    assert socket.poll(60_000), "the engine is silent"
    return messages.decode_for_client(socket.recv())


def test_a_killed_remote_engine_fails_all_its_callers_at_once(start_program, keys):
    start = "from zipage_lang.cli import main; main()"
    program = start_program(
        "-c", start, "engine", "run", "zipage-tiny-reasoner", "--listen", "tcp://127.0.0.1:0",
        "--keys", str(keys[0]), "--num-threads", "1", "--kv-cache-memory", "0.05",
    )  # fmt: skip
    address = program.wait_for_line(r"ready at (\S+)").group(1)

    async def use():
        client = await EngineClient.connect(address, keys[1])
        calls = [asyncio.ensure_future(tokens_of(client, str(i), LONG)) for i in range(3)]
        while (await client.stats())["num_running"] != 3:
            await asyncio.sleep(0.01)
        program.signal(signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
        await client.close()
        return results

    results = asyncio.run(use())
    assert [type(result) for result in results] == [EngineDiedError] * 3
    assert re.search("the connection to tcp://.* broke", str(results[0]))


def test_secret_keys_that_others_may_read_are_refused(tmp_path):
    engine_folder, client_folder = make_keys(tmp_path)
    for secret, read in (
        (engine_folder / "engine.key_secret", lambda: read_engine_keys(engine_folder)),
        (client_folder / "client.key_secret", lambda: read_client_keys(client_folder)),
    ):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        read()
        secret.chmod(0o640)
        with pytest.raises(ValueError, match=r"may be read by others .*chmod 600"):
            read()


def test_key_folders_are_private_and_are_not_written_over(tmp_path):
    for folder in make_keys(tmp_path):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with pytest.raises(ValueError, match="is there already"):
        make_keys(tmp_path)


def test_broken_and_missing_key_files_are_named(tmp_path):
    engine_folder, client_folder = make_keys(tmp_path)
    (client_folder / "engine.key").write_text("no key")
    with pytest.raises(ValueError, match=r"engine\.key is no file of CURVE keys"):
        read_client_keys(client_folder)
    (engine_folder / "clients" / "client.key").unlink()
    with pytest.raises(ValueError, match="nobody could connect"):
        read_engine_keys(engine_folder)


def test_secret_keys_are_not_shown(keys):
    secret = read_engine_keys(keys[0]).own.secret
    assert secret.decode() not in repr(read_engine_keys(keys[0]))


def test_a_machine_without_curve_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(curve_keys.zmq, "has", lambda name: False)
    with pytest.raises(ValueError, match=r"without CURVE \(libsodium\)"):
        make_keys(tmp_path)


def test_the_command_line_makes_keys_and_refuses_to_listen_without(tmp_path):
    from typer.testing import CliRunner

    from zipage_lang.cli import app

    made = CliRunner().invoke(app, ["engine", "keys", str(tmp_path)])
    assert made.exit_code == 0
    assert read_client_keys(tmp_path / "client").engine
    refused = CliRunner().invoke(
        app, ["engine", "run", "zipage-tiny-reasoner", "--listen", "tcp://127.0.0.1:0"]
    )
    assert refused.exit_code == 2
    assert "without keys is refused" in refused.stderr
