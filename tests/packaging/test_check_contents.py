"""packaging/check_contents.py finds what a wheel or an sdist lacks or has too much of.

Knows nothing of how archives are built; packaging/check_wheel.sh does that.
"""

import importlib.util
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checks():
    spec = importlib.util.spec_from_file_location(
        "check_contents", ROOT / "packaging" / "check_contents.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def good_wheel(checks):
    contents = dict.fromkeys(checks.package_files(ROOT).values(), b"")
    return contents | {"zipage_lang-1.dist-info/licenses/LICENSE": b""}


def test_a_whole_wheel_has_no_fault(checks, good_wheel):
    assert checks.wheel_faults(ROOT, good_wheel) == []


def test_a_wheel_without_a_room_or_the_weights_is_faulty(checks, good_wheel):
    weights = next(name for name in good_wheel if name.endswith(".safetensors"))
    for lacking in ("zipage_lang/runtime/scheduler.py", weights):
        contents = {name: data for name, data in good_wheel.items() if name != lacking}
        assert checks.wheel_faults(ROOT, contents) == [f"the wheel lacks {lacking}"]


def test_tests_and_doubled_weights_in_a_wheel_are_faults(checks, good_wheel):
    extra = {"tests/test_x.py": b"", "zipage_lang/tests/test_y.py": b""}
    assert len(checks.wheel_faults(ROOT, good_wheel | extra)) == 3
    large = bytes(checks.LARGE_BYTES)
    extra = {"zipage_lang/a.safetensors": large, "zipage_lang/b.safetensors": large}
    (fault,) = checks.wheel_faults(ROOT, good_wheel | extra)
    assert "the same bytes twice" in fault


def test_an_sdist_needs_what_it_is_built_from(checks):
    names = list(checks.package_files(ROOT))
    faults = checks.sdist_faults(ROOT, dict.fromkeys(names, b""))
    assert "the sdist lacks pyproject.toml" in faults
    assert "the sdist lacks LICENSE" in faults


def test_every_folder_with_code_is_a_package_of_the_project():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    rooms = {folder: name for name, folder in tools["package-dir"].items()}
    for folder, name in rooms.items():
        if "/" in folder:
            continue
        for path in (ROOT / folder).rglob("*.py"):
            inside = path.parent.relative_to(ROOT / folder).parts
            assert ".".join((name, *inside)) in tools["packages"], f"{path} would not be shipped"
