"""A small engine under mixed work for long: nobody is forgotten, nothing drifts (issue 3, point 4).

`--soak-seconds` says how long. Every round ends with an empty engine: what it holds is counted, and
fixed greedy requests, each alone on that empty engine, must say the same as ever. Knows nothing of
speed.
"""

import dataclasses
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_support.mixed_load import MixedLoad

from zipage_lang.runtime.kv_params import KVParams

MIB = 2**20
STEPS_PER_ROUND = 120
MIN_ROUNDS, MOST_LATE = 4, 60
WARM_UP_ROUNDS = 2  # graphs are captured and buffers grow to their size in these
# How far memory may stray from the warm-up's peak before it counts as drift.
ALLOWANCES = {"allocated": 8 * MIB, "reserved": 64 * MIB, "resident": 96 * MIB}

SMALL = {
    "num_blocks": 32,  # 512 slots: preemption, early compaction and swap all happen
    "max_running": 12,
    "max_step_tokens": 128,
    "growth_reserve": 0,
    "num_query_slots": 6,
    "overlap": True,
}
# GiB that make about ten host blocks: some of those who lose their place find no room there.
CPU_SWAP_SPACE, CARD_SWAP_SPACE = 4.5e-5, 2.5e-4
CPU_MODEL = {"hidden_size": 32, "num_hidden_layers": 1, "num_key_value_heads": 2}
CARD_MODEL = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.12,
}
MUST_HAPPEN = (
    "num_preemptions",
    "num_swap_outs",
    "num_swap_ins",
    "num_early_compactions",
    "num_compactions",
    "num_aborted",
    "num_recomputed_tokens",
)
PROBE = list(range(20, 75))
PROBE_KV = {
    "off": KVParams(mode="off"),
    "fixed": KVParams(mode="fixed", budget=48, interval=16),
}


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes at the end of a round."""

    allocated: int  # by torch on the card
    reserved: int  # by torch's allocator there
    resident: int  # by this process on the host

    @classmethod
    def now(cls) -> "Held":
        gc.collect()
        has_card = torch.cuda.is_available()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            allocated=torch.cuda.memory_allocated() if has_card else 0,
            reserved=torch.cuda.memory_reserved() if has_card else 0,
            resident=pages * os.sysconf("SC_PAGE_SIZE"),
        )


def assert_flat(rounds: list[Held]) -> None:
    warm_up = max(WARM_UP_ROUNDS, len(rounds) // 4)
    for name, allowance in ALLOWANCES.items():
        sizes = [getattr(held, name) for held in rounds]
        limit = max(sizes[:warm_up]) + allowance
        assert max(sizes[warm_up:]) <= limit, (
            f"{name} memory drifts: {[size // MIB for size in sizes]} MiB"
        )


def assert_everything_is_home(engine) -> None:
    engine.scheduler.flush_cache()
    engine.scheduler.check_invariants()
    stats = engine.stats()
    found = {name: stats[name] for name in ("num_free", "num_running", "num_held_requests")}
    wanted = {"num_free": stats["num_blocks"], "num_running": 0, "num_held_requests": 0}
    assert found == wanted
    assert stats["num_free_query_slots"] == engine.limits.num_query_slots
    assert stats["num_free_host_blocks"] == engine.limits.num_host_blocks
    left = {name: size for name, size in engine.table_sizes().items() if size}
    assert not left, "tables that nobody needs any more have entries"


def probe(driver, round_name: str) -> dict[str, list[int]]:
    """Greedy tokens of one request on the empty engine, in each mode."""
    tokens = {}
    for mode, kv in PROBE_KV.items():
        name = f"probe-{mode}-{round_name}"
        driver.add(name, PROBE, kv=kv, temperature=0, max_tokens=80, ignore_eos=True)
        driver.finish()
        tokens[mode] = driver.tokens(name)
        driver.outputs.clear()
        driver.engine.scheduler.flush_cache()
    return tokens


def missing_in(engine) -> list[str]:
    stats = engine.stats()
    return [name for name in MUST_HAPPEN if stats[name] == 0]


def rounds_for(seconds: float, engine) -> Iterator[int]:
    """Numbers of rounds, until the time is over but never fewer than MIN_ROUNDS; on a slow machine
    further ones, until all that must happen has."""
    end, done = time.monotonic() + seconds, 0
    while done < MIN_ROUNDS or time.monotonic() < end or (done < MOST_LATE and missing_in(engine)):
        yield done
        done += 1


def soak(driver, seconds: float, vocab_size: int) -> None:
    engine = driver.engine
    assert 6 <= engine.limits.num_host_blocks <= 20
    load = MixedLoad(engine, seed=1, vocab_size=vocab_size, max_live=16)
    expected = probe(driver, "first")
    held: list[Held] = []
    for number in rounds_for(seconds, engine):
        load.burst(count=6, max_tokens=100)  # more than the pool holds
        for _ in range(STEPS_PER_ROUND):
            load.step()
        load.drain()
        assert_everything_is_home(engine)
        assert probe(driver, str(number)) == expected
        held.append(Held.now())
    assert_flat(held)
    stats = engine.stats()
    print({name: stats[name] for name in (*MUST_HAPPEN, "num_steps")}, load.num_ended, held[-1])
    missing = missing_in(engine)
    assert not missing, f"{missing} never happened: the soak is too easy"
    assert load.num_forked > 0


def test_mixed_work_on_a_tiny_pool_neither_loses_nor_leaks(make_tiny_model, driver, request):
    folder, _ = make_tiny_model("Qwen3", **CPU_MODEL)
    soak(
        driver(folder, backend="cpu", swap_space=CPU_SWAP_SPACE, **SMALL),
        request.config.getoption("--soak-seconds"),
        199,
    )


@pytest.mark.gpu
def test_mixed_work_on_a_card_neither_loses_nor_leaks(make_tiny_model, driver, request):
    folder, _ = make_tiny_model("Qwen3", **CARD_MODEL)
    engine = driver(folder, backend="cuda", dtype="bfloat16", swap_space=CARD_SWAP_SPACE, **SMALL)
    soak(engine, request.config.getoption("--soak-seconds"), 199)
