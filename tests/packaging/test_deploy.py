"""The container file and the service start a command line that exists, and pass their linters.

Knows nothing of containers; linters are used where they are installed.
"""

import json
import re
import shutil
import subprocess

import pytest
from test_support.doc_blocks import ROOT, check_zipage

CONTAINERFILE = (ROOT / "Containerfile").read_text()
UNIT = (ROOT / "deploy" / "zipage.service").read_text()


def test_the_container_starts_a_server_with_flags_that_exist():
    entry, default = (
        json.loads(re.search(rf"^{word} (\[.*\])$", CONTAINERFILE, re.MULTILINE)[1])
        for word in ("ENTRYPOINT", "CMD")
    )
    assert entry[0] == "zipage"
    check_zipage([*entry[1:], *default])


def test_the_container_does_not_run_as_root_and_watches_ready():
    last_stage = CONTAINERFILE[CONTAINERFILE.rindex("\nFROM ") :]
    assert re.search(r"^USER [1-9]", last_stage, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK .*\n.*/ready", last_stage, re.MULTILINE)
    assert "Containerfile" not in (ROOT / ".dockerignore").read_text()


def test_the_service_starts_a_server_with_flags_that_exist():
    settings = dict(re.findall(r"^Environment=(ZIPAGE_\w+)=(.*)$", UNIT, re.MULTILINE))
    words = re.search(r"^ExecStart=\S+/zipage (.+)$", UNIT, re.MULTILINE)[1]
    for name, value in settings.items():
        words = words.replace(f"${{{name}}}", value).replace(f"${name}", value)
    assert "$" not in words
    check_zipage(words.split())


def test_the_service_stops_the_server_before_its_engine_and_waits_for_the_drain():
    from zipage_lang.server.config import ServerConfig
    from zipage_lang.server.run import CLOSE_GRACE_S

    assert "\nKillMode=mixed\n" in UNIT
    seconds = float(re.search(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)[1])
    assert seconds > ServerConfig().drain_timeout + CLOSE_GRACE_S


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_service_and_finds_it_closed(tmp_path):
    unit = tmp_path / "zipage.service"
    unit.write_text(UNIT.replace("/opt/zipage/bin/zipage", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    told = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=25", unit],
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stdout[-400:]


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint")
def test_hadolint_finds_nothing_in_the_container_file():
    done = subprocess.run(["hadolint", ROOT / "Containerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
