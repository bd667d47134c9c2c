"""FlashInfer's attention as libraries: which version, which sizes of heads, built once.

Knows nothing of what a library's kernels are told.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zipage_lang.kernels.build_progress import shown_build
from zipage_lang.kernels.setup_error import SetupError

TESTED_VERSION = "0.6.11"
HEAD_DIMS = (64, 128, 256)


class Variant(NamedTuple):
    """What a library of FlashInfer's is compiled with, which is its own way to be extended."""

    template: str  # FlashInfer's name of its kernels: "fa2" for every card, "fa3" for Hopper
    name: str  # of the variant's struct
    source: str  # that declares it
    scalars: Mapping[str, str]  # the last arguments of a run: C++ types by name


class BuildError(RuntimeError):
    """A library is not there and could not be built; the message says why."""


class Libraries:
    """Those of one variant: one for each dtype and head size.

    All raise SetupError when FlashInfer is missing, of a version not tested, or lacks the head
    size.
    """

    def __init__(self, what: str, name: str, variant: Variant, note: str) -> None:
        """
        what: a noun phrase for those who wait.
        name: what FlashInfer finds them by, beside dtype, head size and the variant's digest.
        note: how long a build takes.
        """
        self._what, self._name, self._variant, self._note = what, name, variant, note
        self._loaded: dict[tuple[torch.dtype, int], Any] = {}

    def is_built(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether a start would find it."""
        return bool(self._spec(dtype, head_dim).is_compiled)

    def build(self, dtype: torch.dtype, head_dim: int) -> Path:
        """Its file; builds it, with progress shown, where it is missing.

        Needs nvcc for that, but no card: FLASHINFER_CUDA_ARCH_LIST=9.0a names one. Raises
        BuildError when that fails.
        """
        spec = self._spec(dtype, head_dim)
        if not spec.is_compiled:
            what = f"{self._what} ({dtype}, head size {head_dim})"
            kept = f"{self._note}, once; kept in {spec.build_dir}"
            try:
                with shown_build(what, kept, spec.build_dir, num_files=len(spec.sources) + 1):
                    spec.build(verbose=False)
            except (RuntimeError, OSError) as error:  # OSError: no ninja, no place to write to
                raise BuildError(f"{what} could not be built: {first_error(error)}") from error
        return Path(spec.get_library_path())

    def load(self, dtype: torch.dtype, head_dim: int) -> Any:
        """Its module, ready to call; built where it must be. Raises as `build`."""
        if (dtype, head_dim) not in self._loaded:
            self.build(dtype, head_dim)
            self._loaded[dtype, head_dim] = self._spec(dtype, head_dim).build_and_load()
        return self._loaded[dtype, head_dim]

    def _spec(self, dtype: torch.dtype, head_dim: int) -> Any:
        """What FlashInfer would build, and where it would lie."""
        check_head_dim(head_dim)
        generate, variant = _generator(), self._variant
        kinds = (dtype, dtype, dtype, torch.int32)  # queries, pool, output, indices
        # FlashInfer finds what is built by its name alone.
        told = f"{variant.source} {dict(variant.scalars)}"
        digest = hashlib.sha256(told.encode()).hexdigest()[:8]
        dtype_name = str(dtype).removeprefix("torch.")
        return generate(
            variant.template,
            f"{self._name}_{digest}_{dtype_name}_{head_dim}",
            *kinds,
            head_dim,
            head_dim,
            additional_tensor_names=[],
            additional_tensor_dtypes=[],
            additional_scalar_names=list(variant.scalars),
            additional_scalar_dtypes=list(variant.scalars.values()),
            variant_name=variant.name,
            variant_decl=variant.source,
        )


def first_error(error: Exception) -> str:
    """One line: the compiler's first complaint, or the last line where there is none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    complaints = [line for line in lines if "error:" in line]
    return (complaints or lines[-1:] or [type(error).__name__])[0]


def check_head_dim(head_dim: int) -> None:
    """Raises SetupError where FlashInfer has no attention for heads of this size."""
    if head_dim not in HEAD_DIMS:
        raise SetupError(
            f"FlashInfer has no attention for head size {head_dim}, only for {HEAD_DIMS}; "
            "use dtype='float32' or backend='cpu'"
        )


def _generator() -> Any:
    try:
        import flashinfer
        from flashinfer.jit.attention.modules import gen_customize_batch_prefill_module
    except ImportError as error:
        raise SetupError(
            f"the cuda backend needs FlashInfer ({error}); pip install 'zipage-lang[gpu]'"
        ) from error
    if not flashinfer.__version__.startswith(TESTED_VERSION):
        raise SetupError(
            f"FlashInfer {flashinfer.__version__} is not supported; install {TESTED_VERSION}.*"
        )
    return gen_customize_batch_prefill_module
