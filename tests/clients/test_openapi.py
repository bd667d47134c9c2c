"""schemathesis against a real server: no answer of 5xx, and none that the document does not tell.

Knows nothing of single routes.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import transformers

from zipage_lang.runtime.model_store import resolve_model

# What it says beyond these, say that bad data must be refused, is not so here: unknown fields pass.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
THIN = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}

# Side by side in processes: its own threads (--workers) trip over Python 3.11's parser.
PARTS = (
    "--include-path-regex=^/v1/(chat|models)",
    "--include-path-regex=^/v1/(completions|responses)",
    "--exclude-path-regex=^/v1/",
)


@pytest.fixture(scope="module")
def thin_model(tmp_path_factory):
    """The tiny reasoner's tokenizer and one thin random layer: answers cost next to nothing."""
    reasoner, folder = resolve_model("zipage-tiny-reasoner"), tmp_path_factory.mktemp("thin")
    for path in (*reasoner.glob("*token*"), reasoner / "chat_template.jinja"):
        shutil.copy(path, folder)
    config = transformers.AutoConfig.from_pretrained(reasoner)
    config.update({**THIN, "layer_types": ["full_attention"]})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(benchmark_file, thin_model):
    """With so small a context that no answer is long."""
    servers = benchmark_file("server_process")
    command = servers.serve_command(
        str(thin_model), max_model_len=64, num_blocks=160, num_threads=1, drain_timeout=2
    )
    with servers.ServerProcess(command) as server:
        yield server.wait_ready()


@pytest.fixture
def fuzz(server, tmp_path):
    """Runs schemathesis with these options: the number of cases, all of which were in order."""
    pytest.importorskip("schemathesis")

    def run_part(part, options, seconds):
        folder = tmp_path / str(PARTS.index(part))
        folder.mkdir()
        done = subprocess.run(
            [
                os.path.join(os.path.dirname(sys.executable), "schemathesis"),
                "run",
                f"{server.url}/openapi.json",
                part,
                f"--checks={','.join(CHECKS)}",
                "--phases=examples,coverage,fuzzing",
                "--continue-on-failure",
                "--no-shrink",
                "--warnings=off",
                "--request-timeout=60",
                *options,
            ],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        told = done.stdout + done.stderr
        assert done.returncode == 0, told
        return int(re.search(r"(\d+) generated", told).group(1))

    def run(*options, seconds):
        with ThreadPoolExecutor(len(PARTS)) as pool:
            return sum(pool.map(lambda part: run_part(part, options, seconds), PARTS))

    yield run
    info = server.wait_idle(counts=("num_running", "num_waiting"))
    assert info["num_held_requests"] or not info["num_held"]  # `hold` keeps blocks a while
    assert info["num_restarts"] == 0


def test_hundreds_of_cases_get_documented_answers(fuzz):
    assert fuzz("--max-examples=5", "--generation-deterministic", seconds=400) >= 300


@pytest.mark.slow
def test_thousands_of_cases_get_documented_answers(fuzz):
    assert fuzz("--max-examples=250", seconds=3000) >= 3000
