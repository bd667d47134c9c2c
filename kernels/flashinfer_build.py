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


class Library:
    """One compiled library: of a variant, a dtype and a head size."""

    def __init__(self, what: str, name: str, variant: Variant, dtype: torch.dtype, head_dim: int):
        """
        what: it is, as a phrase.
        name: that FlashInfer finds it by, together with dtype, head size and the variant's digest.

        Raises SetupError when FlashInfer is missing, of a version not tested, or lacks the head
        size.
        """
        check_head_dim(head_dim)
        generate = _generator()
        kinds = (dtype, dtype, dtype, torch.int32)  # queries, pool, output, indices
        # FlashInfer finds what is built by its name alone.
        told = f"{variant.source} {dict(variant.scalars)}"
        digest = hashlib.sha256(told.encode()).hexdigest()[:8]
        dtype_name = str(dtype).removeprefix("torch.")
        self._what = f"{what} ({dtype}, head size {head_dim})"
        self._spec: Any = generate(
            variant.template,
            f"{name}_{digest}_{dtype_name}_{head_dim}",
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

    @property
    def is_built(self) -> bool:
        """Whether a start would find it."""
        return bool(self._spec.is_compiled)

    def build(self, note: str) -> Path:
        """Its file; builds it, with progress shown, where it is missing.

        Needs nvcc for that, but no card: FLASHINFER_CUDA_ARCH_LIST=9.0a names one. Raises
        RuntimeError when that fails.

        note: how long it takes.
        """
        spec = self._spec
        if not spec.is_compiled:
            kept = f"{note}, once; kept in {spec.build_dir}"
            with shown_build(self._what, kept, spec.build_dir, num_files=len(spec.sources) + 1):
                spec.build(verbose=False)
        return Path(spec.get_library_path())

    def load(self, note: str) -> Any:
        """Its module, ready to call; built where it must be. Raises as `build`."""
        self.build(note)
        return self._spec.build_and_load()


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
