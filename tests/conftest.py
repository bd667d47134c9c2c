"""Makes `tests/support/` importable as `test_support`; shares the one real model among the rooms.

importlib mode keeps the tests' folders off sys.path, so the package is entered by hand, once.
Knows nothing of what the helpers do.
"""

import pathlib
import sys
import types

import pytest

_support = types.ModuleType("test_support")
_support.__path__ = [str(pathlib.Path(__file__).parent / "support")]
sys.modules.setdefault("test_support", _support)


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
