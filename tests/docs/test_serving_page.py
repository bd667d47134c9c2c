"""docs/serving.md is copy-paste true: `zipage serve` runs, and every block is run against it.

Knows nothing of how the server works.
"""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from test_support.doc_blocks import ROOT, SHELL, blocks

import zipage_lang as zipage

PAGE = ROOT / "docs" / "serving.md"
START = "zipage serve smollm2-135m --port 8000\n"
zipage_command = Path(sys.executable).with_name("zipage")


@pytest.fixture(scope="module")
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def server(port, smollm2, tmp_path_factory):
    """The first block of the page, on a free port; stopped as the page says."""
    (first, *_) = (block for block in blocks(PAGE) if block.language in SHELL)
    assert first.code == START
    words = on_port(first.code, port).split()
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    with log.open("w") as stderr:
        process = subprocess.Popen([zipage_command, *words[1:]], stderr=stderr)
    yield process
    process.terminate()
    assert process.wait(timeout=60) == 0, log.read_text()


def on_port(code, port):
    return code.replace("8000", str(port))


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page's shell blocks need curl")
def test_shell_blocks_of_the_page_get_answers(server, port):
    _, ready, chat, stream = (block for block in blocks(PAGE) if block.language in SHELL)
    assert shell(ready, port) == "ready\n"
    assert '"content":"The capital of France is Paris."' in shell(chat, port)
    events = re.findall(r"^data: (.+)$", shell(stream, port), re.MULTILINE)
    assert events[-1] == "[DONE]"
    assert '"usage":{' in events[-2]


def shell(block, port):
    return subprocess.run(
        ["bash", "-ec", on_port(block.code, port)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout


def test_python_blocks_of_the_page_run_in_order_and_print_what_they_say(server, port, capsys):
    wait_until_ready(server, port)
    session = {"__name__": "page"}
    outputs = []
    for block in blocks(PAGE):
        if block.language == "python":
            exec(compile(on_port(block.source, port), str(PAGE), "exec"), session)
            outputs.append(capsys.readouterr().out)
            assert block.printed in (None, outputs[-1]), f"{block} printed {outputs[-1]!r}"
    assert outputs[0].startswith("The capital of France is Paris.\n")
    assert session["parsed"].choices[0].message.parsed is not None
    zipage.set_default_backend(None)


def test_metrics_and_routes_that_the_pages_name_are_served(server, port):
    wait_until_ready(server, port)
    deployment = (ROOT / "docs" / "deployment.md").read_text()
    names = set(re.findall(r"zipage:\w+", deployment))
    assert len(names) > 6
    served = fetch(port, "/metrics")
    assert [name for name in names if f"\n{name}" not in served] == []
    routes = json.loads(fetch(port, "/openapi.json"))["paths"]
    table = PAGE.read_text().partition("## Routes\n")[2].partition("\n## ")[0]
    for path in re.findall(r"(?:GET |POST |, )`?(/[\w/.]+)", table.replace("/NAME", "")):
        assert path in routes or fetch(port, path), path


def fetch(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return answer.read().decode()


def wait_until_ready(server, port):
    for _ in range(1500):
        assert server.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2)
            return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.2)
    raise AssertionError("the server did not become ready")


def test_the_readme_shows_blocks_of_the_page():
    section = (ROOT / "README.md").read_text().partition("## Serving\n")[2].partition("\n## ")[0]
    shown = re.findall(r"^```\w+\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert len(shown) >= 3
    assert set(shown) <= {block.code for block in blocks(PAGE)}
