"""Builds what a start would build, ahead of it: `python -m zipage_lang.runtime.prebuild`.

Our Hopper kernels and FlashInfer's attention are compiled by nvcc, with or without a card;
Triton's kernels need the card they are for, so an engine with random weights is started once. All
stay in the user's cache.
Knows nothing of what is in the kernels.
"""

import argparse
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from zipage_lang.runtime.model_shapes import published_shape

CARD = "9.0a"  # Hopper
HEAD_DIMS = (64, 128)  # of the published shapes


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zipage_lang.runtime.prebuild")
    parser.add_argument(
        "--head-dim", type=int, action="append", help=f"build FlashInfer for it; none: {HEAD_DIMS}"
    )
    parser.add_argument(
        "--card", help=f"compute capability; none: of the card that is there, else {CARD}"
    )
    parser.add_argument(
        "--copy-to", type=Path, help="also copy the libraries into its zipage/ and flashinfer/"
    )
    parser.add_argument(
        "--model", action="append", default=[], help="on a card: Triton's kernels for this shape"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level="WARNING", format="%(message)s", stream=sys.stderr)
    try:
        for name in options.model:
            published_shape(name)
        build_libraries(options.head_dim or HEAD_DIMS, options.card, options.copy_to)
        for name in options.model:
            build_triton(name)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def build_libraries(head_dims: Sequence[int], card: str | None, copy_to: Path | None) -> None:
    """Compile what nvcc compiles: our kernels where the card is a Hopper, FlashInfer's attention
    for each head size. `copy_to` gets two folders: `zipage`, what ZIPAGE_KERNELS may name, and
    `flashinfer`, laid out as flashinfer/data/aot is."""
    import torch

    from zipage_lang.kernels.flashinfer_build import check_head_dim
    from zipage_lang.kernels.hopper.build import HOPPER

    for head_dim in head_dims:
        check_head_dim(head_dim)
    if card is not None or not torch.cuda.is_available():
        card = card or CARD
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = card  # read when FlashInfer is imported
        is_hopper = card == CARD
    else:
        is_hopper = torch.cuda.get_device_capability()[0] == HOPPER
    if is_hopper:
        build_hopper(copy_to)
    build_flashinfer(head_dims, copy_to, is_hopper)


def build_hopper(copy_to: Path | None) -> None:
    from zipage_lang.kernels.hopper.build import library_path

    library = library_path()
    print(library)
    if copy_to is not None:
        _copy(library, copy_to / "zipage")


def build_flashinfer(head_dims: Sequence[int], copy_to: Path | None, is_hopper: bool) -> None:
    import torch

    from zipage_lang.kernels.flashinfer_build import BuildError
    from zipage_lang.kernels.flashinfer_module import GENERAL
    from zipage_lang.kernels.prompt_module import FOR_HOPPER
    from zipage_lang.kernels.prompt_module import HEAD_DIMS as PROMPT_HEAD_DIMS

    for head_dim in head_dims:
        libraries = [GENERAL.build(torch.bfloat16, head_dim)]
        if is_hopper and head_dim in PROMPT_HEAD_DIMS:
            try:
                libraries.append(FOR_HOPPER.build(torch.bfloat16, head_dim))
            except BuildError as error:  # the general one serves prompts, too
                print(f"long prompts will take longer: {error}", file=sys.stderr)
        for library in libraries:
            print(library)
            if copy_to is not None:
                _copy(library, copy_to / "flashinfer" / library.stem)


def _copy(library: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy2(library, folder)


def build_triton(model: str) -> None:
    """Start an engine of this shape once, and run a request in each mode. Needs the card."""
    from zipage_lang.runtime.config import EngineConfig
    from zipage_lang.runtime.engine import Engine
    from zipage_lang.runtime.messages import AddRequest
    from zipage_lang.runtime.sampling_params import SamplingParams

    started = time.perf_counter()
    config = EngineConfig.from_options(
        model=model, load_format="dummy", dtype="bfloat16", backend="cuda", kv_mode="fixed"
    )
    engine = Engine(config)
    for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
        sampling = SamplingParams(max_tokens=4, temperature=temperature, ignore_eos=True)
        engine.handle(AddRequest(request_id=name, token_ids=list(range(9)), sampling=sampling))
    while engine.has_work:
        engine.step()
    print(f"Triton's kernels for {model}: {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
