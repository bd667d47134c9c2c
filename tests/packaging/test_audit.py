"""The audit says what it found, and never takes a service that knows nothing for a clean bill.

Knows nothing of networks: pip-audit's reports are made up.
"""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BAD = {"name": "jinja2", "version": "3.1.2", "vulns": [{"id": "CVE-1", "fix_versions": ["3.1.3"]}]}
CLEAN = {"name": "idna", "version": "3.20", "vulns": []}
UNKNOWN = {"name": "torch", "skip_reason": "not found"}


@pytest.fixture
def audit():
    spec = importlib.util.spec_from_file_location("audit", ROOT / "packaging" / "audit.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answered(audit, monkeypatch, about_known_bad, about_pins):
    asked = []

    def ask(pins):
        asked.append(pins)
        return about_known_bad if pins == audit.KNOWN_BAD else about_pins

    monkeypatch.setattr(audit, "ask", ask)
    return audit.main(), len(asked)


@pytest.mark.parametrize("said", [None, [], [UNKNOWN], [CLEAN]])
def test_a_service_that_does_not_know_the_known_bad_audits_nothing(
    audit, monkeypatch, capsys, said
):
    assert answered(audit, monkeypatch, said, [CLEAN]) == (0, 1)
    assert "NOT DONE" in capsys.readouterr().out


def test_a_vulnerability_fails_and_is_named_with_its_remedy(audit, monkeypatch, capsys):
    assert answered(audit, monkeypatch, [BAD], [BAD, CLEAN, UNKNOWN]) == (1, 2)
    printed = capsys.readouterr().out
    assert "jinja2 3.1.2: CVE-1, mended in 3.1.3" in printed
    assert "does not know torch" in printed


def test_nothing_found_passes_and_says_of_how_many(audit, monkeypatch, capsys):
    assert answered(audit, monkeypatch, [BAD], [CLEAN])[0] == 0
    assert "pins without a finding" in capsys.readouterr().out


def test_an_audit_that_breaks_off_is_no_clean_bill(audit, monkeypatch):
    assert answered(audit, monkeypatch, [BAD], None)[0] == 1
