"""`zipage eval` from its command line: whole runs on a tiny model, and mistakes in one sentence."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from zipage_lang.cli import app
from zipage_lang.evaluation import engine_start

ENGINE = ("--in-process", "--engine", "num_threads=1", "--engine", "num_blocks=300")


@pytest.fixture
def zipage_eval(tmp_path):
    return lambda *arguments: CliRunner().invoke(
        app, ["eval", "--out", str(tmp_path / "out"), *map(str, arguments)]
    )


def test_a_sweep_is_one_command_and_goes_on_from_its_folder(zipage_eval, tiny_model, tmp_path):
    command = (
        *("--model", tiny_model, *ENGINE, "--family", "recall@0,trace@0+multiply@0"),
        *("--problems", 2, "--samples", 2, "--max-tokens", 40),
        *("--policy", "zipage,random", "--budget", "16,50%", "--interval", "16"),
    )
    result = zipage_eval(*command)
    assert result.exit_code == 0, result.output
    out = tmp_path / "out"
    cells = json.loads((out / "sweep.json").read_text())["cells"]
    assert {cell["task"] for cell in cells} == {"recall@0", "trace@0+multiply@0"}
    assert {cell["policy"] for cell in cells} == {"", "zipage", "random"}
    assert all(cell["num_problems"] == cell["num_samples"] == 2 for cell in cells)
    assert sum(line.startswith("recall@0 ") for line in result.stdout.splitlines()) >= 3
    before = (out / "runs" / "recall@0--off.jsonl").read_bytes()
    again = zipage_eval(*command)
    assert again.exit_code == 0
    assert "recall@0 off: finished before" in again.stderr
    assert (out / "runs" / "recall@0--off.jsonl").read_bytes() == before
    (out / "report.html").unlink()
    assert zipage_eval("--report-only").exit_code == 0
    assert "engine options" in (out / "report.html").read_text()


def test_a_task_file_is_evaluated(zipage_eval, tiny_model, tmp_path):
    rows = [
        {"prompt": "Say A or B.", "answer": "A", "checker": "choice"},
        {"prompt": "1+1?", "answer": "2", "checker": "boxed", "chat": False},
        {"prompt": "Write it.", "answer": "assert True", "checker": "python"},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    result = zipage_eval(
        *("--model", tiny_model, *ENGINE, "--task", path, "--max-tokens", 8, "--keep-text")
    )
    assert result.exit_code == 0, result.output
    assert "mine  full: pass@1" in result.stdout
    lines = (tmp_path / "out" / "runs" / "mine--off.jsonl").read_text().splitlines()
    assert all("text" in json.loads(line) for line in lines[1:] if '"sample"' in line)


def test_perplexity_and_needle_are_reports_of_their_own(zipage_eval, tiny_model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("To be held out, a text has to be somewhere. " * 12)
    result = zipage_eval(
        *("--model", tiny_model, *ENGINE, "--perplexity", text, "--needle", "--window", 120),
        *("--problems", 5, "--policy", "streaming", "--budget", "16", "--interval", "16"),
    )
    assert result.exit_code == 0, result.output
    for name in ("perplexity", "needle"):
        stored = json.loads((tmp_path / "out" / f"{name}.json").read_text())
        page = (tmp_path / "out" / f"{name}.html").read_text()
        assert [row["label"] for row in stored["settings"]] == ["full", "streaming"]
        for row in stored["settings"]:
            for figure in row["figures"].values():
                assert f"{figure['value']:.3f} [" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to evaluate: give --family, --task"),
        (["--family", "chess"], "family='chess' is not known"),
        (["--family", "trace", "--level", "9-"], "--level '9-' must be like"),
        (["--family", "trace,trace"], "task 'trace' is asked for twice"),
        (["--family", "trace", "--needle"], "give them without tasks"),
        (["--family", "trace", "--policy", "zipage"], "give --budget"),
        (["--family", "trace", "--policy", "zipage", "--budget", "many"], "'many' is no amount"),
        (["--family", "trace", "--mode", "sometimes"], "--mode 'sometimes' must be one of fixed"),
        (["--family", "trace", "--protect", "all"], "--protect 'all' must be one of prompt"),
        (["--family", "trace", "--problems", "0"], "--problems 0 must be at least 1"),
        (["--family", "trace", "--samples", "0"], "--samples 0 must be at least 1"),
        (["--family", "trace", "--part", "5/4"], "--part '5/4' must be like 1/4"),
        (["--family", "trace", "--engine", "dtype"], "--engine 'dtype' must be NAME=VALUE"),
        (["--family", "trace", "--engine", "speed=9"], "unknown engine option 'speed'"),
        (["--family", "trace", "--mean-length", "trace=x"], "must be a number of tokens above 0"),
        (["--family", "trace", "--mean-length", "recall=9"], "'recall' is no task here"),
        (["--family", "trace", "--temperature", "-1"], "temperature=-1.0 must be"),
        (["--family", "trace", "--model", "/no/such"], "there is no such file or folder"),
        (["--dataset", "gsm8k", "--data", "/no/such"], "dataset 'gsm8k' is not in /no/such; fetch"),
        (["--task", "/no/such.jsonl"], "No such file or directory"),
        (["--report-only"], "has no results yet"),
        (["--needle", "--mode", "adaptive", "--policy", "zipage", "--budget", "9"], "only --mode"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(zipage_eval, arguments, message):
    result = zipage_eval("--in-process", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.startswith("zipage: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("policy", ["no-such", "zipage:pool_kernel=4", "zipage:speed=9"])
def test_a_policy_that_the_engine_refuses_is_known_before_anything_runs(
    zipage_eval, tiny_model, tmp_path, policy
):
    result = zipage_eval(
        *("--model", tiny_model, *ENGINE, "--family", "trace@0", "--problems", 1),
        *("--policy", policy, "--budget", "16"),
    )
    assert result.exit_code == 2
    assert policy.split(":")[0] in result.stderr
    assert result.stderr.startswith("zipage: the engine ended a request: ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_engine_is_made_ready_for_what_the_cells_ask(monkeypatch, tmp_path):
    started = []

    def start(model, **options):
        started.append(options)
        raise ValueError("far enough")

    monkeypatch.setattr(engine_start.ProcessRunner, "start", start)
    family = ("eval", "--out", str(tmp_path), "--family", "trace@0", "--problems", "1")
    swept = (*family, "--policy", "zipage", "--budget", "9", "--engine", "max_running=9")
    CliRunner().invoke(app, family)
    CliRunner().invoke(app, swept)
    CliRunner().invoke(app, [*swept, "--engine", "num_query_slots=2", "--engine", "kv_mode=off"])
    assert started == [
        {"num_query_slots": 64},
        {"num_query_slots": 9, "kv_mode": "fixed", "max_running": 9},
        {"num_query_slots": 2, "kv_mode": "off", "max_running": 9},
    ]


def test_the_module_is_the_command_without_sockets(tmp_path):
    code = (
        "import sys, runpy\n"
        "sys.argv = ['evaluation', '--out', sys.argv[1], '--report-only']\n"
        "try:\n    runpy.run_module('zipage_lang.evaluation', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    print(end.code, 'zmq' in sys.modules, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["2", "False", "False"]
