"""Rooms stay apart where it is cheap to prove: torch-free files load without torch."""

import subprocess
import sys

import pytest

TORCH_FREE = [
    "zipage_lang",
    "zipage_lang.program",
    "zipage_lang.cli",
    "zipage_lang.evaluation.families",
    "zipage_lang.frontend.llm",
    "zipage_lang.server.app",
    "zipage_lang.server.run",
    "zipage_lang.runtime.scheduler",
    "zipage_lang.runtime.messages",
    "zipage_lang.runtime.model_shapes",
    "zipage_lang.runtime.model_store",
    "zipage_lang.radix_cache.prefix_cache",
]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_module_loads_without_torch(module):
    code = f"import {module}, sys; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]


def test_the_kernels_folder_is_not_importable_under_its_bare_name():
    code = "import importlib.util as u; print(u.find_spec('kernels'), u.find_spec('runtime'))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["None", "None"]
