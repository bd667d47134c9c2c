"""The Hopper scoring kernel on the card: against float64, then its times, then what it waits for.

    python benchmarks/card/scoring_check.py [--part check|time|profile]

Beside it are timed Triton's kernel and other builds of `scoring.cu`, the files
`.built/zipage/variants/scoring_*.so`. The profile needs `ncu`; its metrics go to
$OUT/scoring_ncu.txt, samples by instruction to $OUT/scoring_source.csv. Each part runs in a process
of its own with a time limit, so that a hang ends in a line of output. Knows nothing of compactions
beyond their scores.
"""

import argparse
import ctypes
import functools
import glob
import os
import re
import shutil
import subprocess
import sys
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
LIMITS_S = {"check": 45, "time": 60, "profile": 60}
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
SHARED = {"none": 0.0, "few": 0.6, "half": 1.0, "all": 3.0}  # weight of a direction all have
MOST_ERROR = (1e-4, 2e-5)  # of mass and similarity
MOST_CLOSE_CALLS = 4


def worlds() -> Iterator[tuple[str, Tails]]:
    """Every length and likeness once; order, holes, sizes of heads and groups take turns."""
    for turn, lens in enumerate(LENS):
        for likeness, (name, weight) in enumerate(SHARED.items()):
            kind = turn + likeness
            heads, group, head_dim = ((8, 4, 128), (2, 4, 128), (3, 3, 64), (4, 2, 128))[kind % 4]
            tails = draw_tails(lens, heads=heads, group=group, head_dim=head_dim, shared=weight)
            words = [f"{lens} {name} similar, {heads} x {group} heads of {head_dim}"]
            if kind % 2:
                order = torch.arange(tails.slots.shape[1], device=DEVICE, dtype=torch.int32)
                tails.positions.copy_(order)
                words.append("in order")
            if kind % 3 == 1:
                tails.positions.mul_(900_000)  # too far apart for short codes
                tails.queries.positions.mul_(900_000)
                words.append("far apart")
            yield ", ".join(words), tails


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


def check() -> None:
    failed = 0
    for name, tails in worlds():
        threshold = safe_threshold(tails)
        args = (tails.kv, tails.slots, tails.positions, tails.queries, SCALE, CHUNK, threshold)
        assert scoring.takes(tails.kv, tails.queries, CHUNK), "the library is not there"
        found = scoring.mass_and_similarity(*args)
        again = scoring.mass_and_similarity(*args)
        repeats = all(torch.equal(one, two) for one, two in zip(found, again, strict=True))
        mass, similarity, close_calls = worst_errors(tails, threshold, found)
        is_right = mass < MOST_ERROR[0] and close_calls <= MOST_CLOSE_CALLS and repeats
        failed += not is_right
        print(f"{'right' if is_right else 'WRONG'}: {name}: errors {mass:.1e} {similarity:.1e}, "
              f"{close_calls:.0f} sums off, same bits again: {repeats}", flush=True)  # fmt: skip
    assert failed == 0, f"{failed} cases are wrong"
    check_holes()


def check_holes() -> None:
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


def copy_bytes_per_s() -> float:
    """Read plus written, of the faster of the driver's copy and a kernel's."""
    source = torch.zeros(COPIED_BYTES // 4, dtype=torch.float32, device=DEVICE)
    target = torch.empty_like(source)
    copies = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    fastest_us = min(median_us(copy, num_replays=5) for copy in copies)
    return 2 * COPIED_BYTES / (fastest_us * 1e-6)


def variants() -> dict[str, Callable[[], ctypes.CDLL]]:
    """By name, what stands for `scoring.load`."""
    found = {"own": scoring.load}
    signature = scoring.load().zl_scoring
    for path in sorted(VARIANTS.glob("scoring_*.so")):
        library = ctypes.CDLL(str(path))
        library.zl_scoring.argtypes = signature.argtypes
        library.zl_scoring.restype = signature.restype
        found[path.stem.removeprefix("scoring_")] = functools.partial(lambda own: own, library)
    return found


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


def time_all() -> None:
    bandwidth, loads = copy_bytes_per_s(), variants()
    print(f"copy {bandwidth / 1e12:.3f} TB/s; us of a launch, (share of that)")
    print(f"{'':36}" + "".join(f"{name:>20}" for name in (*loads, "Triton")))
    for num_requests in (1, 8):
        world = World(num_requests, 16)
        tail = world.cache.kv.flatten(0, 1), world.slots()
        for name, *orders in likenesses(world):
            for order, at in zip(("in order", "shuffled"), orders, strict=True):
                args = (*tail, at, world.queries(), SCALE, CHUNK, THRESHOLD)
                key_bytes = at.numel() * SHAPE.head_dim * 2
                cells = time_variants(args, loads, 4 // min(num_requests, 4))
                shares = [key_bytes / (us * 1e-6) / bandwidth for us in cells]
                shown = [
                    f"{us:11.1f} ({share:5.1%})" for us, share in zip(cells, shares, strict=True)
                ]
                title = f"  {num_requests} requests, {name} similar, {order}"
                print(f"{title:36}" + "".join(f"{cell:>20}" for cell in shown), flush=True)
        del world, tail, args


def time_variants(
    args: tuple, loads: dict[str, Callable[[], ctypes.CDLL]], calls_per_graph: int
) -> list[float]:
    """Microseconds of each variant, then of Triton's kernel."""
    own_load, times, first = scoring.load, [], None
    for name, load in loads.items():
        scoring.load = load
        found = scoring.mass_and_similarity(*args)
        first = first or found
        different = sum(
            int((~a.isclose(b, 1e-4, 1e-5)).sum()) for a, b in zip(first, found, strict=True)
        )
        if different > args[2].numel() // 10_000:
            print(f"  WRONG: {different} numbers of {name} differ")
        call = functools.partial(scoring.mass_and_similarity, *args)
        times.append(median_us(call, calls_per_graph))
    scoring.load = own_load
    call = functools.partial(scores.mass_and_similarity_by_triton, *args)
    return [*times, median_us(call, calls_per_graph)]


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


PARTS = {"check": check, "time": time_all, "profile": profile, "launches": launch_each}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS)
    part = parser.parse_args().part
    if part is not None:
        torch.manual_seed(torch.seed() % 2**31)  # fresh inputs each time
        PARTS[part]()
        return
    for name, limit_s in LIMITS_S.items():
        command = [sys.executable, __file__, "--part", name]
        try:
            code = subprocess.run(command, timeout=limit_s, check=False).returncode
        except subprocess.TimeoutExpired:
            sys.exit(f"{name}: not done within {limit_s} s")
        if code != 0:
            sys.exit(f"{name}: failed with {code}")


if __name__ == "__main__":
    main()
