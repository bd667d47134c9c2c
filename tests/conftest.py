"""Makes `tests/support/` importable as `test_support`; shares the one real model; test options.

importlib mode keeps the tests' folders off sys.path, so the package is entered by hand, once.
Tests that run side by side (`make test`) leave each other their cores: one thread each.
Knows nothing of what the helpers do.
"""

import importlib.util
import logging
import os
import pathlib
import re
import sys
import time
import types
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    import torch

# How long an example takes is the machine's affair; no test is about time.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

MEASURED = re.compile(
    r"tests/(radix_cache/test_(?!state_machine)|runtime/test_messages"
    r"|floods/test_fair_share\.py::test_(?!the_scheduler_keeps)"
    r"|runtime/test_scheduler_simulation\.py::test_(loads_that|random_loads|what_can|request_that)"
    r"|strict/test_strict_scheduler\.py::test_(an_early|adaptive)"
    r"|runtime/test_(scheduler|sampling_params|step_plan|snapshot|intake)\.py)"
)

_support = types.ModuleType("test_support")
_support.__path__ = [str(pathlib.Path(__file__).parent / "support")]
sys.modules.setdefault("test_support", _support)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
WAIT_LIMIT_S = 90  # for anything to happen, on a machine that has much else to do


@pytest.fixture(scope="session")
def until():
    """Waits for a condition; fails where it never comes."""

    def wait(condition, what="it"):
        given_up_at = time.monotonic() + WAIT_LIMIT_S
        while not condition():
            assert time.monotonic() < given_up_at, f"{what} did not happen in time"
            time.sleep(0.01)

    return wait


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fresh-seed",
        type=int,
        default=0,
        help="added to the seeds of kernel tests' inputs; 0 repeats the usual ones",
    )
    parser.addoption(
        "--soak-seconds", type=float, default=8.0, help="how long the soak goes on, at least"
    )


def pytest_configure() -> None:
    """Without a card Triton's kernels run in its interpreter, if told before any is defined."""
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --cov only the tests that MEASURED names are watched: it makes them three times slower.

    They are those of the deciding rooms but for the long random loads, which reach no more.
    """
    if config.pluginmanager.hasplugin("_cov"):
        for item in items:
            if not MEASURED.match(item.nodeid):
                item.add_marker(pytest.mark.no_cover)


def pytest_report_header(config: pytest.Config) -> str:
    return f"kernel inputs: --fresh-seed {config.getoption('--fresh-seed')}"


@pytest.fixture(autouse=True)
def logging_stays_as_it_was():
    """A handler left behind writes to a stream that is closed, into some later test's output."""
    before = list(logging.getLogger().handlers)
    yield
    left = [handler for handler in logging.getLogger().handlers if handler not in before]
    logging.getLogger().handlers = before
    assert not left, f"the root logger keeps {left}"


@pytest.fixture(scope="session")
def script() -> types.ModuleType:
    """The scripted engine's module, for its opcodes and limits."""
    path = pathlib.Path(__file__).parent / "frontend" / "scripted_engine.py"
    spec = importlib.util.spec_from_file_location("scripted_engine", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> "torch.device":
    """Where kernels run: Triton's interpreter, or the card."""
    import torch

    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled for the card here")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


@pytest.fixture(scope="session")
def smollm2() -> pathlib.Path:
    """The GGUF file in the model cache; `make` pulls it before the tests."""
    from zipage_lang.runtime.model_store import resolve_model

    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_reference(smollm2):
    """transformers' own reading of the same file, in float32; slow, so read once."""
    from test_support.smollm2 import reference_model

    return reference_model(smollm2)
