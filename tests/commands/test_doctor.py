"""`zipage doctor`: each line says what to do; the exit code tells whether anything is missing."""

import json
import sys
import types

import pytest

from zipage_lang.commands import doctor_card, doctor_machine, extras
from zipage_lang.commands.findings import bad, good, warn
from zipage_lang.kernels.prompt_module import FOR_HOPPER


@pytest.fixture
def found(monkeypatch):
    """Replaces what the looks find."""

    def replace(*findings):
        monkeypatch.setattr(doctor_machine, "machine_findings", lambda: iter(findings))
        monkeypatch.setattr(doctor_card, "card_findings", lambda: iter(()))

    return replace


def test_a_machine_that_runs_has_nothing_missing(zipage):
    result = zipage("doctor")
    assert "torch" in result.stdout
    assert "model" in result.stdout
    assert result.exit_code == (1 if "missing" in result.stdout else 0)


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([good("a", "b")], 0),
        ([good("a", "b"), warn("c", "d", "do e")], 0),
        ([warn("c", "d", "do e"), bad("f", "g", "do h")], 1),
    ],
)
def test_only_what_is_missing_fails(zipage, found, findings, code):
    found(*findings)
    result = zipage("doctor")
    assert result.exit_code == code
    for finding in findings:
        assert f"{finding.status:<7} {finding.name:<14} {finding.value}\n" in result.stdout
        assert not finding.advice or f"-> {finding.advice}\n" in result.stdout


def test_json_has_the_same_findings(zipage, found):
    found(warn("c", "d", "do e"))
    assert json.loads(zipage("doctor", "--json").stdout) == [
        {"status": "warn", "name": "c", "value": "d", "advice": "do e"}
    ]


def test_run_draws_tokens_with_the_model_that_comes_with_the_package(zipage, found, asked):
    found()
    result = zipage("doctor", "--run")
    assert result.exit_code == 0, result.output
    assert "tokens drawn by Scripted on cpu" in result.stdout
    assert asked[0]["model"] == "zipage-tiny-reasoner"


def test_a_model_that_is_not_here_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("ZIPAGE_HOME", str(tmp_path))
    lines = [each for each in doctor_machine.machine_findings() if each.name == "model"]
    assert ("warn", "zipage models pull smollm2-135m") in [(f.status, f.advice) for f in lines]


def test_a_temporary_folder_too_deep_for_sockets_is_no_trouble(monkeypatch, tmp_path):
    """A socket's path may have about 100 characters; the engine's go to /tmp then."""
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    finding = next(f for f in doctor_machine.machine_findings() if f.name == "sockets")
    assert (finding.status, finding.value) == ("ok", "the engine talks through /tmp")
    assert list(deep.iterdir()) == []


def test_a_temporary_folder_that_is_not_there_is_missing_something(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    finding = next(f for f in doctor_machine.machine_findings() if f.name == "sockets")
    assert (finding.status, str(tmp_path) in finding.value) == ("missing", True)
    assert finding.advice == "set TMPDIR to a folder that can be written to"


def test_an_extra_that_is_not_installed_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor_machine, "extras", lambda: {"eval": ["no-such-package"]})
    finding = next(f for f in doctor_machine.machine_findings() if f.name == "extra eval")
    assert finding.status == "warn"
    assert "pip install 'zipage-lang[eval]'" in finding.advice


def test_extras_are_read_from_the_installed_package():
    found = extras.extras()
    assert {"serve", "gpu", "eval"} <= set(found)
    assert "fastapi" in found["serve"]
    assert extras.missing(["typer", "no-such-package"]) == ["no-such-package"]


def torch_with(*, is_available, cuda="13.0", capability=(9, 0), free=100, total=140):
    """A stand-in for torch on a machine that we do not have."""
    card = types.SimpleNamespace(
        is_available=lambda: is_available,
        device_count=lambda: 1,
        get_device_capability=lambda index=0: capability,
        get_device_name=lambda index: "H200",
        mem_get_info=lambda index: (free * 2**30, total * 2**30),
    )
    return types.SimpleNamespace(
        __version__="2.13.0",
        bfloat16="bfloat16",
        get_num_threads=lambda: 2,
        cuda=card,
        version=types.SimpleNamespace(cuda=cuda),
    )


def card_lines(monkeypatch, torch, devices=("/dev/nvidia0",)):
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr("glob.glob", lambda pattern: list(devices))
    return {finding.name: finding for finding in doctor_card.card_findings()}


def test_without_a_card_its_packages_are_not_needed(monkeypatch):
    lines = card_lines(monkeypatch, torch_with(is_available=False, cuda=None), devices=())
    assert {finding.status for finding in lines.values()} == {"ok"}
    assert "CPU" in lines["card"].value


@pytest.mark.parametrize(
    ("cuda", "advice"), [(None, "build of torch for CUDA"), ("13.0", "update the driver")]
)
def test_a_card_that_torch_can_t_use_is_missing_something(monkeypatch, cuda, advice):
    lines = card_lines(monkeypatch, torch_with(is_available=False, cuda=cuda))
    assert lines["card"].status == "missing"
    assert advice in lines["card"].advice


def test_an_old_card_and_a_full_card_are_told_apart(monkeypatch):
    monkeypatch.setattr(doctor_card, "_flashinfer", lambda torch: iter(()))
    monkeypatch.setattr(doctor_card, "_own_kernels", lambda torch: iter(()))
    old = card_lines(monkeypatch, torch_with(is_available=True, capability=(7, 5)))
    assert old["card 0"].status == "missing"
    full = card_lines(monkeypatch, torch_with(is_available=True, free=10))
    assert (full["card 0"].status, "10 GiB free of 140 GiB" in full["card 0"].value) == (
        "warn",
        True,
    )


def test_kernels_that_are_not_built_say_how_to_build_them(monkeypatch, tmp_path):
    from zipage_lang.kernels.hopper import build

    monkeypatch.setattr(build, "find_library", lambda: None)
    monkeypatch.setattr(build, "find_nvcc", lambda: "/bin/echo")
    finding = next(doctor_card._own_kernels(torch_with(is_available=True)))
    assert finding.status == "warn"
    assert "python -m zipage_lang.runtime.prebuild" in finding.advice

    def no_compiler():
        raise build.KernelsUnavailableError("no nvcc")

    monkeypatch.setattr(build, "find_nvcc", no_compiler)
    finding = next(doctor_card._own_kernels(torch_with(is_available=True)))
    assert (finding.status, finding.value) == ("warn", "not built, and there is no nvcc")
    assert [each.status for each in doctor_card._attention([])] == ["missing", "missing"]
    assert [each.status for each in doctor_card._attention([128])] == ["warn", "ok"]
    monkeypatch.setattr(FOR_HOPPER, "is_built", lambda dtype, head_dim: head_dim == 64)
    found = list(doctor_card._prompts(torch_with(is_available=True), [64, 128]))
    assert [(each.name, each.status) for each in found] == [
        ("prompts 64", "ok"),
        ("prompts 128", "warn"),
    ]


@pytest.mark.parametrize(
    ("version", "status", "advice"),
    [
        (None, "missing", "pip install 'zipage-lang[gpu]'"),
        ("0.2.0", "missing", "pip install 'flashinfer-python=="),
    ],
)
def test_flashinfer_must_be_there_in_the_tested_version(monkeypatch, version, status, advice):
    monkeypatch.setattr(doctor_card, "version_of", lambda package: version)
    [finding] = doctor_card._flashinfer(torch_with(is_available=True))
    assert finding.status == status
    assert finding.advice.startswith(advice)


@pytest.mark.gpu
def test_the_card_is_told_of(zipage):
    lines = zipage("doctor").stdout
    for name in ("card 0", "triton", "flashinfer", "attention 128", "own kernels"):
        assert f" {name} " in lines
