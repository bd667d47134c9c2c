"""`zipage generate` on the scripted engine, which repeats its prompt."""

import subprocess
import sys

import pytest


def test_a_chat_streams_to_stdout(zipage, asked):
    result = zipage("generate", "solve x")
    assert result.exit_code == 0, result.output
    assert result.stdout == "solve x\n\n"


def test_raw_continues_the_text_itself(zipage, asked):
    assert zipage("generate", "solve x", "--raw").stdout == "solve x\n"


def test_a_dash_reads_the_prompt_from_stdin(zipage, asked):
    assert zipage("generate", "-", "--raw", input="count 1 2").stdout == "count 1 2\n"


def test_flags_reach_the_engine_and_the_request(zipage, asked):
    result = zipage(
        *("generate", "solve x", "--raw", "--max-tokens", 3, "--kv-mode", "fixed"),
        *("--kv-budget", 64, "--max-running", 2, "--model", "zipage-tiny-reasoner"),
    )
    assert result.stdout == "so\n"  # the first token is the BOS
    assert asked == [
        {
            "model": "zipage-tiny-reasoner",
            "kv_mode": "fixed",
            "kv_budget": 64,
            "max_running": 2,
        }
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x" * 600, "--raw"], "512"),
        (["hi", "--system", "be kind"], "the chat template refused the messages"),
    ],
)
def test_what_only_the_model_can_refuse_is_one_line_too(zipage, asked, arguments, message):
    result = zipage("generate", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("zipage: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_what_the_machine_lacks_is_one_line_without_the_engine_s_traceback():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    words = ("generate", "hi", "--model", "zipage-tiny-reasoner", "--backend", "cuda")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "zipage_lang.cli", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("zipage: backend='cuda' needs an NVIDIA card")
    assert done.stderr.count("\n") == 1
