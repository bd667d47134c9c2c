"""Prompts for a calibration, and the command that makes a forecast ahead of time."""

import json
import logging

import pytest
import torch
from typer.testing import CliRunner

from zipage_lang.cli import app
from zipage_lang.kernels.backend import choose_backend
from zipage_lang.runtime import forecast_fit
from zipage_lang.runtime.calibration_prompts import as_starts, prompts_for, read_prompts
from zipage_lang.runtime.forecast_store import file_at_home, model_identity
from zipage_lang.runtime.model_store import resolve_model
from zipage_lang.runtime.models.registry import load_model


def test_prompts_are_read_line_by_line(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one\\ntwo"}\n\n{"prompt": "three", "answer": "3"}\n')
    assert read_prompts(file) == ["one\ntwo", "three"]


@pytest.mark.parametrize("line", ["words", "[1]", '{"text": "x"}', '{"prompt": ""}', ""])
def test_a_line_that_is_no_prompt_is_named(tmp_path, line):
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError, match=r"prompts\.jsonl"):
        read_prompts(file)


def test_a_model_has_prompts_of_its_own_or_general_ones(tmp_path):
    general = prompts_for(tmp_path)
    assert len(general) >= 16
    (tmp_path / "calibration.jsonl").write_text(json.dumps({"prompt": "mine"}))
    assert prompts_for(tmp_path) == prompts_for(tmp_path / "model.gguf") == ["mine"]


def test_prompts_become_the_tokens_that_a_user_would_send():
    path = resolve_model("zipage-tiny-reasoner")
    first, second = as_starts(path, ["multiply 12*34\n", "recall"], 128)
    assert first[0] == second[0] == 1  # the start of a text
    assert len(first) == 1 + len("multiply 12*34\n")


def test_a_tokenizer_of_another_model_is_refused():
    path = resolve_model("zipage-tiny-reasoner")
    with pytest.raises(ValueError, match="knows 20 tokens"):
        as_starts(path, ["multiply 12*34\n"], 20)


def test_the_command_writes_where_engines_look(home, tmp_path, monkeypatch):
    monkeypatch.setattr(forecast_fit, "_NUM_STEPS", 20)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "multiply 1234*5678\\n"}\n')
    before = (list(logging.getLogger().handlers), logging.getLogger("zipage.engine").level)
    arguments = ["calibrate", "zipage-tiny-reasoner", "--prompts", str(prompts)]
    result = CliRunner().invoke(app, [*arguments, "--texts", "4", "--length", "128"])
    assert result.exit_code == 0, result.output
    path = resolve_model("zipage-tiny-reasoner")
    loaded = load_model(path, torch.float32, choose_backend("cpu"), None)
    file = file_at_home(model_identity(loaded))
    assert file.is_file()
    assert result.output.splitlines()[-1] == str(file)
    told = [line for line in result.output.splitlines() if line.startswith("zipage: ")]
    assert any("calibrating the forecast" in line for line in told)
    assert not any("loading weights" in line for line in told)
    # Others in this process log as they did before.
    assert (logging.getLogger().handlers, logging.getLogger("zipage.engine").level) == before
    assert not logging.getLogger("zipage.engine").handlers


def test_the_command_says_in_one_line_what_is_wrong(home, tmp_path):
    result = CliRunner().invoke(app, ["calibrate", str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert "there is no such file or folder" in result.output
    result = CliRunner().invoke(app, ["calibrate", "zipage-tiny-reasoner", "--dtype", "int3"])
    assert result.exit_code == 2
    assert "bfloat16" in result.output
    assert len(result.output.splitlines()) == 1
