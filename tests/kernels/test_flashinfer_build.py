"""A build of FlashInfer's that fails says the compiler's first complaint in one error."""

import types

import pytest
import torch

from zipage_lang.kernels import flashinfer_build
from zipage_lang.kernels.flashinfer_build import BuildError, Libraries, Variant, first_error
from zipage_lang.kernels.setup_error import SetupError

NINJA = """Ninja build failed. Ninja output:
ninja: Entering directory `/cache/ops'
[1/3] nvcc -Werror -c a.cu -o a.o
FAILED: a.o
a.h:52:10: fatal error: curand_kernel.h: No such file or directory
compilation terminated.
b.cu(3): error: identifier "x" is undefined
ninja: build stopped: subcommand failed.
"""


@pytest.fixture
def make_libraries(monkeypatch, tmp_path):
    """make_libraries(build) -> Libraries over a stand-in of FlashInfer's, and what it was asked."""

    def make(build):
        asked = []

        def generate(template, name, *kinds, **more):
            asked.append((template, name, more["additional_scalar_names"]))
            return types.SimpleNamespace(
                is_compiled=False,
                build_dir=tmp_path,
                sources=["a.cu"],
                build=build,
                build_and_load=lambda: name,
                get_library_path=lambda: tmp_path / f"{name}.so",
            )

        monkeypatch.setattr(flashinfer_build, "_generator", lambda: generate)
        variant = Variant("fa3", "Own", "struct Own;", {"sm_scale": "double"})
        return Libraries("attention", "ours", variant, "a minute"), asked

    return make


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError(NINJA), "a.h:52:10: fatal error: curand_kernel.h: No such file or directory"),
        (RuntimeError("no nvcc\n"), "no nvcc"),
        (FileNotFoundError(2, "No such file or directory", "ninja"), "'ninja'"),
        (PermissionError(13, "Permission denied", "/cache"), "Permission denied"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_a_build_that_fails_is_one_error_in_one_line(make_libraries, error, told):
    def build(verbose):
        raise error

    libraries, _ = make_libraries(build)
    for act in (libraries.build, libraries.load):
        with pytest.raises(BuildError, match="head size 64") as caught:
            act(torch.bfloat16, 64)
        assert told in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_library_is_named_by_all_it_was_made_of_and_loaded_once(make_libraries):
    builds = []
    libraries, asked = make_libraries(lambda verbose: builds.append(verbose))
    names = {
        libraries.load(dtype, size)
        for dtype in (torch.bfloat16, torch.float16)
        for size in (64, 128)
    }
    assert len(names) == len(builds) == 4
    assert libraries.load(torch.bfloat16, 64) in names
    assert len(builds) == 4
    assert {(template, tuple(scalars)) for template, _, scalars in asked} == {
        ("fa3", ("sm_scale",))
    }
    other, _ = make_libraries(lambda verbose: None)
    other._variant = other._variant._replace(source="struct Own {};")
    assert other.load(torch.bfloat16, 64) not in names


def test_a_head_size_that_flashinfer_lacks_is_refused(make_libraries):
    libraries, _ = make_libraries(lambda verbose: None)
    with pytest.raises(SetupError, match="no attention for head size 80"):
        libraries.is_built(torch.bfloat16, 80)


def test_the_last_line_stands_for_an_error_without_complaint():
    assert first_error(ValueError("one\n\n two \n")) == "two"
