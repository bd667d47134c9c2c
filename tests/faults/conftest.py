"""What the fault tests share: servers and clients as processes that may be killed or stopped.

Knows nothing of which fault a test makes.
"""

import ast
import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from zipage_lang.frontend.async_llm import AsyncLLM
from zipage_lang.runtime.config import EngineConfig

TESTS = Path(__file__).parent.parent
SCRIPT = TESTS / "frontend" / "scripted_engine.py"
SERVER = TESTS / "server" / "server_program.py"
LIMIT_S = 90  # for anything to happen, on a machine that has much else to do
REASONER = {
    "model": "zipage-tiny-reasoner",
    "num_threads": 1,
    "kv_cache_memory": 0.1,
    "swap_space": 0.01,
}


@pytest.fixture(scope="session")
def reasoner_folder():
    """The bundled model's folder."""
    import zipage_lang

    return Path(zipage_lang.__file__).parent / "data" / "zipage-tiny-reasoner"


@pytest.fixture(scope="session")
def command(reasoner_folder):
    """Starts the scripted engine; its tokenizer is the tiny reasoner's."""
    return [sys.executable, str(SCRIPT), str(reasoner_folder)]


@pytest.fixture(scope="session")
def is_over():
    """Whether a process has ended. A zombie has: an orphan's end may be waited for by nobody."""

    def check(process):
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return check


class Program:
    """A process whose output is read as it comes; `lines` is all so far, stderr included."""

    def __init__(self, arguments, **options):
        self.lines = []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
        self.process = subprocess.Popen(
            [sys.executable, "-P", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            **options,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self):
        return self.process.pid

    @property
    def engine(self):
        """The engine's process; None while there is none."""
        engines = psutil.Process(self.pid).children()
        return engines[0] if engines else None

    def wait_for_line(self, pattern, after=0):
        """The first match in the lines behind `after`."""
        given_up_at = time.monotonic() + LIMIT_S
        while time.monotonic() < given_up_at:
            for line in self.lines[after:]:
                found = re.search(pattern, line)
                if found:
                    return found
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.01)
        raise AssertionError(f"no line {pattern!r} in:\n{''.join(self.lines)}")

    def signal(self, number):
        self.process.send_signal(number)

    def close(self):
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)

    def _read(self):
        with self.process.stdout as pipe:
            for line in pipe:
                self.lines.append(line)


@pytest.fixture
def start_program():
    """Starts Python with these arguments; ended behind the test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments, **options):
            program = Program(arguments, **options)
            stack.callback(program.close)
            return program

        yield start


class Server:
    """A server's process, and where it listens."""

    def __init__(self, program):
        self.program = program
        self.url = program.wait_for_line(r"listening on (http://\S+);").group(1)

    def __getattr__(self, name):
        return getattr(self.program, name)

    @property
    def port(self):
        return int(self.url.rpartition(":")[2])

    def wait_ready(self):
        self.wait_for_line(r"ready: \S+ at http")
        return self


def server_arguments(options, command, engine):
    """Of Python, for a server program."""
    arguments = ({"port": 0, **options}, command, engine)
    assert all(ast.literal_eval(repr(argument)) == argument for argument in arguments)
    return str(SERVER), *map(repr, arguments)


@pytest.fixture
def start_server(start_program, command):
    """Starts servers: `engine` options, or None for the scripted engine; ServerConfig fields."""

    def start(engine=None, *, engine_command=None, **options):
        own_command = engine_command or (command if engine is None else None)
        return Server(start_program(*server_arguments(options, own_command, engine or {})))

    return start


@pytest.fixture(scope="module")
def lasting_server(command):
    """In front of the scripted engine; tests leave it alive, and running."""
    program = Program(server_arguments({"engine_timeout": 60}, command, {}))
    with contextlib.closing(program):
        yield Server(program).wait_ready()


@pytest.fixture(scope="session")
def reasoner_options():
    """Options of a small real engine."""
    return REASONER


@pytest.fixture
def with_llm(command):
    """Runs `await use(llm)` on a fresh engine, scripted or real, and closes it."""

    def run(use, engine=None, **options):
        async def work():
            config = EngineConfig.from_options(**(engine or {}))
            own_command = command if engine is None else None
            async with await AsyncLLM.start(config, command=own_command, **options) as llm:
                return await use(llm)

        return asyncio.run(asyncio.wait_for(work(), LIMIT_S))

    return run
