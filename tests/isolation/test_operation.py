"""How the server is run: what SECURITY.md says of files, units and containers is so."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import zipage_lang

ROOT = Path(zipage_lang.__file__).parent.parent
SECURITY = (ROOT / "SECURITY.md").read_text()
DEPLOYMENT = (ROOT / "docs" / "deployment.md").read_text()
UNIT = (ROOT / "deploy" / "zipage.service").read_text()
CONTAINERFILE = (ROOT / "Containerfile").read_text()


def test_the_unit_is_closed_as_the_document_says():
    for line in (
        "CapabilityBoundingSet=",
        "NoNewPrivileges=yes",
        "DynamicUser=yes",
        "ProtectSystem=strict",
        "ProtectHome=yes",
        "PrivateTmp=yes",
        "DevicePolicy=closed",
        "SystemCallFilter=@system-service",
        "RestrictSUIDSGID=yes",
        "UMask=0077",
    ):
        assert f"\n{line}\n" in UNIT, line
    assert re.findall(r"^DeviceAllow=(.*)$", UNIT, re.MULTILINE) == ["char-nvidia* rw"]


def test_keys_are_in_no_command_line_of_ours():
    """A flag shows in ps; the environment and files do not."""
    for text in (UNIT, CONTAINERFILE, DEPLOYMENT):
        lines = [
            line for line in text.splitlines() if re.search(r"^\s*(Exec|ENTRYPOINT|CMD)", line)
        ]
        assert not [line for line in lines if "-key" in line]
    assert "--api-key " not in UNIT + CONTAINERFILE


def test_the_container_is_started_without_rights():
    started = re.search(r"podman run .*?```", DEPLOYMENT, re.DOTALL)[0]
    for flag in ("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges"):
        assert flag in started
        assert flag in SECURITY
    assert "\nUSER 10001:10001\n" in CONTAINERFILE


def test_every_flag_and_file_that_the_document_names_exists():
    from zipage_lang.commands.flag_groups import ENGINE_GROUPS, SERVER_GROUPS

    options = {flag.option for group in (*SERVER_GROUPS, *ENGINE_GROUPS) for flag in group.flags()}
    foreign = {"--read-only", "--cap-drop", "--security-opt", "--memory"}
    prose = "".join(SECURITY.split("```")[::2])
    assert set(re.findall(r"--[a-z][a-z-]+", prose)) - foreign <= options
    files = re.findall(r"`((?:tests|runtime|deploy|docs|server)/[\w./-]+)`", SECURITY)
    assert files
    assert not [name for name in files if not (ROOT / name).exists()]


def test_keys_from_the_environment_reach_the_server_and_not_ps(tmp_path):
    """Both keys, from a real command line; what it would serve with is printed by a stand-in."""
    program = (
        "import sys; import zipage_lang.server.run as run\n"
        "from zipage_lang.server.keys import read_keys\n"
        "def serve(engine, server, **_):\n"
        "    keys = read_keys(server); print(len(keys.clients), keys.operator is not None)\n"
        "    print(open('/proc/self/cmdline').read().replace(chr(0), ' '))\n"
        "run.serve = serve\n"
        "from zipage_lang.cli import main\n"
        "sys.argv = ['zipage', 'serve', 'zipage-tiny-reasoner', '--port', '0',"
        " '--api-key-file', sys.argv[1]]\n"
        "main()\n"
    )
    (tmp_path / "keys").write_text("secret-of-a-file-0123456789\n")
    os.chmod(tmp_path / "keys", stat.S_IRUSR)
    keys = {
        "ZIPAGE_API_KEY": "secret-one-0123456789 secret-two-0123456789",
        "ZIPAGE_ADMIN_KEY": "secret-admin-0123456789",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(tmp_path / "keys")],
        env={**os.environ, **keys},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 True")
    assert "secret" not in done.stdout + done.stderr
