"""The memory-bandwidth limit of a decode load: an engine that only reads weights and resident KV.

Each step gives one token per running request and costs (weight bytes + resident KV bytes) over the
card's copy bandwidth. Requests are admitted in order while they fit; when the pool overflows, the
newest goes back to wait and keeps its tokens for free. Knows nothing of the engine.
"""

import dataclasses

from loads import Load

STRIDE = 8  # steps that are simulated at once
ADMIT_SHARE = 0.98  # of the pool that admissions may fill
SHARERS = 8  # requests that share a prompt's blocks


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a step reads, and how fast. Defaults: Qwen3-8B in bf16 on one H200."""

    pool_tokens: float
    weight_bytes: float = 15.14e9
    kv_bytes_per_token: float = 147_456
    bandwidth: float = 4.285e12  # bytes/s, measured device-to-device copy


@dataclasses.dataclass
class _Request:
    prompt_len: int
    num_left: int
    num_done: int = 0

    def held(self, bound: float) -> float:
        return self.prompt_len // SHARERS + min(self.num_done, bound)

    def read(self, budget: int | None, interval: int) -> float:
        if budget is None or self.num_done < budget:
            return self.prompt_len + self.num_done
        return self.prompt_len + budget + interval / 2


def limit(
    load: Load, machine: Machine, budget: int | None = None, interval: int = 256
) -> tuple[float, int]:
    """(seconds, output tokens). `budget` None: a full KV cache; else tail tokens kept."""
    bound = float("inf") if budget is None else budget + interval
    waiting = [_Request(len(prompt), num_output) for prompt, num_output in reversed(load)]
    running: list[_Request] = []
    seconds, tokens = 0.0, 0
    while waiting or running:
        _admit(waiting, running, machine, bound)
        _push_back(waiting, running, machine, bound)
        resident = sum(request.read(budget, interval) for request in running)
        step_bytes = machine.weight_bytes + resident * machine.kv_bytes_per_token
        seconds += STRIDE * step_bytes / machine.bandwidth
        tokens += STRIDE * len(running)
        for request in running:
            request.num_done += STRIDE
        running = [request for request in running if request.num_done < request.num_left]
    return seconds, tokens


def _admit(
    waiting: list[_Request], running: list[_Request], machine: Machine, bound: float
) -> None:
    used = sum(request.held(bound) for request in running)
    while waiting and used + waiting[-1].prompt_len < ADMIT_SHARE * machine.pool_tokens:
        waiting[-1].num_done = 0
        running.append(waiting.pop())
        used += running[-1].held(bound)


def _push_back(
    waiting: list[_Request], running: list[_Request], machine: Machine, bound: float
) -> None:
    while sum(r.held(bound) for r in running) + len(running) > machine.pool_tokens:
        newest = running.pop()
        newest.num_left -= newest.num_done
        waiting.append(newest)


def bound(
    load: Load, machine: Machine, budget: int | None = None, interval: int = 256
) -> tuple[float, int]:
    """(seconds, output tokens) that no order of the requests can beat.

    `limit` lets a displaced request come back with none of its KV held or read. Here every token
    that was drawn stays resident until its request ends (a bounded tail: K + E / 2 of them), so the
    steps are at least the resident tokens of all steps over the pool, and at least those of the
    longest request; and each step reads the weights, each token the KV before it.
    """
    held = read = num_tokens = longest = 0.0
    for prompt, num_output in load:
        tail = _sum_of_tails(num_output, budget, interval)
        held += tail + num_output * (len(prompt) // SHARERS)
        read += tail + num_output * len(prompt)
        num_tokens += num_output
        longest = max(longest, num_output)
    num_steps = max(held / machine.pool_tokens, longest)
    num_bytes = num_steps * machine.weight_bytes + read * machine.kv_bytes_per_token
    return num_bytes / machine.bandwidth, int(num_tokens)


def _sum_of_tails(num_output: int, budget: int | None, interval: int) -> float:
    """Resident tail tokens, summed over a request's steps."""
    if budget is None or num_output <= budget + interval:
        return num_output * (num_output + 1) / 2
    num_growing = budget + interval
    num_bounded = num_output - num_growing
    return num_growing * (num_growing + 1) / 2 + num_bounded * (budget + interval / 2)
