"""Mixed work through a real server for a long time: nothing lost, nothing wrong, nothing grows.

    python benchmarks/soak.py --minutes 30 --out results.jsonl

Starts `zipage serve` on a pool that is far too small (preemption, swaps and early compactions
happen all the time), with the engine checking all laws of its scheduler every 100 steps. Clients
ask for long and short outputs, samples, stop strings and grammars; fork held states, forget to
release them, abort, and vanish; voting programs run beside them. Two fixed greedy requests are
asked again and again and must say the same each time.

They can: greedy tokens depend on what else is in a batch only where the two likeliest tokens are
closer than the rounding of a sum taken in another order, about 1e-5 in float32. So the soak begins
by asking a few texts with log-probabilities, and takes those whose closest call is the widest.
Prints, last, one JSON line; --out appends it to a file. Exit code 1 where something is amiss.
"""

import argparse
import asyncio
import datetime
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
from server_process import ServerProcess, serve_command
from soak_clients import TIMEOUT_S, Clients
from soak_watch import Watch

import zipage_lang as zipage

CHECK_EVERY = 100  # steps
SAMPLE_S, PROBE_S = 5.0, 10.0
PROBE_TEXTS = (
    *("24:6 14 3 8|", "31:25 6 4 4|", "17*23=", "128*4=", "3 12 5 7=", "9 9 2=", "48:6 8|"),
    *("Add: 17 + 25 = ", "The numbers are 4, 9 and 12. ", "a1 b2 c3 d4 e5 a", "64:8 8 1|"),
)
PROBE_LEN, NUM_PROBES = 48, 2
NUM_VOTERS = 4
# Counts that are zero where no client has work; leases of forgotten states run on for ten minutes.
MUST_BE_EMPTY = (
    "table_open_requests",
    "table_requests",
    "table_planned_steps",
    "table_compacting",
    "table_parting",
    "table_gate_waiting",
    "table_gate_users",
    "table_records",
    "table_client_streams",
    "table_client_leaving",
)
# Follows the clock, not the load: as many as were forgotten within the time of a lease.
LEASES, LEASE_S, LEASE_SPARE_S = "table_held_leases", 600.0, 60.0
MUST_HAPPEN = ("num_compactions", "num_aborted", "num_swap_outs", "num_recomputed_tokens")


@zipage.function
def voting(s: Any, question: str) -> Any:
    """Branches that answer beside each other; whoever can't change the outcome is stopped."""
    s += question

    async def answer(branch: Any) -> Any:
        branch += zipage.gen("answer", max_tokens=24, temperature=1.0)
        return (await branch["answer"])[:1]

    return zipage.vote(s, NUM_VOTERS, answer)


class Soak:
    """One server and all that is done to it."""

    def __init__(self, server: ServerProcess, options: argparse.Namespace) -> None:
        self._server, self._options = server, options
        self._programs = zipage.ServerBackend(server.url)
        self.num_probes = self.num_wrong = self.num_votes = 0
        self.margins: list[float] = []
        self.faults: list[str] = []

    async def run(self) -> dict[str, Any]:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=16)
        url, self._until = self._server.url, float("inf")
        async with httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as http:
            self._http = http
            self._clients = Clients(
                http, self._options.seed, may_adapt=not self._options.deterministic
            )
            probes = await self._pick_probes()
            self._until = time.monotonic() + 60 * self._options.minutes
            processes = {"server": self._server.process, "engine": self._server.engine}
            self._watch = Watch(processes, self._tables)
            await asyncio.gather(
                self._keep_watching(),
                self._keep_probing(probes),
                self._keep_voting(),
                *(self._keep_asking(i) for i in range(self._options.clients)),
            )
        return await asyncio.to_thread(self._result)

    # what goes on side by side

    async def _keep_asking(self, number: int) -> None:
        """One client after another; all kinds come up in turn, and each begins with another."""
        kinds = list(self._clients.kinds.items())
        turn = number
        while time.monotonic() < self._until:
            kind, ask = kinds[turn % len(kinds)]
            turn += 1 if number % 2 else 2
            try:
                await ask()
            except (httpx2.HTTPError, ValueError) as error:
                self._clients.tally.faults.append(f"{kind}: {type(error).__name__}: {error}")

    async def _keep_probing(self, probes: Mapping[str, list[int]]) -> None:
        while time.monotonic() < self._until:
            for text, expected in probes.items():
                told = await self._clients.greedy(text, PROBE_LEN)
                self.num_probes += 1
                if told != expected:
                    self.num_wrong += 1
                    self.faults.append(f"probe {text!r}: {told} is not {expected}")
            await asyncio.sleep(PROBE_S)

    async def _keep_voting(self) -> None:
        """Programs, through the library."""
        while time.monotonic() < self._until:
            question = f"{self.num_votes % 7}+{self.num_votes % 5}="
            try:
                state = await asyncio.to_thread(voting.run, question, backend=self._programs)
                if state.ret_value.winner is None:
                    self.faults.append(f"a vote without a winner: {state.ret_value.errors}")
            except Exception as error:  # whatever a program may raise is a fault, not the end
                self.faults.append(f"a program: {error!r}")
            self.num_votes += 1
            await asyncio.sleep(1.0)

    async def _keep_watching(self) -> None:
        while time.monotonic() < self._until:
            self._info = await asyncio.to_thread(self._server.info)
            self._watch.take()
            await asyncio.sleep(min(SAMPLE_S, self._options.minutes * 60 / 40))

    def _tables(self) -> dict[str, int]:
        found = {name: size for name, size in self._info.items() if name.startswith("table_")}
        del found[LEASES]
        nodes = self._info["num_plain_nodes"] + self._info["num_atomic_nodes"]
        return {**found, "num_held_requests": self._info["num_held_requests"], "tree_nodes": nodes}

    # probes

    async def _pick_probes(self) -> dict[str, list[int]]:
        """Those of PROBE_TEXTS whose closest call is the widest, and what they say."""
        told = [(await self._closest_call(text), text) for text in PROBE_TEXTS]
        picked = sorted(told, reverse=True)[:NUM_PROBES]
        self.margins = [round(margin, 4) for margin, _ in picked]
        return {text: await self._clients.greedy(text, PROBE_LEN) for _, text in picked}

    async def _closest_call(self, text: str) -> float:
        """The smallest difference between the two likeliest tokens' log-probabilities."""
        sampling = {"temperature": 0, "max_tokens": PROBE_LEN, "ignore_eos": True, "logprobs": 2}
        body = {"text": text, "sampling_params": sampling, "kv": {"mode": "off"}}
        body |= {"stream": True, "stream_format": "delta"}
        closest = float("inf")
        async with self._http.stream("POST", "/generate", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    for entry in json.loads(line.removeprefix("data: ")).get("logprobs") or ():
                        (_, first), (_, second) = entry[3]
                        closest = min(closest, first - second)
        return closest

    # the end

    def _result(self) -> dict[str, Any]:
        """Once everything has ended; what should be empty is waited for."""
        info = self._server.wait_idle(60, counts=("num_running", "num_waiting"))
        time.sleep(1.0)  # the last outputs reach the last reader
        self._server.flush_cache()
        info = self._server.info()
        tally = self._clients.tally
        faults = [*tally.faults, *self.faults, *self._watch.growing(), *self._left_behind(info)]
        return {
            "minutes": self._options.minutes,
            "num_clients": self._options.clients,
            "sent": dict(tally.sent),
            "num_sent": tally.sent.total(),
            "num_ended": tally.ended.total(),
            "num_left": tally.left.total(),
            "num_busy": tally.busy,
            "num_lost": tally.num_lost,
            "num_votes": self.num_votes,
            "num_leases": info[LEASES],
            "num_forgotten": len(self._clients.forgotten_at),
            "num_probes": self.num_probes,
            "num_wrong": self.num_wrong,
            "probe_margins": self.margins,
            **{name: info[name] for name in (*MUST_HAPPEN, "num_steps", "num_decoded_tokens")},
            "num_self_checks": info["num_self_checks"],
            "num_preemptions": info["num_preemptions"],
            **self._watch.report(),
            "faults": faults[:20],
            "num_faults": len(faults),
            "verdict": "flat" if not faults and tally.num_lost == 0 else "amiss",
        }

    def _left_behind(self, info: Mapping[str, Any]) -> list[str]:
        """What is not as a server without clients must be."""
        found = [f"{name} is {info[name]}" for name in MUST_BE_EMPTY if info[name]]
        found += [f"{name} never happened" for name in MUST_HAPPEN if not info[name]]
        since = time.monotonic() - LEASE_S - LEASE_SPARE_S
        num_forgotten = sum(at > since for at in self._clients.forgotten_at)
        if info[LEASES] > num_forgotten:
            found.append(f"{info[LEASES]} leases, but {num_forgotten} states were left to them")
        held = info["num_held"]  # blocks of forgotten states, until their leases end
        if info["num_free"] + held != info["num_blocks"]:
            found.append(f"{info['num_free']} free and {held} held of {info['num_blocks']} blocks")
        if info["num_restarts"] or info["num_malformed_messages"]:
            found.append(f"{info['num_restarts']} restarts")
        if not info["num_self_checks"]:
            found.append("the engine never checked its laws")
        return found


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="zipage-tiny-reasoner")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=12, help="requests under way at a time")
    parser.add_argument(
        "--num-blocks", type=int, default=64, help="of 16 slots; too few on purpose"
    )
    parser.add_argument("--swap-space", type=float, default=0.005, help="GiB")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="the engine's strict mode: no adaptive requests",
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, help="append the result to this file")
    return parser.parse_args(arguments)


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Start a server, soak it, end it."""
    os.environ["ZIPAGE_CHECK_EVERY"] = str(CHECK_EVERY)
    settings = {"deterministic": "true"} if options.deterministic else {}
    command = serve_command(
        options.model,
        num_blocks=options.num_blocks,
        swap_space=options.swap_space,
        dtype=options.dtype,
        backend=options.backend,
        num_threads=1,
        max_running=16,
        max_step_tokens=256,
        **settings,
    )
    with ServerProcess(command) as server:
        return asyncio.run(Soak(server.wait_ready(), options).run())


def main() -> int:
    options = parse_arguments()
    result = soak(options)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = {"cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1)}
    settings = {name: getattr(options, name) for name in ("model", "backend", "dtype", "seed")}
    line = json.dumps({"name": "soak", "at": now, **machine, **settings, **result})
    print(line)
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(line + "\n")
    return int(result["verdict"] != "flat")


if __name__ == "__main__":
    sys.exit(main())
