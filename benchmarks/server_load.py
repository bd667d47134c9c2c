"""Many streams at once against `zipage serve`: all must end properly; how long do tokens take?

    python benchmarks/server_load.py --streams 64 --seconds 120 --out results.jsonl

The load is of mixed lengths: prompts with and without a common beginning, full and bounded caches.
After it half of the clients vanish in mid-stream, and all blocks must come back. Prints latencies
and, last, one JSON object; --out appends it to a file. Exit code 1 where something is amiss.
"""

import argparse
import asyncio
import dataclasses
import datetime
import json
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
from server_process import ServerProcess, serve_command

PROMPT_LENS = (4, 24, 64, 160)
OUTPUT_LENS = (8, 32, 96, 256)
COMMON_LEN = 48  # tokens that half of the prompts begin with
BOUNDED = {"mode": "fixed", "budget": 48, "interval": 32}
PERCENTILES = (50, 90, 99)
TIMEOUT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Ask:
    """What one stream asks for. `leaves_after`: events that a vanishing client reads."""

    prompt: list[int]
    max_tokens: int
    kv: dict[str, Any] | None = None
    leaves_after: int | None = None

    def body(self) -> dict[str, Any]:
        body = {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body | ({"kv": self.kv} if self.kv else {})


@dataclasses.dataclass
class Stream:
    """What came of one Ask. Times in seconds, of `time.perf_counter`."""

    ask: Ask
    started: float
    arrivals: list[float] = dataclasses.field(default_factory=list)  # of events with text
    ended: float = 0.0
    finish_reasons: list[str] = dataclasses.field(default_factory=list)
    num_tokens: int | None = None
    is_done: bool = False  # [DONE] came, and nothing after it
    has_left: bool = False
    error: str = ""

    @property
    def fault(self) -> str:
        """What is wrong with how it ended; "" if nothing."""
        if self.error or self.has_left:
            return self.error
        if not self.is_done:
            return "no [DONE]"
        if self.finish_reasons != ["length"]:
            return f"finish reasons {self.finish_reasons}"
        if self.num_tokens != self.ask.max_tokens:
            return f"{self.num_tokens} tokens in place of {self.ask.max_tokens}"
        return ""

    def take(self, data: str) -> None:
        """One event's data."""
        self.is_done = data == "[DONE]"
        if self.is_done:
            return
        event = json.loads(data)
        if "error" in event:
            self.error = f"in the stream: {event['error']}"
            return
        if event.get("usage"):
            self.num_tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            if choice["finish_reason"]:
                self.finish_reasons.append(choice["finish_reason"])
        if event["choices"]:
            self.arrivals.append(time.perf_counter())


class Load:
    """Asks of mixed lengths, the same for the same seed. Token ids lie within the vocabulary."""

    def __init__(self, vocab_size: int, *, seed: int = 7) -> None:
        self._random = random.Random(seed)
        self._ids = range(vocab_size // 4, vocab_size // 2)
        self._common = self._draw(COMMON_LEN)

    def ask(self) -> Ask:
        common = self._common if self._random.random() < 0.5 else []
        kv = BOUNDED if self._random.random() < 1 / 3 else None
        prompt = common + self._draw(self._random.choice(PROMPT_LENS))
        return Ask(prompt, self._random.choice(OUTPUT_LENS), kv)

    def vanishing(self) -> Ask:
        """Of a client that leaves long before its stream's end."""
        leaves_after = self._random.randrange(1, 24)
        return dataclasses.replace(self.ask(), max_tokens=1024, leaves_after=leaves_after)

    def _draw(self, num_tokens: int) -> list[int]:
        return self._random.choices(self._ids, k=num_tokens)


async def read_stream(client: httpx2.AsyncClient, ask: Ask) -> Stream:
    """Ask, and read to the end or until it is time to leave."""
    stream = Stream(ask, time.perf_counter())
    try:
        async with client.stream("POST", "/v1/completions", json=ask.body()) as response:
            if response.status_code != 200:
                stream.error = f"{response.status_code}: {await response.aread()!r:.200}"
                return stream
            async for data in _data_of(response):
                stream.take(data)
                if ask.leaves_after is not None and len(stream.arrivals) >= ask.leaves_after:
                    stream.has_left = True
                    break
    except httpx2.HTTPError as error:
        stream.error = f"{type(error).__name__}: {error}"
    stream.ended = time.perf_counter()
    return stream


async def _data_of(response: httpx2.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


async def steady(url: str, load: Load, num_streams: int, seconds: float) -> list[Stream]:
    """Keep that many streams going for so long, then let all of them end."""
    until = time.perf_counter() + seconds

    async def keep_asking(client: httpx2.AsyncClient) -> list[Stream]:
        streams = [await read_stream(client, load.ask())]
        while time.perf_counter() < until:
            streams.append(await read_stream(client, load.ask()))
        return streams

    async with new_client(url, num_streams) as client:
        results = await asyncio.gather(*[keep_asking(client) for _ in range(num_streams)])
    return [stream for streams in results for stream in streams]


async def half_vanish(url: str, load: Load, num_streams: int) -> list[Stream]:
    """All begin at once; every second client leaves in mid-stream."""
    asks = [load.vanishing() if i % 2 else load.ask() for i in range(num_streams)]
    async with new_client(url, num_streams) as client:
        return list(await asyncio.gather(*[read_stream(client, ask) for ask in asks]))


def new_client(url: str, num_streams: int) -> httpx2.AsyncClient:
    """Has a connection for each stream."""
    limits = httpx2.Limits(max_connections=num_streams, max_keepalive_connections=num_streams)
    return httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits)


def cpu_seconds(server: ServerProcess) -> tuple[float, float]:
    """(HTTP side, engine) so far."""
    return sum(server.process.cpu_times()[:2]), sum(server.engine.cpu_times()[:2])


def measure(server: ServerProcess, num_streams: int, seconds: float) -> dict[str, Any]:
    """Both parts on a server that is ready and has no other clients."""
    info = server.info()
    load = Load(info["vocab_size"])
    cpu, started = cpu_seconds(server), time.perf_counter()
    streams = asyncio.run(steady(server.url, load, num_streams, seconds))
    wall_s = time.perf_counter() - started
    shares = [(now - then) / wall_s for now, then in zip(cpu_seconds(server), cpu, strict=True)]
    num_tokens = sum(stream.num_tokens or 0 for stream in streams)
    after = server.wait_idle()
    return {
        "num_streams": num_streams,
        "wall_s": round(wall_s, 1),
        "num_ended": len(streams),
        "num_tokens": num_tokens,
        "tok_s": round(num_tokens / wall_s, 1),
        **latencies(streams),
        "http_cpu_share": round(shares[0], 3),
        "engine_cpu_share": round(shares[1], 3),
        "http_cpu_us_per_token": round(shares[0] * wall_s / max(1, num_tokens) * 1e6, 1),
        "num_compactions": after["num_compactions"] - info["num_compactions"],
        "num_preemptions": after["num_preemptions"] - info["num_preemptions"],
        "faults": faults(streams),
        "vanishing": vanish(server, load, num_streams),
    }


def vanish(server: ServerProcess, load: Load, num_streams: int) -> dict[str, Any]:
    """The second part; `num_lost_blocks` is what the pool lacks once its cache is emptied."""
    num_aborted = server.info()["num_aborted"]
    streams = asyncio.run(half_vanish(server.url, load, num_streams))
    left_at = time.perf_counter()
    num_aborted = server.wait_idle()["num_aborted"] - num_aborted
    idle_s = time.perf_counter() - left_at
    server.flush_cache()
    info = server.info()
    return {
        "num_left": sum(stream.has_left for stream in streams),
        "num_stayed": sum(not stream.has_left for stream in streams),
        "num_aborted": num_aborted,
        "idle_after_s": round(idle_s, 2),
        "num_lost_blocks": info["num_blocks"] - info["num_free"],
        "faults": faults(streams),
    }


def faults(streams: Sequence[Stream]) -> list[str]:
    """What went wrong, the first few."""
    return [stream.fault for stream in streams if stream.fault][:10]


def latencies(streams: Sequence[Stream]) -> dict[str, dict[str, float]]:
    """Milliseconds: to the first token, between events, per token of a stream, to the end."""
    read = [stream for stream in streams if stream.arrivals and not stream.fault]
    gaps = [
        later - earlier
        for stream in read
        for earlier, later in zip(stream.arrivals, stream.arrivals[1:], strict=False)
    ]
    return {
        "ttft_ms": percentiles([stream.arrivals[0] - stream.started for stream in read]),
        "gap_ms": percentiles(gaps),
        "tpot_ms": percentiles(
            [(s.arrivals[-1] - s.arrivals[0]) / (s.ask.max_tokens - 1) for s in read]
        ),
        "e2e_ms": percentiles([stream.ended - stream.started for stream in read]),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """{"p50": milliseconds, ..}; empty for fewer than two values."""
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{p}": round(1000 * cuts[p - 1], 2) for p in PERCENTILES}


def is_amiss(result: dict[str, Any]) -> bool:
    """Whether anything is as it must not be."""
    vanishing = result["vanishing"]
    return bool(result["faults"] or vanishing["faults"] or vanishing["num_lost_blocks"])


def tell(result: dict[str, Any]) -> None:
    """For people."""
    print(
        f"{result['num_ended']} streams, {result['num_streams']} at once, "
        f"{result['num_tokens']} tokens in {result['wall_s']} s: {result['tok_s']} tok/s"
    )
    for name, title in (
        ("ttft_ms", "first token"),
        ("gap_ms", "between events"),
        ("tpot_ms", "per token"),
        ("e2e_ms", "whole stream"),
    ):
        values = "  ".join(f"{p} {ms:9.2f}" for p, ms in result[name].items())
        print(f"  {title:15} ms  {values}")
    print(f"  CPU: HTTP {result['http_cpu_share']:.0%}, engine {result['engine_cpu_share']:.0%}")
    left = result["vanishing"]
    print(
        f"  {left['num_left']} clients vanished, {left['num_stayed']} stayed; idle after "
        f"{left['idle_after_s']} s, {left['num_lost_blocks']} blocks lost"
    )


def record(result: dict[str, Any], out: Path | None) -> None:
    """Print the line with when and where it was measured; append it to `out`."""
    machine = {"cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1)}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    line = json.dumps({"at": now, **machine, **result})
    print(line)
    if out is not None:
        with out.open("a") as file:
            file.write(line + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="zipage-tiny-reasoner")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--kv-cache-memory", type=float, default=0.25, help="GiB")
    parser.add_argument("--out", type=Path, help="append the result to this file")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    command = serve_command(
        options.model,
        kv_cache_memory=options.kv_cache_memory,
        num_threads=1,
        max_running=options.streams,
    )
    with ServerProcess(command) as server:
        result = measure(server.wait_ready(), options.streams, options.seconds)
    tell(result)
    record({"name": "server_load", "model": options.model, **result}, options.out)
    return int(is_amiss(result))


if __name__ == "__main__":
    sys.exit(main())
