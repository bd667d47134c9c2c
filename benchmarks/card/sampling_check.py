"""Drawing and scoring on the card: against the twins on fresh inputs, then timed as graphs.

    python3 sampling_check.py                         all of it
    python3 sampling_check.py plain                   plain draws: right, time by kernel, tile sizes
    python3 sampling_check.py plain --beside FOLDER   and the times of another commit's version

FOLDER is a package: that commit's kernels/sampling.py and runtime/sampler.py and what they need of
it, importing each other from there. Knows nothing of the engine but its sampler.
"""

import argparse
import importlib
import itertools
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timing import capture, event_ms, host_us
from torch import Tensor

from zipage_lang.kernels import sampling
from zipage_lang.kernels.backend import RowSettings
from zipage_lang.kernels.reference import sampling as reference
from zipage_lang.runtime.sampler import Sampler
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.step_plan import RowSetup

DEVICE = torch.device("cuda", 0)
VOCAB, ODD_VOCAB = 151_936, 32_003
MARGIN = 1e-5  # of the total weight: what the rounding of exp may move an edge by
KINDS = ("zipf", "flat", "normal", "ties", "equal")
PLAIN = {"temperature": 1.0, "top_k": VOCAB, "top_p": 1.0, "min_p": 0.0}


class Version(NamedTuple):
    """A commit's draws."""

    name: str
    kernels: Any  # its kernels/sampling.py: as much of a backend as a sampler calls
    sampler: Any  # its Sampler


OURS = Version("this", sampling, Sampler)


def make_logits(kind: str, num_lines: int, vocab_size: int, dtype: torch.dtype) -> Tensor:
    shape = (num_lines, vocab_size)
    noise = torch.randn(shape, device=DEVICE)
    if kind == "equal":
        return torch.zeros(shape, dtype=dtype, device=DEVICE)
    if kind == "zipf":  # a language model's: the token of rank r has probability r^-1.5
        ranks = torch.rand(shape, device=DEVICE).argsort(1) + 1.0
        return (18 - 1.5 * ranks.log() + 0.3 * noise).to(dtype)
    if kind == "ties":
        return (4 * noise).round().div(2).to(dtype)
    return ((0.3 if kind == "flat" else 3.0) * noise).to(dtype)


def make_settings(num_rows: int, vocab_size: int, **fixed: float) -> RowSettings:
    """Random settings of every mixture, but for what is fixed."""

    def pick(name: str, choices: tuple[float, ...]) -> Tensor:
        if name in fixed:
            return torch.full((num_rows,), float(fixed[name]), dtype=torch.float64, device=DEVICE)
        chosen = torch.randint(len(choices), (num_rows,), device=DEVICE)
        return torch.tensor(choices, dtype=torch.float64, device=DEVICE)[chosen]

    return RowSettings(
        torch.randint(-(2**62), 2**62, (num_rows,), device=DEVICE),
        torch.randint(0, 5000, (num_rows,), device=DEVICE),
        pick("temperature", (0.0, 0.3, 0.6, 1.0, 1.7, 20.0)),
        pick("top_k", (1, 20, 50, 3000, vocab_size, vocab_size)).long(),
        pick("top_p", (1e-6, 0.5, 0.95, 0.99999, 1.0, 1.0)),
        pick("min_p", (0.0, 0.0, 0.05)),
        torch.zeros(num_rows, dtype=torch.int64, device=DEVICE),
    )


def twin_draw(logits: Tensor, settings: RowSettings, shift: float) -> Tensor:
    """What the twin draws with random numbers moved by `shift`, lines and rows being the same."""
    seeds, position, heat, top_k, top_p, min_p, _ = settings
    uniform = (reference.random_uniform(seeds, position) + shift).clamp(0, 1 - 2**-53)
    logits, vocab_size = logits.float(), logits.shape[1]
    found = logits.argmax(-1)
    is_filtered = ((top_k < vocab_size) | (top_p < 1)) & (heat > 0)
    for lines in is_filtered.nonzero()[:, 0].split(64):
        part = [x[lines] for x in (logits, heat, top_k, top_p, min_p, uniform)]
        found[lines] = reference.draw_filtered_tokens(*part, vocab_size)
    for lines in (~is_filtered & (heat > 0)).nonzero()[:, 0].split(64):
        part = [x[lines] for x in (logits, heat, min_p, uniform)]
        found[lines] = reference.draw_tokens(*part)
    return found


def check_draws(
    kind: str, num_lines: int, vocab_size: int, dtype: torch.dtype, **fixed: float
) -> None:
    logits = make_logits(kind, num_lines, vocab_size, dtype)
    settings = make_settings(num_lines, vocab_size, **fixed)
    rows = torch.arange(num_lines, device=DEVICE)
    drawn_from = RowSettings(*(part.clone() for part in settings))
    is_filtered = "top_k" not in fixed
    found, is_broken = sampling.draw_rows(logits, rows, drawn_from, vocab_size * is_filtered)
    has_moved = torch.equal(drawn_from.num_generated, settings.num_generated + 1)
    has_moved &= torch.equal(drawn_from.last_token_ids, found)
    near = torch.stack([twin_draw(logits, settings, shift) for shift in (0, -MARGIN, MARGIN)])
    is_near, is_same = (near == found).any(0), near[0] == found
    if not is_filtered:  # drawn in the order of ids, so a near tie lies between
        is_near |= (near[1] <= found) & (found <= near[2])
    num_broken = int(is_broken.sum())
    name = f"{kind:7} {num_lines:4} x {vocab_size:6} {str(dtype)[6:]:9}"
    print(
        f"  {name} same {int(is_same.sum()):4}, a near tie {int((is_near & ~is_same).sum())}",
        end="",
    )
    is_right = is_near.all() and num_broken == 0 and has_moved
    print("" if is_right else f"  WRONG ({num_broken} broken, rows moved on: {has_moved})")
    for line in (~is_near).nonzero()[:4, 0].tolist():
        setting = [part[line].item() for part in settings]
        print(
            f"    WRONG line {line}: {found[line].item()}, twin {near[:, line].tolist()} {setting}"
        )


def check_scores(kind: str, num_lines: int, vocab_size: int, dtype: torch.dtype) -> None:
    logits = make_logits(kind, num_lines, vocab_size, dtype)
    logits[:, 5:80] = -math.inf
    token_ids = torch.randint(vocab_size, (num_lines,), device=DEVICE)
    found = sampling.score_tokens(logits, token_ids, 20)
    wanted = reference.score_tokens(logits, token_ids, 20)
    is_right = all(
        torch.allclose(part.double(), twin.double(), rtol=1e-6, atol=3e-5)
        for part, twin in zip(found, wanted, strict=True)
    )
    print(f"  scores {kind:7} {num_lines:4} x {vocab_size:6}: {'right' if is_right else 'WRONG'}")


def graph_us(work: Callable[[], object]) -> float:
    return event_ms(capture(work).replay) * 1e3


def time_draws(kind: str, num_lines: int, dtype: torch.dtype, **fixed: float) -> None:
    logits, rows = (
        make_logits(kind, num_lines, VOCAB, dtype),
        torch.arange(num_lines, device=DEVICE),
    )
    settings = make_settings(num_lines, VOCAB, **{**PLAIN, **fixed})
    is_filtered = "top_k" in fixed or "top_p" in fixed
    us = graph_us(lambda: sampling.draw_rows(logits, rows, settings, VOCAB * is_filtered))
    print(f"  {kind:6} {num_lines:4} {str(dtype)[6:]:9} {us:8.1f} us  {fixed}")


def time_one_filtered_line(num_lines: int) -> None:
    """The rest draw plainly, and must hardly pay for it."""
    logits = make_logits("zipf", num_lines, VOCAB, torch.bfloat16)
    settings, rows = (
        make_settings(num_lines, VOCAB, **PLAIN),
        torch.arange(num_lines, device=DEVICE),
    )
    for filters in (0, VOCAB):
        us = graph_us(lambda filters=filters: sampling.draw_rows(logits, rows, settings, filters))
        print(
            f"  {num_lines} plain lines, {'may filter' if filters else 'none filters'}: {us:.1f} us"
        )
    settings.top_k[3], settings.top_p[3] = 20, 0.95
    us = graph_us(lambda: sampling.draw_rows(logits, rows, settings, VOCAB))
    print(f"  {num_lines} lines of which one filters: {us:.1f} us")


def time_scores(num_lines: int, num_top: int, dtype: torch.dtype) -> None:
    logits = make_logits("zipf", num_lines, VOCAB, dtype)
    token_ids = torch.randint(VOCAB, (num_lines,), device=DEVICE)
    us = graph_us(lambda: sampling.score_tokens(logits, token_ids, num_top))
    print(f"  scores {num_lines:4} {str(dtype)[6:]:9} top {num_top:2}: {us:8.1f} us")


def make_step(version: Version, num_rows: int, **fields: object) -> Callable[[], object]:
    """A step of the sampler: draw, state, copies."""
    sampler = version.sampler(
        max_rows=num_rows,
        vocab_size=VOCAB,
        eos_token_ids=(1,),
        backend=version.kernels,
        device=DEVICE,
    )
    for row in range(num_rows):
        sampler.set_up_row(RowSetup(row, (1, 2, 3), 3, SamplingParams(**fields), row))
    logits, rows = make_logits("zipf", num_rows, VOCAB, torch.bfloat16), list(range(num_rows))
    return lambda: sampler.draw(logits, rows).start_copy()


def time_sampler(num_rows: int, **fields: object) -> None:
    """On the device, and until the host goes on."""
    step = make_step(OURS, num_rows, **fields)
    us, host = event_ms(step) * 1e3, host_us(step)
    print(f"  sampler {num_rows:4}: {us:7.1f} us, host {host:7.1f} us  {fields}")


def kernel_times(step: Callable[[], object], repeats: int = 20) -> Iterator[tuple[str, float]]:
    """Each kernel and copy of a step, and its us; with its wait where it starts early."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    sums: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():
        sums[event.key[:60]] += event.self_device_time_total
    for name, us in sorted(sums.items(), key=lambda item: -item[1]):
        if us > 0:
            yield name, us / repeats


def time_plain_draws(version: Version, num_rows: int, temperature: float) -> None:
    """A draw alone, and a step of the sampler kernel by kernel."""
    logits = make_logits("zipf", num_rows, VOCAB, torch.bfloat16)
    rows = torch.arange(num_rows, device=DEVICE)
    settings = make_settings(num_rows, VOCAB, **{**PLAIN, "temperature": temperature})
    us = graph_us(lambda: version.kernels.draw_rows(logits, rows, settings, 0))
    step = make_step(version, num_rows, temperature=temperature)
    step_us, host = event_ms(step) * 1e3, host_us(step)
    print(
        f"  {version.name:5} {num_rows:4} rows at {temperature}: draw in a graph {us:6.1f} us "
        f"({logits.nbytes / us / 1e6:.2f} TB/s), sampler {step_us:6.1f}, host {host:6.1f}"
    )
    if num_rows == 192:
        for name, part_us in kernel_times(step):
            print(f"      {part_us:6.1f} us  {name}")


def try_tiles(num_rows: int) -> None:
    """The plain draw with other tiles and warps than `sampling` chose, and without early starts."""
    logits = make_logits("zipf", num_rows, VOCAB, torch.bfloat16)
    rows = torch.arange(num_rows, device=DEVICE)
    settings = make_settings(num_rows, VOCAB, **PLAIN)

    def draw() -> object:
        return sampling.draw_rows(logits, rows, settings, 0)

    chosen = sampling.TILE, sampling.MASS_WARPS, sampling.PICK_WARPS
    tries = [(4096, w, 8) for w in (1, 2, 4, 8)] + [(8192, 4, 8), (8192, 8, 16), (2048, 1, 8)]
    for tile, mass_warps, pick_warps in [*tries, (4096, 2, 4), (4096, 2, 16), (2048, 1, 4)]:
        sampling.TILE, sampling.MASS_WARPS, sampling.PICK_WARPS = tile, mass_warps, pick_warps
        us = graph_us(draw)
        print(f"  {num_rows} rows, tile {tile}, warps {mass_warps} and {pick_warps}: {us:.1f} us")
    sampling.TILE, sampling.MASS_WARPS, sampling.PICK_WARPS = chosen
    early = sampling.launch_options
    sampling.launch_options = lambda _device: {"PDL": False}
    print(f"  {num_rows} rows, as chosen but each kernel after the other: {graph_us(draw):.1f} us")
    sampling.launch_options = early


def check_plain(versions: list[Version]) -> None:
    for kind, dtype in itertools.product(KINDS, (torch.bfloat16, torch.float32)):
        for min_p in (0.0, 0.05):
            check_draws(kind, 192, VOCAB, dtype, top_k=VOCAB, top_p=1.0, min_p=min_p)
        check_draws(kind, 5, ODD_VOCAB, dtype, top_k=ODD_VOCAB, top_p=1.0)
    shapes = ((192, 1.0), (192, 0.0), (256, 1.0), (16, 1.0), (1, 1.0))
    for (num_rows, temperature), version in itertools.product(shapes, versions):
        time_plain_draws(version, num_rows, temperature)
    for num_rows in (192, 1):
        try_tiles(num_rows)


def check_all() -> None:
    print("draws against the twin")
    for kind in KINDS:
        for num_lines in (1, 7, 128, 256) if kind == "zipf" else (128,):
            check_draws(kind, num_lines, VOCAB, torch.bfloat16)
        check_draws(kind, 128, ODD_VOCAB, torch.float32)
        check_scores(kind, 32, VOCAB, torch.bfloat16)
    print("times of draw_rows, 2 to 4 launches")
    half, qwen = torch.bfloat16, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    time_draws("zipf", 128, half, temperature=0.0)
    time_draws("zipf", 128, half)
    for kind in ("zipf", "flat"):
        time_draws(kind, 128, half, min_p=0.05)
    for kind in ("zipf", "normal", "flat"):
        for fixed in (qwen, {"top_k": 50}, {"temperature": 0.6, "top_p": 0.95}, {"top_p": 0.95}):
            time_draws(kind, 128, half, **fixed)
    time_draws("zipf", 128, half, top_p=0.95, min_p=0.05)
    for num_lines in (1, 32, 256):
        time_draws("zipf", num_lines, half, **qwen)
        time_draws("zipf", num_lines, half, top_p=0.95)
    time_draws("equal", 8, half, top_p=0.95)
    time_one_filtered_line(128)
    for num_top in (0, 5, 20):
        time_scores(128, num_top, half)
    time_sampler(128, temperature=1.0)
    time_sampler(128, **qwen)
    time_sampler(128, temperature=1.0, logprobs=5)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=("all", "plain"), default="all")
    parser.add_argument("--beside", type=Path, help="another version's package")
    options = parser.parse_args()
    started = time.perf_counter()
    torch.manual_seed(int(time.time()))
    versions = [OURS]
    if options.beside is not None:
        sys.path.insert(0, str(options.beside.resolve().parent))
        modules = [f"{options.beside.name}.{name}" for name in ("sampling", "sampler")]
        kernels, sampler = map(importlib.import_module, modules)
        versions.insert(0, Version("other", kernels, sampler.Sampler))
    check_plain(versions)
    if options.what == "all":
        check_all()
    print(f"all in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
