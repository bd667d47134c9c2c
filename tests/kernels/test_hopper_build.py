"""The Hopper library: its name, where it is looked for, how it is built and called.

The compiler is a script that stands in for nvcc. Knows nothing of what the library computes.
"""

import ctypes
import logging
import re
import shutil
import subprocess

import pytest

from zipage_lang.kernels.hopper import build, library
from zipage_lang.kernels.hopper.build import (
    KernelsUnavailableError,
    cache_folder,
    library_name,
    library_path,
)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of the sources that a test may change; no library is found anywhere."""
    folder = tmp_path / "hopper"
    folder.mkdir()
    for source in build.FOLDER.glob("*.cu*"):
        shutil.copy(source, folder)
    monkeypatch.setattr(build, "FOLDER", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ZIPAGE_KERNELS", raising=False)
    return folder


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """Make a script the nvcc; it finds the file that -o names in $target."""

    def install(script):
        path = tmp_path / "bin" / "nvcc"
        path.parent.mkdir(exist_ok=True)
        head = '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ntarget=$2\n'
        path.write_text(head + script)
        path.chmod(0o755)
        monkeypatch.setattr(build.shutil, "which", lambda name: str(path))

    return install


def put(folder, content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / library_name()).write_text(content)


def test_the_name_changes_with_source_and_flags_alone(sources, monkeypatch):
    name = library_name()
    assert re.fullmatch(r"zipage_hopper_[0-9a-f]{12}\.so", name)
    (sources / "notes.txt").write_text("no source")
    assert library_name() == name
    changed = sources / "ptx.cuh"
    text = changed.read_text()
    changed.write_text(text + "\n")
    assert library_name() != name
    changed.write_text(text)
    assert library_name() == name
    changed.rename(sources / "ptx2.cuh")
    assert library_name() != name
    (sources / "ptx2.cuh").rename(changed)
    monkeypatch.setattr(build, "NVCC_FLAGS", (*build.NVCC_FLAGS, "-lineinfo"))
    assert library_name() != name


def test_a_named_folder_wins_then_what_lies_beside_the_source_then_the_cache(
    sources, tmp_path, monkeypatch, nvcc
):
    nvcc("exit 1\n")
    monkeypatch.setenv("ZIPAGE_KERNELS", str(tmp_path / "named"))
    put(cache_folder(), "cache")
    assert library_path().read_text() == "cache"
    put(sources / "prebuilt", "prebuilt")
    assert library_path().read_text() == "prebuilt"
    put(tmp_path / "named", "named")
    assert library_path().read_text() == "named"


def test_a_library_of_another_source_is_not_taken(sources, nvcc):
    nvcc('echo new > "$target"\n')
    put(cache_folder(), "old")
    (sources / "params.cuh").write_text("// another\n")
    assert library_path().read_text() == "new\n"


def test_a_missing_library_is_built_once_into_the_cache_and_told_of(sources, nvcc, caplog):
    nvcc('echo built > "$target"\n')
    with caplog.at_level(logging.WARNING):
        path = library_path()
    assert path == cache_folder() / library_name()
    assert path.read_text() == "built\n"
    assert caplog.messages[0].startswith("building our Hopper kernels: about half a minute, once")
    assert str(cache_folder()) in caplog.messages[0]
    nvcc("exit 1\n")
    assert library_path() == path


def test_without_nvcc_the_error_says_what_to_do(sources, monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(KernelsUnavailableError) as caught:
        library_path()
    for told in (library_name(), "no nvcc", "CUDA_HOME", "ZIPAGE_KERNELS"):
        assert told in str(caught.value)
    assert not cache_folder().exists()


def test_nvcc_is_looked_for_on_the_path_then_in_the_named_toolkit(sources, tmp_path, monkeypatch):
    asked = []

    def which(name):
        asked.append(name)
        return name if name.startswith(str(tmp_path)) else None

    monkeypatch.setattr(build.shutil, "which", which)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        library_path()
    assert asked == ["nvcc", str(tmp_path / "bin" / "nvcc")]


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ('echo half > "$target"\necho "error: no such thing" >&2\nexit 2\n', "no such thing"),
        ('echo half > "$target"\nkill -9 $$\n', "failed"),
        ('echo half > "$target"\nexec sleep 20\n', "took over 0.5 s"),
    ],
)
def test_a_build_that_fails_leaves_nothing_behind(sources, nvcc, monkeypatch, script, told):
    nvcc(script)
    monkeypatch.setattr(build, "BUILD_TIMEOUT_S", 0.5 if "sleep" in script else 60)
    with pytest.raises(KernelsUnavailableError, match=told):
        library_path()
    assert list(cache_folder().iterdir()) == []


def test_the_library_appears_only_when_it_is_whole(sources, nvcc, tmp_path):
    seen = tmp_path / "seen"
    nvcc(f'echo half > "$target"\nls "{cache_folder()}" > "{seen}"\necho whole >> "$target"\n')
    path = library_path()
    assert library_name() not in seen.read_text().split()
    assert path.read_text() == "half\nwhole\n"
    assert [entry.name for entry in cache_folder().iterdir()] == [library_name()]


def kind_of(argument):
    if "*" in argument:
        return ctypes.c_void_p
    return {"int": ctypes.c_int, "float": ctypes.c_float}[argument.split()[0]]


def test_python_and_c_agree_on_every_argument():
    """A wrong count or kind of arguments would not fail but write somewhere."""
    interface = "".join(
        text[text.index('extern "C"') :]
        for text in (source.read_text() for source in build.FOLDER.glob("*.cu"))
    )
    declared = {
        name: (result.strip(), arguments.split(","))
        for result, name, arguments in re.findall(
            r"^(?:extern \"C\" )?(int|const char\*) (zl_\w+)\(([^)]*)\)", interface, re.M
        )
    }
    assert declared.keys() == library._SIGNATURES.keys()
    for name, (arguments, result) in library._SIGNATURES.items():
        told_result, told = declared[name]
        assert arguments == [kind_of(one) for one in told], name
        assert result == (ctypes.c_int if told_result == "int" else ctypes.c_char_p), name


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("source", [path.name for path in sorted(build.FOLDER.glob("*.cu"))])
def test_no_kernel_spills_registers(tmp_path, source):
    flags = [flag for flag in build.NVCC_FLAGS if "fPIC" not in flag and flag != "-shared"]
    target = ["-Xptxas", "-v", "-cubin", "-o", str(tmp_path / "one.cubin")]
    command = ["nvcc", *flags, *target, str(build.FOLDER / source)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", told)
    assert len(spills) == told.count("Compiling entry function") > 0
    assert set(spills) == {("0", "0")}
