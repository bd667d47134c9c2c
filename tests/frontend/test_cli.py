"""The command line: what it prints and how it ends. Knows nothing of models."""

import importlib.metadata

import pytest
from typer.testing import CliRunner

import zipage_lang.cli as cli
from zipage_lang.frontend.llm import Engine


@pytest.fixture
def zipage(monkeypatch, command, tmp_path):
    """Runs the command line with the scripted engine and an empty model folder."""
    monkeypatch.setenv("ZIPAGE_HOME", str(tmp_path))
    monkeypatch.setattr(cli, "Engine", lambda model: Engine(model, engine_command=command))
    return lambda *arguments: CliRunner().invoke(cli.app, list(arguments))


def test_version_is_the_installed_one(zipage):
    assert zipage("version").stdout == importlib.metadata.version("zipage-lang") + "\n"


def test_models_list_tells_how_to_get_what_is_not_here(zipage):
    result = zipage("models", "list")
    assert result.exit_code == 0
    assert "smollm2-135m" in result.stdout
    assert "run: zipage models pull smollm2-135m" in result.stdout


def test_generate_streams_a_chat_to_stdout(zipage):
    result = zipage("generate", "The fox", "--max-tokens", "100")
    assert result.exit_code == 0
    assert result.stdout == "user\nThe fox\nassistant\n\n"


def test_generate_raw_continues_the_text_itself(zipage):
    assert zipage("generate", "The fox", "--raw").stdout == "The fox\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["models", "pull", "smolm2-135m"], "did you mean 'smollm2-135m'"),
        (["generate", "hi", "--temperature", "-1"], "temperature=-1.0 must be"),
        (["generate", "hi", "--max-tokens", "0"], "max_tokens=0 must be"),
        (["generate", "hi", "--model", "fails"], "model 'fails' is not known"),
        (["generate", "", "--raw"], "the prompt has no tokens"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(zipage, arguments, message):
    result = zipage(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("zipage: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_an_unknown_option_ends_with_exit_code_2(zipage):
    assert zipage("generate", "hi", "--nonsense").exit_code == 2
