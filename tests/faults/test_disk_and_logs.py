"""Disks that are full or can't be written, logs that nobody reads: the work goes on."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile

import httpx2
import pytest

import zipage_lang as zipage
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.testing import ScriptedBackend
from zipage_lang.trace_reader import read_trace

IS_ROOT = os.geteuid() == 0
GREEDY = SamplingParams(max_tokens=6, temperature=0)


@contextlib.contextmanager
def mounted(folder, *options):
    """A file system of its own there; skips the test where that is not allowed."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"can't mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@zipage.function
def talk(s):
    for index in range(30):
        s += zipage.user("question " + "x" * 200)
        s += zipage.assistant(zipage.gen(f"answer{index}", max_tokens=4))


@pytest.mark.skipif(not IS_ROOT, reason="only root may mount a small disk")
def test_a_trace_on_a_disk_that_fills_up_ends_readable_with_one_warning(tmp_path, caplog):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=64k", "tmpfs") as disk:
        file = disk / "trace.jsonl"
        texts = []
        for _ in range(12):
            state = talk.run(backend=ScriptedBackend("abc"), trace=file)
            texts.append(state["answer29"])
        assert file.stat().st_size >= 60_000, "the disk was filled"
        tree = read_trace(file)
        size = file.stat().st_size
    assert len(set(texts)) == 1
    assert texts[0]
    assert 1 <= len(tree.runs) < 12
    assert len(tree.bad_lines) <= 1, "at most the last line is torn"
    warnings = [r.getMessage() for r in caplog.records if "ends early" in r.getMessage()]
    assert warnings
    assert all("No space left on device; the run goes on" in line for line in warnings)
    assert size <= 64 * 1024


@pytest.mark.skipif(not IS_ROOT, reason="only root may mount a read-only folder")
def test_a_model_and_a_cache_that_can_only_be_read_do_for_an_engine(
    tmp_path, with_llm, reasoner_options, reasoner_folder, monkeypatch
):
    """A policy that wants a forecast looks for one in all these places."""

    async def use(llm):
        kv = zipage.KV(mode="fixed", budget=16, interval=16, policy="zipage2")
        long = GREEDY.replace(max_tokens=60, ignore_eos=True)
        (output,) = await llm.complete("Q: 1+1=?\n", long, kv=kv)
        return output.token_ids

    right = with_llm(use, reasoner_options)
    model = tmp_path / "model"
    source = str(reasoner_folder.resolve())
    with (
        mounted(tmp_path / "cache", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs") as cache,
        mounted(model, "--bind", "-o", "ro", source),
    ):
        monkeypatch.setenv("ZIPAGE_HOME", str(cache))
        assert with_llm(use, {**reasoner_options, "model": str(model)}) == right


@pytest.mark.slow
def test_a_cache_folder_that_does_not_exist_does_for_an_engine(
    tmp_path, with_llm, reasoner_options, monkeypatch
):
    monkeypatch.setenv("ZIPAGE_HOME", str(tmp_path / "no" / "such" / "folder"))

    async def use(llm):
        return await llm.complete("Q: 1+1=?\n", GREEDY)

    assert with_llm(use, reasoner_options)[0].token_ids


def closed_stderr():
    """In the child: its standard error is no file at all."""
    os.close(2)


def test_an_engine_whose_log_is_a_broken_pipe_goes_on(with_llm, script, monkeypatch):
    """What the engine says is passed on to our stderr, which nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    broken = os.fdopen(writer, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", broken)

    async def use(llm):
        return await llm.complete([30, 31])

    outputs = with_llm(use)
    assert outputs[0].token_ids[:2] == [30, 31]
    with contextlib.suppress(OSError):
        broken.close()


@pytest.mark.parametrize("log_format", [pytest.param("text", marks=pytest.mark.slow), "json"])
def test_a_server_goes_on_when_nobody_reads_its_log(start_silent_server, log_format):
    """Its stderr is a pipe whose reader has gone, as behind `| head`."""
    url = start_silent_server(log_format)
    for _ in range(20):
        answer = httpx2.post(f"{url}/generate", json={"input_ids": [30, 31]}, timeout=60)
        assert answer.json()["output_ids"][:2] == [30, 31]
    assert httpx2.get(f"{url}/health").status_code == 200


def test_a_server_starts_with_no_standard_error_at_all(start_silent_server):
    url = start_silent_server("text", preexec_fn=closed_stderr)
    answer = httpx2.post(f"{url}/generate", json={"input_ids": [30]}, timeout=60)
    assert answer.json()["output_ids"][0] == 30
    assert httpx2.get(f"{url}/nowhere").status_code == 404


SILENT_SERVER = """
import ast, sys
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.server.config import ServerConfig
from zipage_lang.server.run import serve

command, options = map(ast.literal_eval, sys.argv[1:])
serve(EngineConfig(), ServerConfig(**options), engine_command=command)
"""


@pytest.fixture
def start_silent_server(command, until):
    """Starts a server that logs every request to nobody; where it listens, once it is ready."""
    started = []

    def is_ready(url):
        try:
            return httpx2.get(f"{url}/ready", timeout=5).status_code == 200
        except httpx2.TransportError:
            return False

    def start(log_format, **options):
        port = free_port()
        server = {"port": port, "log_format": log_format, "log_requests": True}
        reader, writer = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", SILENT_SERVER, repr(command), repr(server)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=writer,
            **options,
        )
        os.close(writer)
        os.close(reader)
        started.append(process)
        url = f"http://127.0.0.1:{port}"
        until(lambda: is_ready(url) or process.poll() is not None, "readiness")
        assert process.poll() is None, f"it ended with {process.returncode}"
        return url

    yield start
    for process in started:
        process.kill()
        process.wait()


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_the_folder_for_sockets_may_be_somewhere_that_is_full(with_llm, monkeypatch, tmp_path):
    """Making it fails with the reason, and leaves nothing."""
    monkeypatch.setattr(tempfile, "mkdtemp", _no_space)

    async def use(llm):
        return llm

    with pytest.raises(OSError, match="No space left"):
        with_llm(use)


def _no_space(**options):
    raise OSError(28, "No space left on device")
