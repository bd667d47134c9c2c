"""What the clients' tests share: real servers on loopback, each in a process of its own.

Knows nothing of any client.
"""

import contextlib
import importlib.util
import os
import sys
import types
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
BENCHMARKS = TESTS.parent / "benchmarks"
API_KEY = "a-key-of-ours"
MODEL = "smollm2-135m"

# Clients fetch price lists and send traces unless told; they read these when imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LANGSMITH_TRACING"] = "false"


def load_benchmark(name):
    """A file of benchmarks/ as a module; they import each other by these names."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def benchmark_file():
    """Loads a file of benchmarks/ by its name."""
    return load_benchmark


@pytest.fixture(scope="session")
def served(smollm2):
    """`zipage serve smollm2-135m`, which asks for a key. Tests leave it alive and idle."""
    servers = load_benchmark("server_process")
    command = servers.serve_command(
        MODEL,
        api_key=API_KEY,
        max_model_len=1024,
        kv_cache_memory=0.2,
        num_threads=1,
        max_running=8,
        drain_timeout=2,
    )
    with servers.ServerProcess(command, api_key=API_KEY) as server:
        yield server.wait_ready()


@pytest.fixture(scope="session")
def access(served):
    """How to reach the model: `url` (with /v1), `key`, `model`."""
    return types.SimpleNamespace(url=f"{served.url}/v1", key=API_KEY, model=MODEL)


@pytest.fixture(scope="module")
def scripted():
    """Starts servers in front of the scripted engine, with these ServerConfig fields."""
    import zipage_lang

    servers = load_benchmark("server_process")
    model = Path(zipage_lang.__file__).parent / "data" / "zipage-tiny-reasoner"
    engine = [sys.executable, str(TESTS / "frontend" / "scripted_engine.py"), str(model)]
    program = str(TESTS / "server" / "server_program.py")
    with contextlib.ExitStack() as stack:

        def start(**options):
            arguments = [repr({"port": 0, **options}), repr(engine), "{}"]
            command = [sys.executable, "-P", program, *arguments]
            return stack.enter_context(servers.ServerProcess(command)).wait_ready()

        yield start
