"""Compaction on the card: against float64 and the CPU twins first, then its device and host time.

    python benchmarks/card/compaction_check.py

Knows nothing of the engine.
"""

import dataclasses
import functools
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.jit import JITFunction

sys.path.append(str(Path(__file__).resolve().parent.parent))

from kernel_timing import Case, measure, median_us
from kernels_b import CHUNK, SCALE, SHAPE, TAIL, THRESHOLD, WINDOW, CompactionKernels, World

from zipage_lang.kernels import blend, scores
from zipage_lang.kernels.backend import ScoreBlend, TailQueries, TailRequests
from zipage_lang.kernels.cpu_backend import CpuBackend
from zipage_lang.kernels.reference.scores import gather_keys
from zipage_lang.runtime.compactor import Compactor
from zipage_lang.runtime.kv_cache import KVCache
from zipage_lang.runtime.kv_compressor import KVCompressor
from zipage_lang.runtime.policies.random import Random
from zipage_lang.runtime.policies.zipage import Zipage
from zipage_lang.runtime.step_plan import Compaction

DEVICE = torch.device("cuda", 0)
RAGGED = [[17], [255, 256, 257], [2304, 17, 1000], [640, 33, 2100, 64, 511, 512, 2304, 1]]
MOST_ROUNDING = 2e-5
REQUESTS, REPEATS = (1, 2, 4, 8), 12


# --- scores against float64 ---------------------------------------------------------------------


@dataclasses.dataclass
class Tails:
    """Ragged rows on shuffled slots; everything else in the pool is NaN."""

    kv: Tensor
    slots: Tensor
    positions: Tensor
    queries: TailQueries
    lens: list[int]


def draw_tails(lens: list[int], heads: int, group: int, head_dim: int, shared: float) -> Tails:
    """shared: weight of a direction that all keys have in common; at 1 half of them are similar."""
    used, longest = sum(lens), max(lens)
    order = torch.randperm(used + 40, device=DEVICE)
    num_blocks = -(-(used + 40) // 16)
    kv = torch.full((num_blocks, 2, 16, heads, head_dim), float("nan"), device=DEVICE)
    slots = torch.full((len(lens), longest), -1, device=DEVICE)
    start = 0
    for row, tail_len in enumerate(lens):
        own = order[start : start + tail_len]
        start += tail_len
        slots[row, :tail_len] = own
        common = shared * torch.randn(1, 1, heads, head_dim, device=DEVICE)
        drawn = torch.randn(tail_len, 2, heads, head_dim, device=DEVICE) + common
        kv[own // 16, :, own % 16] = drawn
    positions = torch.rand(len(lens), heads, longest, device=DEVICE).argsort(-1).int()
    ring = torch.randn(len(lens) * WINDOW, heads * group, head_dim, device=DEVICE).bfloat16()
    lse = torch.randn(len(ring), heads * group, device=DEVICE) + 8
    entries = torch.arange(len(ring), device=DEVICE).view(len(lens), WINDOW)
    at = torch.tensor(lens, device=DEVICE)[:, None] - 1 - torch.arange(WINDOW, device=DEVICE)
    return Tails(kv.bfloat16(), slots, positions, TailQueries(ring, lse, entries, at), lens)


def safe_threshold(tails: Tails) -> float:
    """Of some near 0.5, the one farthest from every cosine, so that no rounding decides."""
    unit = F.normalize(gather_keys(tails.kv, tails.slots).double(), dim=-1)
    cosines = [(part @ part.mT).flatten() for part in unit.split(CHUNK, dim=2)]
    cosine = torch.cat(cosines)
    near = cosine[(cosine - 0.5).abs() < 2e-3].sort().values
    if len(near) < 2:
        return 0.5
    gaps = near.diff()
    widest = gaps.argmax()
    return float(near[widest] + gaps[widest] / 2)


def exact_mass(tails: Tails, row: int) -> Tensor:
    """float64 [heads, tail_len]."""
    ring, lse, entries, at = tails.queries
    keys = gather_keys(tails.kv, tails.slots[row : row + 1])[0, :, : tails.lens[row]].double()
    heads = keys.shape[0]
    q = ring[entries[row]].double().unflatten(1, (heads, -1))  # [queries, heads, group, dim]
    logits = torch.einsum("qhgd,htd->hqgt", q, keys) * (SCALE * scores._LOG2_E)
    shares = lse[entries[row]].double().unflatten(1, (heads, -1)).permute(1, 0, 2)[..., None]
    share = torch.exp2(logits - shares).amax(2)  # [heads, queries, tail_len]
    seen = tails.positions[row, :, None, : tails.lens[row]] <= at[row][None, :, None]
    return (share * seen).sum(1) / len(at[row])


def exact_similarity(tails: Tails, row: int, threshold: float) -> Tensor:
    """float64 [heads, tail_len]."""
    keys = gather_keys(tails.kv, tails.slots[row : row + 1])[0, :, : tails.lens[row]].double()
    parts = []
    for start in range(0, tails.lens[row], CHUNK):
        unit = F.normalize(keys[:, start : start + CHUNK], dim=-1)
        at = tails.positions[row, :, start : start + unit.shape[1]]
        cosine = unit @ unit.mT
        cosine.diagonal(dim1=1, dim2=2).zero_()
        age = torch.where(cosine > threshold, at[:, :, None] + 1, 0)  # [heads, i, j]
        newest, index = age.max(dim=1, keepdim=True)
        dropped = cosine.gather(1, index).masked_fill(newest == 0, 0.0)
        cosine.scatter_add_(1, index, -dropped)
        parts.append(cosine.sum(2) / unit.shape[1])
    return torch.cat(parts, dim=1)


def check_scores() -> None:
    for lens in RAGGED:
        for shared in (0.0, 0.6, 1.0, 3.0):
            tails = draw_tails(lens, heads=8, group=4, head_dim=128, shared=shared)
            threshold = safe_threshold(tails)
            args = (tails.kv, tails.slots, tails.positions, tails.queries, SCALE)
            mass, similarity = scores.mass_and_similarity(*args, CHUNK, threshold)
            worst, close_calls = [0.0, 0.0], 0
            for row, tail_len in enumerate(lens):
                found = mass[row, :, :tail_len].double(), similarity[row, :, :tail_len].double()
                wanted = exact_mass(tails, row), exact_similarity(tails, row, threshold)
                error = [
                    (a - b).abs() / b.abs().clamp(min=1) for a, b in zip(found, wanted, strict=True)
                ]
                # A cosine that is the threshold but for rounding changes the sum of one key.
                close_calls += int((error[1] > MOST_ROUNDING).sum())
                error[1] = error[1][error[1] <= MOST_ROUNDING]
                error = [float(part.max()) for part in error]
                worst = [max(pair) for pair in zip(worst, error, strict=True)]
                padding = mass[row, :, tail_len:], similarity[row, :, tail_len:]
                assert all((part == 0).all() for part in padding), f"padding of {lens}"
            again = scores.mass_and_similarity(*args, CHUNK, threshold)
            repeats = torch.equal(again[0], mass) and torch.equal(again[1], similarity)
            print(f"scores {lens} shared {shared}: error {worst[0]:.1e} {worst[1]:.1e}, "
                  f"{close_calls} close calls, same bits again: {repeats}")  # fmt: skip
            assert worst[0] < 1e-4, worst
            assert close_calls <= 4, f"{close_calls} sums are off"
            assert repeats, lens


# --- whole compactions against the CPU backend --------------------------------------------------


def draw_caches(lens: list[int], dtype: torch.dtype) -> tuple[KVCache, KVCache, list[Compaction]]:
    """The same random cache twice, and one compaction per request; every other one a repeat."""
    shape = dataclasses.replace(SHAPE, num_layers=3, dtype=dtype)
    tables, next_block = [], 1
    for tail_len in lens:
        count = -(-(tail_len + 5) // 16)
        tables.append(tuple(range(next_block, next_block + count)))
        next_block += count
    sizes = {"num_blocks": next_block, "block_size": 16, "num_query_slots": len(lens)}
    cpu, card = (
        KVCache(shape, **sizes, window=WINDOW, device=torch.device(kind))
        for kind in ("cpu", DEVICE)
    )
    cpu.kv.normal_()
    cpu.queries.normal_()
    cpu.query_lse.fill_(8.0)
    cpu.score.uniform_()
    cpu.position.copy_(
        torch.rand(cpu.position.flatten(1, 2).shape).argsort(1).view_as(cpu.position)
    )
    for name in ("kv", "score", "position", "queries", "query_lse"):
        getattr(card, name).copy_(getattr(cpu, name))
    items = []
    for row, (tail_len, table) in enumerate(zip(lens, tables, strict=True)):
        keep = max(1, tail_len * 8 // 9)
        items.append(
            Compaction(
                ident=row,
                row=row,
                policy="zipage",
                protected_len=5,
                tail_len=tail_len,
                num_keep=keep,
                stateful_len=keep if row % 2 else 0,
                logical_len=10**6 + tail_len,
                query_slot=row,
                num_queries=WINDOW,
                seed=row,
                block_ids_before=table,
                block_ids=table[: -(-(keep + 5) // 16)],
                block_copies=(),
            )
        )
    return cpu, card, items


def check_compactions() -> None:
    for lens in RAGGED:
        for dtype in (torch.bfloat16, torch.float32):
            for policy in (Zipage(), Random()):
                cpu, card, items = draw_caches(lens, dtype)
                items = [dataclasses.replace(item, policy=policy.name) for item in items]
                names = {policy.name: policy}
                KVCompressor(cpu, CpuBackend(), names).run(tuple(items))
                KVCompressor(card, CompactionKernels(), names).run(tuple(items))
                different = (cpu.position != card.position.cpu()).float().mean().item()
                kv = (cpu.kv != card.kv.cpu()).float().mean().item()
                print(f"compaction {policy.name} {dtype} {lens}: {different:.1e} of the positions "
                      f"and {kv:.1e} of K and V differ from the CPU's")  # fmt: skip
                assert different < 2e-3, "more than a few close calls"
                assert policy.name == "zipage" or different == 0, "lots must not differ"


# --- times --------------------------------------------------------------------------------------


class Launches:
    """Counts the Triton launches inside a `with`."""

    def __enter__(self) -> "Launches":
        self.count, self._run = 0, JITFunction.run

        @functools.wraps(self._run)
        def counted(*args: object, **kwargs: object) -> object:
            self.count += 1
            return self._run(*args, **kwargs)

        JITFunction.run = counted
        return self

    def __exit__(self, *_: object) -> None:
        JITFunction.run = self._run


def time_scoring(world: World) -> None:
    kv, slots, queries = world.cache.kv.flatten(0, 1), world.slots(), world.queries()
    shape = (len(slots), SHAPE.num_kv_heads, TAIL)
    positions = torch.arange(TAIL, dtype=torch.int32, device=DEVICE).expand(shape).contiguous()
    key_bytes = positions.numel() * SHAPE.head_dim * 2
    shuffled = torch.rand(shape, device=DEVICE).argsort(-1).int()
    shared = 0.0
    for name, weight in (("none", 0.0), ("few", 0.6), ("half", 1.0), ("all", 3.0)):
        world.cache.kv[:, :, 0] += weight - shared  # a common direction
        shared = weight
        for order, at in (("in order", positions), ("shuffled", shuffled)):
            call = functools.partial(
                scores.mass_and_similarity, kv, slots, at, queries, SCALE, CHUNK, THRESHOLD
            )
            measure(Case(f"scoring, {name} similar, {order}", call, key_bytes))
    mass_only = functools.partial(scores.attention_mass, kv, slots, positions, queries, SCALE)
    measure(Case("attention mass alone", mass_only, key_bytes))


def time_parts(world: World) -> None:
    """Laying out, choosing and moving, each inside a graph."""
    cache, backend = world.cache, CompactionKernels()
    compressor = KVCompressor(cache, backend, {"zipage": Zipage()})
    found = {}

    class Spy(CompactionKernels):
        @staticmethod
        def expand_tails(requests: TailRequests, *args: object) -> object:
            found["expand"] = functools.partial(backend.expand_tails, requests, *args)
            return found["expand"]()

        @staticmethod
        def compact_blend(*args: object) -> None:
            assert isinstance(args[4], ScoreBlend)
            found["choose and move"] = functools.partial(blend.compact_blend, *args)
            found["choose and move"]()

    compressor = KVCompressor(cache, Spy(), {"zipage": Zipage()})
    compressor.run(world.compactions(0))
    for name, call in found.items():
        print(f"  {name:36} {median_us(call):10.2f} us")


def time_compactions(world: World) -> tuple[float, float, float, int]:
    """Median us: on the device, of the host, of the host with stream and events; and launches."""
    compressor = KVCompressor(world.cache, CompactionKernels(), {"zipage": Zipage()})
    compactor = Compactor(compressor, DEVICE)
    device_us, host_us, launch_us = [], [], []
    for turn in range(REPEATS):
        items = world.compactions(turn)
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin = time.perf_counter()
        start.record()
        compressor.run(items)
        end.record()
        host_us.append((time.perf_counter() - begin) * 1e6)
        end.synchronize()
        device_us.append(start.elapsed_time(end) * 1e3)
        begin = time.perf_counter()
        compactor.launch(items)
        launch_us.append((time.perf_counter() - begin) * 1e6)
        compactor.wait()
    with Launches() as launches:
        compressor.run(world.compactions(REPEATS))
    medians = [statistics.median(times[3:]) for times in (device_us, host_us, launch_us)]
    return medians[0], medians[1], medians[2], launches.count


def main() -> None:
    torch.manual_seed(0)
    check_scores()
    check_compactions()
    for num_requests in REQUESTS:
        world = World(num_requests, 16)
        device, host, launch, count = time_compactions(world)
        print(f"{num_requests} requests: device and host {device:.0f} us, host {host:.0f} us, "
              f"with stream and events {launch:.0f} us, {count} launches and 1 copy")  # fmt: skip
        if num_requests in (1, 8):
            time_parts(world)
            time_scoring(world)
        del world
    print("aim: scoring at 70% of copy bandwidth; 300 us on the device and 150 us of host each")


if __name__ == "__main__":
    main()
