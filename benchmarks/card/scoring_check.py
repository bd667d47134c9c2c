"""The Hopper scoring kernel on the card: against float64, then its times, then what it waits for.

    python benchmarks/card/scoring_check.py [--part check|time|profile] [--only own old Triton]

Beside it are timed Triton's kernel and other builds of `scoring.cu`, the files
`.built/zipage/variants/scoring_*.so`. The profile needs `ncu`; its metrics go to
$OUT/scoring_ncu.txt, samples by instruction to $OUT/scoring_source.csv. The check and each variant
run in a process of their own with a time limit, so that a fault or a hang ends in a line of output
and what follows still runs. Knows nothing of compactions beyond their scores.
"""

import argparse
import ctypes
import functools
import glob
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))

from compaction_check import Tails, draw_tails, exact_mass, exact_similarity, safe_threshold
from kernel_timing import median_us
from kernels_b import CHUNK, SCALE, SHAPE, TAIL, THRESHOLD, World

from zipage_lang.kernels import scores
from zipage_lang.kernels.hopper import scoring

DEVICE = torch.device("cuda", 0)
CHECK_LIMIT_S, VARIANT_LIMIT_S, PROFILE_LIMIT_S = 60, 60, 60
BLOCKING = "CUDA_LAUNCH_BLOCKING"  # would hide that launches do not wait
MOST_FAULTS = 3  # after which the check ends
VARIANTS = Path(__file__).resolve().parents[2] / ".built" / "zipage" / "variants"
COPIED_BYTES = 2**32
NCU_PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
NCU_SECTIONS = (
    "SpeedOfLight",
    "LaunchStats",
    "Occupancy",
    "SchedulerStats",
    "WarpStateStats",
    "InstructionStats",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "MemoryWorkloadAnalysis_Tables",
    "SourceCounters",
)
SHOWN_METRICS = (
    r"gpu__time_duration|dram__bytes_read\.sum |dram__throughput|sm__throughput|l1tex__throughput|"
    r"lts__throughput|issue_active|warps_active|inst_executed\.sum |issue_stalled.*issue_active|"
    r"pipe_\w*tensor\w*|pipe_lsu|pipe_alu|pipe_fma|bank_conflicts|wavefronts_mem_shared|"
    r"registers_per_thread|shared_mem_per_block|data_bank|lts__t_sector_hit_rate"
)
LENS = [[256], [1], [17], [255, 256, 257], [2304, 17, 1000], [640, 33, 2100, 64, 511, 512, 2304, 1]]
OWN, TRITON = "own", "Triton"  # the library as built, and the kernel it stands for
ORDERS = ("in order", "shuffled")
NUM_REQUESTS = (1, 8)
NUM_COMPARED = 100_000  # numbers of a result
SHARED = {"none": 0.0, "few": 0.6, "half": 1.0, "all": 3.0}  # weight of a direction all have
MOST_ERROR = (1e-4, 2e-5)  # of mass and similarity
MOST_CLOSE_CALLS = 4


def worlds() -> Iterator[tuple[str, Callable[[], Tails]]]:
    """Every length and likeness once; order, holes, sizes of heads and groups take turns."""
    for turn, lens in enumerate(LENS):
        for likeness, (name, weight) in enumerate(SHARED.items()):
            kind = turn + likeness
            heads, group, head_dim = ((8, 4, 128), (2, 4, 128), (3, 3, 64), (4, 2, 128))[kind % 4]
            sizes = {"heads": heads, "group": group, "head_dim": head_dim, "shared": weight}
            words = [f"{lens} {name} similar, {heads} x {group} heads of {head_dim}"]
            words += ["in order"] * (kind % 2) + ["far apart"] * (kind % 3 == 1)
            yield ", ".join(words), functools.partial(draw_world, lens, sizes, kind)


def draw_world(lens: list[int], sizes: dict, kind: int) -> Tails:
    tails = draw_tails(lens, **sizes)
    if kind % 2:
        order = torch.arange(tails.slots.shape[1], device=DEVICE, dtype=torch.int32)
        tails.positions.copy_(order)
    if kind % 3 == 1:
        tails.positions.mul_(900_000)  # too far apart for short codes
        tails.queries.positions.mul_(900_000)
    return tails


def worst_errors(tails: Tails, threshold: float, found: tuple[Tensor, Tensor]) -> list[float]:
    """Of mass and of similarity, and how many similarities are beyond what rounding does."""
    worst = [0.0, 0.0, 0.0]
    for row, tail_len in enumerate(tails.lens):
        wanted = exact_mass(tails, row), exact_similarity(tails, row, threshold)
        for part in range(2):
            own = found[part][row, :, :tail_len].double()
            error = (own - wanted[part]).abs() / wanted[part].abs().clamp(min=1)
            error = error.nan_to_num(nan=float("inf"))
            if part == 1:  # a cosine that is the threshold but for rounding decides one key's sum
                worst[2] += int((error > MOST_ERROR[1]).sum())
                error = error[error <= MOST_ERROR[1]]
            worst[part] = max(worst[part], float(error.max()) if len(error) else 0.0)
        padding = [part[row, :, tail_len:] for part in found]
        assert all((part == 0).all() for part in padding), f"padding of {tails.lens}"
    return worst


def check() -> bool:
    """Whether all is right. After a case that ends its process, the next runs in a fresh one."""
    first, is_right = 0, True
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder) / "at"
        for _ in range(MOST_FAULTS):
            at.write_text("nothing")
            ended = run_part("cases", CHECK_LIMIT_S, "--first", str(first), "--out", str(at))
            reached = at.read_text()
            if not reached:
                return is_right and ended == "done"
            print(f"FAULT: {ended} at case {reached}", flush=True)
            is_right = False
            if reached == "nothing":
                break
            first = int(reached.split()[0]) + 1
    print("the other cases were not run")
    return False


def check_cases(first: int, at: Path) -> None:
    """Leaves in `at` the case that it is at, nothing when it has done them all."""
    is_right = True
    cases = [(name, functools.partial(check_world, name, draw)) for name, draw in worlds()]
    for number, (name, case) in enumerate([*cases, ("holes", check_holes)]):
        if number >= first:
            at.write_text(f"{number} {name}")
            is_right &= case()
    at.write_text("")
    sys.exit(0 if is_right else "some cases are wrong")


def check_world(name: str, draw: Callable[[], Tails]) -> bool:
    tails = draw()
    threshold = safe_threshold(tails)
    args = (tails.kv, tails.slots, tails.positions, tails.queries, SCALE, CHUNK, threshold)
    assert scoring.takes(tails.kv, tails.queries, CHUNK), "the library is not there"
    torch.cuda.synchronize()
    found = scoring.mass_and_similarity(*args)
    again = scoring.mass_and_similarity(*args)
    torch.cuda.synchronize()  # a fault of the kernel shows here
    repeats = all(torch.equal(one, two) for one, two in zip(found, again, strict=True))
    mass, similarity, close_calls = worst_errors(tails, threshold, found)
    is_right = mass < MOST_ERROR[0] and close_calls <= MOST_CLOSE_CALLS and repeats
    print(f"{'right' if is_right else 'WRONG'}: {name}: errors {mass:.1e} {similarity:.1e}, "
          f"{close_calls:.0f} sums off, same bits again: {repeats}", flush=True)  # fmt: skip
    return is_right


def check_holes() -> bool:
    """Holes inside a tail score 0 and change nothing else: as the tail without them, one chunk."""
    tails = draw_tails([250], heads=8, group=4, head_dim=128, shared=1.0)
    threshold = safe_threshold(tails)
    rest = (tails.queries, SCALE, CHUNK, threshold)
    whole = scoring.mass_and_similarity(tails.kv, tails.slots, tails.positions, *rest)
    spread = torch.full((1, 256), -1, device=DEVICE)
    places = torch.randperm(256, device=DEVICE)[:250].sort().values
    spread[:, places] = tails.slots
    positions = torch.zeros(1, 8, 256, dtype=torch.int32, device=DEVICE)
    positions[:, :, places] = tails.positions
    holed = scoring.mass_and_similarity(tails.kv, spread, positions, *rest)
    for one, two in zip(whole, holed, strict=True):
        torch.testing.assert_close(two[:, :, places], one, atol=2e-6, rtol=2e-5)
        assert two.sum().isclose(two[:, :, places].sum()), "a hole has a score"
    print("right: holes")
    return True


def copy_bytes_per_s() -> float:
    """Read plus written, of the faster of the driver's copy and a kernel's."""
    source = torch.zeros(COPIED_BYTES // 4, dtype=torch.float32, device=DEVICE)
    target = torch.empty_like(source)
    copies = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    fastest_us = min(median_us(copy, num_replays=5) for copy in copies)
    return 2 * COPIED_BYTES / (fastest_us * 1e-6)


def variant_names() -> list[str]:
    builds = [path.stem.removeprefix("scoring_") for path in sorted(VARIANTS.glob("scoring_*.so"))]
    return [OWN, *builds, TRITON]


def scoring_of(variant: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """What scores as `variant` does; but for Triton's kernel, `scoring.load` is set for it."""
    if variant == TRITON:
        return scores.mass_and_similarity_by_triton
    if variant != OWN:
        signature = scoring.load().zl_scoring
        library = ctypes.CDLL(str(VARIANTS / f"scoring_{variant}.so"))
        library.zl_scoring.argtypes = signature.argtypes
        library.zl_scoring.restype = signature.restype
        scoring.load = lambda: library
    return scoring.mass_and_similarity


def likenesses(world: World) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name of keys' likeness and of their order, and positions; the pool is changed in between."""
    shape = (SHAPE.num_layers * world.num_requests, SHAPE.num_kv_heads, TAIL)
    in_order = torch.arange(TAIL, dtype=torch.int32, device=DEVICE).expand(shape).contiguous()
    shuffled = torch.rand(shape, device=DEVICE).argsort(-1).int()
    shared = 0.0
    for name, weight in SHARED.items():
        world.cache.kv[:, :, 0] += weight - shared  # a common direction
        shared = weight
        yield name, in_order, shuffled


def time_all(chosen: list[str]) -> bool:
    """A line of microseconds and shares of copy bandwidth for each variant, when it is done."""
    titles = [f"{name}, {order}" for name, order in itertools.product(SHARED, ORDERS)]
    print("us of a launch (share of copy bandwidth); as many requests; which are similar, order")
    print(f"{'':18}" + "".join(f"{title:>20}" for title in titles), flush=True)
    seed, is_whole = torch.seed() % 2**31, True  # all variants score the same keys
    with tempfile.TemporaryDirectory() as folder:
        for variant in chosen:
            words = ("--variant", variant, "--seed", str(seed), "--out", folder)
            ended = run_part("variant", VARIANT_LIMIT_S, *words)
            if ended != "done":
                print(f"FAULT: {variant}: {ended}; what it has timed before:")
                is_whole = False
            show_times(Path(folder), variant, chosen[0])
    return is_whole


def show_times(folder: Path, variant: str, first: str) -> None:
    """first: the variant whose results are taken for right; beside others is how many differ."""
    for num_requests in NUM_REQUESTS:
        cells = []
        for cell in range(len(SHARED) * len(ORDERS)):
            own, other = (folder / f"{name}-{num_requests}-{cell}.pt" for name in (variant, first))
            cells.append(shown_cell(own, other) if own.exists() else "-")
        line = f"{variant:16}{num_requests:>2}" + "".join(f"{cell:>20}" for cell in cells)
        print(line, flush=True)


def shown_cell(own: Path, other: Path) -> str:
    us, share, numbers = torch.load(own)
    wanted = torch.load(other)[2] if other.exists() else numbers
    different = int((~numbers.isclose(wanted, 1e-4, 1e-5)).sum())
    is_right = different <= len(numbers) // 10_000
    return f"{us:.1f} ({share:.0%})" + ("" if is_right else f" !{different}")


def time_variant(variant: str, folder: Path) -> None:
    """Saves microseconds, share of copy bandwidth and some of the numbers, cell after cell."""
    score, bandwidth = scoring_of(variant), copy_bytes_per_s()
    for num_requests in NUM_REQUESTS:
        world = World(num_requests, 16)
        tail = world.cache.kv.flatten(0, 1), world.slots()
        cells = itertools.count()
        for _, *orders in likenesses(world):
            for at in orders:
                args = (*tail, at, world.queries(), SCALE, CHUNK, THRESHOLD)
                numbers = torch.cat([part.flatten() for part in score(*args)])
                numbers = numbers[:: len(numbers) // NUM_COMPARED + 1].cpu()
                us = median_us(functools.partial(score, *args), 4 // min(num_requests, 4))
                share = at.numel() * SHAPE.head_dim * 2 / (us * 1e-6) / bandwidth
                target = folder / f"{variant}-{num_requests}-{next(cells)}.pt"
                torch.save((us, share, numbers), target)
        del world, tail, args


def profile() -> None:
    """Three launches, none, few and half similar, in a process of their own under `ncu`."""
    found = [path for place in NCU_PLACES for path in sorted(glob.glob(place))]
    ncu = shutil.which("ncu") or (found[-1] if found else None)
    if ncu is None:
        print("ncu: not on this machine")
        return
    out = Path(os.environ.get("OUT", "/tmp"))
    report = out / "scoring.ncu-rep"
    sections = [word for section in NCU_SECTIONS for word in ("--section", section)]
    options = ["--clock-control", "none", "-k", "regex:scoring_kernel", "--launch-count", "3"]
    command = [ncu, "-f", "-o", str(report), *options, *sections]
    subprocess.run([*command, sys.executable, __file__, "--part", "launches"], check=True)
    shown = subprocess.run(
        [ncu, "-i", str(report), "--page", "raw"], check=True, capture_output=True, text=True
    ).stdout
    (out / "scoring_ncu.txt").write_text(shown)
    print("\n".join(line for line in shown.splitlines() if re.search(SHOWN_METRICS, line)))
    with (out / "scoring_source.csv").open("w") as source:
        subprocess.run([ncu, "-i", str(report), "--page", "source", "--csv"], stdout=source)


def launch_each() -> None:
    world = World(1, 16)
    tail = world.cache.kv.flatten(0, 1), world.slots()
    for name, _, shuffled in likenesses(world):
        if name != "all":
            args = (*tail, shuffled, world.queries(), SCALE, CHUNK, THRESHOLD)
            scoring.mass_and_similarity(*args)
    torch.cuda.synchronize()


def run_part(part: str, limit_s: int, *words: str) -> str:
    """Runs it in a process of its own; "done", or how else it ended."""
    environment = {name: text for name, text in os.environ.items() if name != BLOCKING}
    command = [sys.executable, __file__, "--part", part, *words]
    try:
        code = subprocess.run(command, timeout=limit_s, check=False, env=environment).returncode
    except subprocess.TimeoutExpired:
        return f"not done within {limit_s} s"
    return "done" if code == 0 else f"ended with {code}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("check", "time", "profile", *PARTS))
    parser.add_argument("--only", nargs="+", choices=variant_names(), default=variant_names())
    for option in ("--variant", "--seed", "--first", "--out"):
        parser.add_argument(option, help=argparse.SUPPRESS)  # of a process that this one starts
    args = parser.parse_args()
    if args.part in PARTS:
        torch.manual_seed(int(args.seed or torch.seed() % 2**31))
        PARTS[args.part](args)
        return
    steps = {
        "check": check,
        "time": functools.partial(time_all, args.only),
        "profile": lambda: run_part("metrics", PROFILE_LIMIT_S) == "done",
    }
    failed = [name for name, step in steps.items() if args.part in (None, name) and not step()]
    if failed:
        sys.exit(f"not right: {', '.join(failed)}")


PARTS = {  # each in a process of its own
    "cases": lambda args: check_cases(int(args.first), Path(args.out)),
    "variant": lambda args: time_variant(args.variant, Path(args.out)),
    "metrics": lambda _: profile(),
    "launches": lambda _: launch_each(),
}


if __name__ == "__main__":
    main()
