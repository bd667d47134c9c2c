"""All that an installation brings along is pinned, and users get no licence they may not build on.

Knows nothing of networks: it reads what is installed.
"""

import importlib.util
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def dependencies():
    path = ROOT / "packaging" / "dependencies.py"
    spec = importlib.util.spec_from_file_location("dependencies", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Made:
    """A distribution of this name, version and metadata."""

    def __init__(self, version="1.0", **fields):
        self.version, self.metadata = version, Message()
        for name, value in fields.items():
            self.metadata[name.replace("_", "-")] = value


def test_all_that_is_installed_is_pinned_at_its_version(dependencies):
    """`python packaging/dependencies.py pins --write` mends it."""
    installed = dependencies.brought_along(dependencies.OURS, dependencies.EXTRAS)
    assert {"torch", "msgspec", "pytest", "markupsafe"} <= installed.keys()
    assert (
        dependencies.wrong_pins(dependencies.read_pins(ROOT / "constraints.txt"), installed) == []
    )


def test_a_missing_pin_and_another_version_are_told(dependencies):
    installed = {"a": Made("1.0"), "b": Made("2.0+cpu"), "c": Made("3")}
    assert dependencies.wrong_pins({"b": "2.0", "c": "3.1"}, installed) == [
        "a==1.0 has no pin",
        "c is pinned at 3.1 but 3 is installed",
    ]


def test_the_licence_list_is_that_of_what_is_installed(dependencies):
    """`python packaging/dependencies.py licences --write` mends it."""
    assert dependencies.check_licences(ROOT / "LICENSES.md", write=False) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"License_Expression": "GPL-3.0-or-later"},
        {"License_Expression": "MIT AND AGPL-3.0-only"},
        {"Classifier": "License :: OSI Approved :: GNU General Public License v3 (GPLv3)"},
        {"License": "Proprietary"},
        {},
    ],
)
def test_a_licence_that_binds_users_or_none_at_all_is_a_fault(dependencies, fields):
    assert dependencies.licence_faults({"x": Made(**fields)})


@pytest.mark.parametrize("licence", ["MIT", "LGPL-2.1-or-later", "MPL-2.0 AND MIT", "Apache 2.0"])
def test_other_licences_are_none(dependencies, licence):
    assert dependencies.licence_faults({"x": Made(License=licence)}) == []


def test_extras_are_those_of_the_project(dependencies):
    installed = dependencies.brought_along(dependencies.OURS, ())
    more = dependencies.brought_along(dependencies.OURS, ("serve",))
    assert "fastapi" not in installed
    assert "fastapi" in more
