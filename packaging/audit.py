"""Looks our pinned dependencies up among the known vulnerabilities, with pip-audit.

The service is first asked about a release that is known to be vulnerable. Where it does not know
that one (a mirror without vulnerability data, no network), "nothing found" would mean nothing: that
is said in one line, and is no failure. A vulnerability that is found is one, and so is a pip-audit
that itself fails. Knows nothing of what the packages do.

    python packaging/audit.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KNOWN_BAD = "jinja2==3.1.2\n"  # CVE-2024-22195 and others since
LIMIT_S = 300
OPTIONS = ("--no-deps", "--disable-pip", "--progress-spinner", "off", "--timeout", "10")

Report = list[dict[str, Any]]  # one a package: name, version, vulns, or name and skip_reason


def ask(pins: str) -> Report | None:
    """pip-audit's report about these pins; None where it could not make one."""
    with tempfile.TemporaryDirectory(prefix="zipage-audit-") as folder:
        path = Path(folder) / "requirements.txt"
        path.write_text(pins, encoding="utf-8")
        command = [sys.executable, "-m", "pip_audit", "-r", str(path), "-f", "json", *OPTIONS]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
            return list(json.loads(done.stdout)["dependencies"])
        except (subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
            return None


def knows_vulnerabilities(report: Report | None) -> bool:
    """Whether a service that said this of KNOWN_BAD has anything to tell."""
    return any(package.get("vulns") for package in report or [])


def verdict(report: Report | None, num_pins: int) -> tuple[int, list[str]]:
    """(exit code, what to print) of a service that does know vulnerabilities."""
    if report is None:
        return 1, ["audit: pip-audit gave no report, although the service answers"]
    found = [package for package in report if package.get("vulns")]
    skipped = [package["name"] for package in report if package.get("skip_reason")]
    lines = [
        f"audit: {package['name']} {package['version']}: {vulnerability['id']}, mended in "
        f"{', '.join(vulnerability.get('fix_versions') or ['no release yet'])}"
        for package in found
        for vulnerability in package["vulns"]
    ]
    lines += [f"audit: the service does not know {', '.join(skipped)}"] if skipped else []
    num_clean = num_pins - len(found) - len(skipped)
    return int(bool(found)), [*lines, f"audit: {num_clean} of {num_pins} pins without a finding"]


def main() -> int:
    if not knows_vulnerabilities(ask(KNOWN_BAD)):
        print(
            "audit: NOT DONE: no vulnerability service answers here (it does not know of "
            f"{KNOWN_BAD.strip()}, which is vulnerable); run `make audit` where one is reachable"
        )
        return 0
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    code, lines = verdict(ask(pins), len(pins.split()))
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
