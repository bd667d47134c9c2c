"""What is told of a long build, and the command that builds ahead of a start."""

import logging
import os
import time

import pytest

from zipage_lang.kernels import build_progress
from zipage_lang.kernels.build_progress import num_done, shown_build
from zipage_lang.kernels.flashinfer_build import BuildError
from zipage_lang.kernels.flashinfer_module import GENERAL
from zipage_lang.kernels.prompt_module import FOR_HOPPER
from zipage_lang.runtime import prebuild


def test_only_files_written_since_the_start_count(tmp_path):
    started = time.time()
    for name, age in (("old.o", 100), ("new.o", -1), ("new.so", -1), ("new.cu", -1)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (started - age, started - age))
    assert num_done(tmp_path, started) == 2
    assert num_done(tmp_path / "missing", started) == 0


def test_a_build_is_told_of_in_lines_where_there_is_no_terminal(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(build_progress, "LINE_EVERY_S", 0.01)
    with caplog.at_level(logging.WARNING), shown_build("a thing", "a minute", tmp_path, 1):
        while not any("0 of 1 files" in line for line in caplog.messages):
            time.sleep(0.01)
    lines = caplog.messages
    assert lines[0] == "building a thing: a minute"
    assert lines[-1].startswith("built a thing in ")


def test_a_build_is_shown_as_a_bar_in_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(build_progress, "POLL_S", 0.01)
    with shown_build("a thing", "a minute", tmp_path, 1):
        time.sleep(0.05)
    assert "building a thing" in capsys.readouterr().err


def test_a_build_that_fails_is_not_called_built(tmp_path, caplog):
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(RuntimeError, match="no compiler"),
        shown_build("a thing", "a minute", tmp_path, 1),
    ):
        raise RuntimeError("no compiler")
    assert caplog.messages == ["building a thing: a minute"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--model", "qwen9"], "qwen9"), (["--head-dim", "96"], "no attention for head size 96")],
)
def test_prebuild_refuses_what_it_cannot_build(arguments, told, capsys):
    assert prebuild.main(arguments) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("card", "has_products"), [("9.0a", True), ("8.0", False)])
def test_prebuild_makes_all_libraries_and_copies_them(
    tmp_path, monkeypatch, capsys, card, has_products
):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "of before")
    products, attention, prompts = (
        tmp_path / name for name in ("zipage_hopper_0.so", "attention_128.so", "prompts_128.so")
    )
    for path in (products, attention, prompts):
        path.write_text(path.name)
    monkeypatch.setattr("zipage_lang.kernels.hopper.build.library_path", lambda: products)
    monkeypatch.setattr(GENERAL, "build", lambda dtype, head_dim: attention)
    monkeypatch.setattr(FOR_HOPPER, "build", lambda dtype, head_dim: prompts)
    target = tmp_path / "built"
    options = ["--card", card, "--head-dim", "128", "--copy-to", str(target)]
    assert prebuild.main(options) == 0
    found = {str(path.relative_to(target)) for path in target.rglob("*.so")}
    wanted = {"flashinfer/attention_128/attention_128.so"}
    of_hopper = {"zipage/zipage_hopper_0.so", "flashinfer/prompts_128/prompts_128.so"}
    assert found == wanted | (of_hopper if has_products else set())
    assert (str(products) in capsys.readouterr().out) == has_products
    assert os.environ["FLASHINFER_CUDA_ARCH_LIST"] == card


def test_prebuild_goes_on_without_the_kernel_that_is_only_faster(tmp_path, monkeypatch, capsys):
    library = tmp_path / "attention_64.so"
    library.write_text("")

    def fails(dtype, head_dim):
        raise BuildError("no such header")

    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "of before")
    monkeypatch.setattr("zipage_lang.kernels.hopper.build.library_path", lambda: library)
    monkeypatch.setattr(GENERAL, "build", lambda dtype, head_dim: library)
    monkeypatch.setattr(FOR_HOPPER, "build", fails)
    assert prebuild.main(["--card", "9.0a", "--head-dim", "64"]) == 0
    assert "no such header" in capsys.readouterr().err
