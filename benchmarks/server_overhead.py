"""What the server adds to a streamed token, and whether it could hold up an engine.

    python benchmarks/server_overhead.py --out results.jsonl

At one stream, in turns: the same tokens through AsyncLLM, which is the engine alone, and through
the server's routes. A stand-in for the engine keeps the pace and notes when each token leaves it;
a token's delay is from there to whoever asked. At 64 streams: CPU of the HTTP process beside the
engine's, under a real model, and its CPU per token under the stand-in without any pause. Prints a
line for each and, last, one JSON object; --out appends it to a file.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import shutil
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from server_load import Load, cpu_seconds, percentiles, record, steady
from server_process import ServerProcess, serve_command

import zipage_lang
from zipage_lang.frontend.async_llm import AsyncLLM
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.sampling_params import SamplingParams

HERE = Path(__file__).parent
PROGRAM = HERE.parent / "tests" / "server" / "server_program.py"
TOKENIZER = Path(zipage_lang.__file__).parent / "data" / "zipage-tiny-reasoner"
TEMPLATE = "{{ messages[-1].content }}"
TEXT = string.ascii_lowercase * 40  # a character a token; the stand-in says it again
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclasses.dataclass
class Times:
    """Seconds of one way of asking: each token's delay, and what lies between tokens."""

    delays: list[float] = dataclasses.field(default_factory=list)
    gaps: list[float] = dataclasses.field(default_factory=list)

    def add(self, sent_at: Sequence[float], arrivals: Sequence[float]) -> None:
        assert len(sent_at) == len(arrivals), (len(sent_at), len(arrivals))
        self.delays += [b - a for a, b in zip(sent_at, arrivals, strict=True)]
        self.gaps += [b - a for a, b in itertools.pairwise(arrivals)]

    def told(self) -> dict[str, Any]:
        return {"delay_ms": percentiles(self.delays), "gap_ms": percentiles(self.gaps)}


def engine_command(step_s: float, folder: Path) -> list[str]:
    """Starts the stand-in; `folder` holds its tokenizer."""
    return [sys.executable, str(HERE / "paced_engine.py"), repr(step_s), str(folder)]


def start_server(step_s: float, folder: Path) -> ServerProcess:
    """In front of the stand-in."""
    options = [repr({"port": 0}), repr(engine_command(step_s, folder)), "{}"]
    return ServerProcess([sys.executable, "-P", str(PROGRAM), *options])


def body_of(route: str, num_tokens: int) -> dict[str, Any]:
    """Asks for that many tokens as a stream."""
    body: dict[str, Any] = {"max_tokens": num_tokens, "stream": True}
    if route == CHAT:
        return body | {"messages": [{"role": "user", "content": TEXT}]}
    return body | {"prompt": TEXT, "add_special_tokens": False}


async def ask_engine(llm: AsyncLLM, num_tokens: int) -> list[float]:
    """When each token arrived."""
    arrivals: list[float] = []
    prompt = llm.tokenizer.encode(TEXT, False)
    async for output in llm.generate(prompt, SamplingParams(max_tokens=num_tokens)):
        now = time.perf_counter()
        arrivals += [now] * (len(output.token_ids) - len(arrivals))
    return arrivals


async def ask_server(url: str, route: str, num_tokens: int) -> list[float]:
    """When each token arrived. A bare socket: a client library's own time is not the server's."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body_of(route, num_tokens)).encode()
    head = f"POST {route} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode() + data)
    arrivals: list[float] = []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            now = time.perf_counter()
            choice = json.loads(line[6:])["choices"][0]
            text = choice["delta"].get("content", "") if route == CHAT else choice["text"]
            arrivals += [now] * len(text)
    writer.close()
    return arrivals


async def one_stream(
    llm: AsyncLLM, server: ServerProcess, num_rounds: int, num_tokens: int
) -> dict[str, Times]:
    """All ways in turns, so that a machine's moods fall on each alike; a round before is free."""
    times = {"engine": Times(), COMPLETIONS: Times(), CHAT: Times()}
    for round_index in range(num_rounds + 1):
        for way, kept in times.items():
            if way == "engine":
                arrivals = await ask_engine(llm, num_tokens)
                stats = await llm.stats()
            else:
                arrivals = await ask_server(server.url, way, num_tokens)
                stats = server.info()
            if round_index:
                kept.add([float(at) for at in str(stats["sent_at"]).split(",")], arrivals)
    return times


async def delays(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """At one stream."""
    command = engine_command(options.step_ms / 1000, folder)
    with start_server(options.step_ms / 1000, folder) as server:
        server.wait_ready()
        async with await AsyncLLM.start(EngineConfig(), command=command) as llm:
            times = await one_stream(llm, server, options.rounds, options.tokens)
    base = statistics.median(times["engine"].delays)
    result = {way: kept.told() for way, kept in times.items()}
    for way in (COMPLETIONS, CHAT):
        added = statistics.median(times[way].delays) - base
        result[way]["added_ms_p50"] = round(added * 1000, 3)
    return result


async def cpu_per_token(folder: Path, num_streams: int, num_tokens: int) -> dict[str, float]:
    """CPU microseconds a token, of AsyncLLM alone and of the whole HTTP process, at full speed."""
    async with await AsyncLLM.start(EngineConfig(), command=engine_command(0.0, folder)) as llm:
        await ask_engine(llm, 8)
        me = psutil.Process()
        before = sum(me.cpu_times()[:2])
        await asyncio.gather(*[ask_engine(llm, num_tokens) for _ in range(num_streams)])
        spent = {"engine": sum(me.cpu_times()[:2]) - before}
    for route in (COMPLETIONS, CHAT):
        with start_server(0.0, folder) as server:
            url = server.wait_ready().url
            await ask_server(url, route, 8)
            before = sum(server.process.cpu_times()[:2])
            asks = [ask_server(url, route, num_tokens) for _ in range(num_streams)]
            arrivals = await asyncio.gather(*asks)
            assert {len(each) for each in arrivals} == {num_tokens}
            spent[route] = sum(server.process.cpu_times()[:2]) - before
    scale = 1e6 / (num_streams * num_tokens)
    return {way: round(seconds * scale, 1) for way, seconds in spent.items()}


def cpu_shares(model: str, num_streams: int, seconds: float) -> dict[str, Any]:
    """Of a core, under a real model on one thread."""
    command = serve_command(model, kv_cache_memory=0.25, num_threads=1, max_running=num_streams)
    with ServerProcess(command) as server:
        load = Load(server.wait_ready().info()["vocab_size"])
        asyncio.run(steady(server.url, load, num_streams, 0.0))
        before, started = cpu_seconds(server), time.perf_counter()
        streams = asyncio.run(steady(server.url, load, num_streams, seconds))
        wall_s = time.perf_counter() - started
        http_s, engine_s = (
            now - then for now, then in zip(cpu_seconds(server), before, strict=True)
        )
    num_tokens = sum(stream.num_tokens or 0 for stream in streams)
    return {
        "model": model,
        "num_streams": num_streams,
        "tok_s": round(num_tokens / wall_s, 1),
        "http_share": round(http_s / wall_s, 3),
        "engine_share": round(engine_s / wall_s, 3),
        "http_of_both": round(http_s / (http_s + engine_s), 3),
        "http_us_per_token": round(http_s / num_tokens * 1e6, 1),
        "engine_us_per_token": round(engine_s / num_tokens * 1e6, 1),
    }


def make_tokenizer_folder(folder: Path) -> Path:
    """The bundled tokenizer with a chat template that is the last message alone."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = make_tokenizer_folder(Path(name))
        one = asyncio.run(delays(folder, options))
        spent = asyncio.run(cpu_per_token(folder, options.streams, options.tokens))
    result = {
        "step_ms": options.step_ms,
        "one_stream": one,
        "cpu_us_per_token": spent,
    }
    if options.seconds > 0:
        result["under_a_model"] = cpu_shares(options.model, options.streams, options.seconds)
    return result


def tell(result: dict[str, Any]) -> None:
    """For people."""
    print(f"one stream, a token every {result['step_ms']} ms:")
    for way, told in result["one_stream"].items():
        added = f"  added {told['added_ms_p50']:.3f} ms" if "added_ms_p50" in told else ""
        print(f"  {way:22} delay ms {told['delay_ms']}  gap ms {told['gap_ms']}{added}")
    print(f"CPU a token at full speed, microseconds: {result['cpu_us_per_token']}")
    if "under_a_model" in result:
        print(f"under a model: {result['under_a_model']}")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step-ms", type=float, default=8.0, help="the stand-in's pace")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream; at most 1000")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="under a model; 0: not")
    parser.add_argument("--model", default="zipage-tiny-reasoner")
    parser.add_argument("--out", type=Path, help="append the result to this file")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_arguments()
    result = measure(options)
    tell(result)
    record({"name": "server_overhead", **result}, options.out)


if __name__ == "__main__":
    main()
