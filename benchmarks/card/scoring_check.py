"""The Hopper scoring kernel on the card: against float64 first, then its times beside Triton's.

    python benchmarks/card/scoring_check.py

Each part runs in a process of its own with a time limit, so that a hang ends in a line of output.
Knows nothing of compactions beyond their scores.
"""

import argparse
import functools
import subprocess
import sys
from collections.abc import Iterator
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
LIMITS_S = {"check": 45, "time": 45}
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
    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / (median_us(lambda: target.copy_(source)) * 1e-6)


def time_all() -> None:
    bandwidth = copy_bytes_per_s()
    print(f"copy {bandwidth / 1e12:.3f} TB/s; us of a launch, share of that, Triton's us")
    for num_requests in (1, 8):
        world = World(num_requests, 16)
        kv, slots, queries = world.cache.kv.flatten(0, 1), world.slots(), world.queries()
        shape = (len(slots), SHAPE.num_kv_heads, TAIL)
        in_order = torch.arange(TAIL, dtype=torch.int32, device=DEVICE).expand(shape).contiguous()
        shuffled = torch.rand(shape, device=DEVICE).argsort(-1).int()
        num_bytes = in_order.numel() * SHAPE.head_dim * 2
        shared = 0.0
        for name, weight in SHARED.items():
            world.cache.kv[:, :, 0] += weight - shared  # a common direction
            shared = weight
            for order, at in (("in order", in_order), ("shuffled", shuffled)):
                args = (kv, slots, at, queries, SCALE, CHUNK, THRESHOLD)
                us = median_us(functools.partial(scoring.mass_and_similarity, *args))
                old = median_us(functools.partial(scores.mass_and_similarity, *args))
                share = num_bytes / (us * 1e-6) / bandwidth
                print(f"  {num_requests} requests, {name:4} similar, {order}: {us:8.1f} us "
                      f"{share:6.1%} {old:8.1f} us", flush=True)  # fmt: skip
        del world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=LIMITS_S)
    part = parser.parse_args().part
    if part is None:
        for name, limit_s in LIMITS_S.items():
            command = [sys.executable, __file__, "--part", name]
            try:
                code = subprocess.run(command, timeout=limit_s, check=False).returncode
            except subprocess.TimeoutExpired:
                sys.exit(f"{name}: not done within {limit_s} s")
            if code != 0:
                sys.exit(f"{name}: failed with {code}")
        return
    torch.manual_seed(torch.seed() % 2**31)  # fresh inputs each time
    if part == "check":
        check()
    else:
        time_all()


if __name__ == "__main__":
    main()
