"""The command line as a whole: what it shows, how mistakes read, and what it costs to start."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

from zipage_lang.cli import ENTRIES, load


def modules_of(code):
    done = subprocess.run(
        [sys.executable, "-P", "-c", code + "; import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize("asked", [["version"], ["--version"]])
def test_version_is_the_installed_one(zipage, asked):
    assert zipage(*asked).stdout == importlib.metadata.version("zipage-lang") + "\n"


def test_help_lists_every_command_with_its_line(zipage):
    text = zipage("--help").stdout
    for name, entry in ENTRIES.items():
        assert f" {name} " in text
        assert entry.about in text


@pytest.mark.parametrize("name", ENTRIES)
def test_a_command_has_the_line_that_the_list_shows(name):
    first = load(name).help.split("\n\n")[0]
    if name == "eval":  # its own is longer
        assert first
    else:
        assert first == ENTRIES[name].about


@pytest.mark.parametrize("name", ENTRIES)
def test_every_command_shows_its_help(zipage, name):
    result = zipage(name, "--help")
    assert result.exit_code == 0
    assert f"Usage: zipage {name}" in result.stdout or f"Usage: root {name}" in result.stdout


def test_listing_the_commands_loads_none_of_them():
    loaded = modules_of("from zipage_lang.cli import app; app(['-h'], standalone_mode=False)")
    assert "zipage_lang.cli" in loaded
    for module in ("torch", "numpy", "zmq", "msgspec", "asyncio", "zipage_lang.runtime.config"):
        assert module not in loaded


@pytest.mark.parametrize("name", ENTRIES)
def test_loading_a_command_brings_no_torch_and_no_server(name):
    loaded = modules_of(f"from zipage_lang.cli import load; load({name!r})")
    assert not {"torch", "numpy", "fastapi", "uvicorn", "transformers"} & set(loaded)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serv"], "no such command 'serv'; did you mean 'serve'? (see `"),
        (["xyzzy"], "no such command 'xyzzy' (see `"),
        (["generate"], "missing argument 'prompt' (see `"),
        (["generate", "a", "b"], "unexpected extra argument"),
        (["generate", "hi", "--max-runing", "3"], "; did you mean --max-running?"),
        (["generate", "hi", "--tempe", "3"], "; did you mean --temperature?"),  # not --dtype
        (["generate", "hi", "--max-running", "many"], "--max-running"),
        (["generate", "hi", "--kv-mode", "on"], "'on' is not one of 'off', 'fixed', 'adaptive'"),
        (["generate", "hi", "--temperature", "-1"], "temperature=-1.0 must be"),
        (["generate", "hi", "--max-tokens", "0"], "max_tokens=0 must be"),
        (["generate", "hi", "--kv-budget", "0"], "kv budget=0 must be"),
        (["generate", "hi", "--model", "smolm2-135m"], "did you mean 'smollm2-135m'"),
        (["generate", "hi", "--raw", "--system", "x"], "leave out --raw"),
        (["chat", "--url", "localhost:1"], "must begin with http:// or https://"),
        (["chat", "--url", "http://127.0.0.1:9", "--dtype", "bfloat16"], "--dtype: the server has"),
        (["serve", "smollm2-135m", "--port", "99999"], "port=99999 must be"),
        (["serve", "smollm2-135m", "--tool-format", "qwen"], "is not one of 'auto', 'hermes'"),
        (["serve", "smolm"], "did you mean 'smollm2-135m'"),
        (["run", "nix.py"], "nix.py does not exist"),
        (["trace", "nix.jsonl"], "No such file or directory: nix.jsonl"),
        (["trace", "x", "--last", "0"], "greater than or equal to 1"),
        (["models", "pul"], "did you mean 'pull'?"),
        (["models", "pull", "smolm2-135m"], "did you mean 'smollm2-135m'"),
        (["models", "info", "qwen3-9b"], "did you mean 'qwen3-8b'"),
        (["bench", "nope"], "model 'nope' is not known"),
        (["calibrate", "nope"], "model 'nope' is not known"),
        (["eval", "--out", "x"], "nothing to evaluate"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(
    zipage, arguments, message, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    result = zipage(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("zipage: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [[], ["models"]])
def test_no_words_at_all_show_the_help_and_no_error(zipage, arguments):
    result = zipage(*arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.output
    assert "zipage: " not in result.stderr


def test_a_reader_who_leaves_is_no_error():
    nobody_reads, out = os.pipe()
    os.close(nobody_reads)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "zipage_lang.cli", "models", "list"],
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(out)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_options_and_models(shell, monkeypatch, tmp_path):
    monkeypatch.setenv("ZIPAGE_HOME", str(tmp_path))
    for words, expected in (
        (["zipage", "mod"], "models"),
        (["zipage", "serve", "smollm2-135m", "--kv-b"], "--kv-budget"),
        (["zipage", "serve", "zipage-"], "zipage-tiny-reasoner"),
        (["zipage", "generate", "x", "--kv-mode", "adap"], "adaptive"),
    ):
        assert expected in completed(shell, words)


def completed(shell, words):
    """What a shell is offered behind these words."""
    environment = {
        "_ZIPAGE_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": " ".join(words),
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    code = "from zipage_lang.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", **environment},
    )
    return done.stdout
