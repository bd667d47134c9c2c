"""`zipage bench`: offline throughput on this machine, a small load by default.

Knows nothing of how the load runs.
"""

import json
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from zipage_lang.commands.completions import model_names
from zipage_lang.commands.flag_groups import ENGINE_GROUPS
from zipage_lang.commands.machine import machine_name
from zipage_lang.flags import takes_flags
from zipage_lang.one_line_errors import one_line_errors
from zipage_lang.runtime.config import CompressionConfig
from zipage_lang.runtime.kv_params import KVParams

if TYPE_CHECKING:
    from zipage_lang.commands.bench_load import Job
    from zipage_lang.frontend.llm import Engine

WARM_UP_TOKENS = 8

app = typer.Typer(add_completion=False)


@app.command()
@takes_flags(engine=ENGINE_GROUPS)
def bench(
    model: Annotated[
        str,
        typer.Argument(help="known name, folder, GGUF file or hub id", autocompletion=model_names),
    ] = "smollm2-135m",
    batch: Annotated[int, typer.Option(help="requests at once", min=1)] = 8,
    prompt_len: Annotated[int, typer.Option(help="tokens of each prompt", min=1)] = 64,
    max_tokens: Annotated[int, typer.Option(help="tokens each one draws", min=1)] = 128,
    repeats: Annotated[int, typer.Option(help="runs of each setting", min=1)] = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="a JSON line for each run, nothing else")
    ] = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Measure throughput on this machine.

    With --kv-mode fixed or adaptive, runs with that KV budget and with the full cache take turns,
    and their ratio is told. Prompts are random tokens, drawing is greedy.
    """
    with one_line_errors():
        from zipage_lang.commands.starting import started_engine

        load = Load(batch, prompt_len, max_tokens)
        with started_engine(model, engine) as running:
            _check_fits(running, load)
            if not as_json:
                typer.echo(_about(running, load))
                _note_short(engine, load)
            rates: dict[str, list[float]] = {}
            for name, result in _runs(running, _settings(engine), load, repeats):
                rates.setdefault(name, []).append(result["tok_s"])
                typer.echo(_as_json(load, result) if as_json else _line(name, result))
            if not as_json:
                typer.echo(_summary(rates))


class Load(NamedTuple):
    """How much is asked for."""

    batch: int
    prompt_len: int
    max_tokens: int


def _check_fits(engine: "Engine", load: Load) -> None:
    context, num_tokens = engine.ready.max_model_len, load.prompt_len + load.max_tokens
    if num_tokens > context:
        raise ValueError(
            f"--prompt-len and --max-tokens make {num_tokens} tokens, the model takes {context}"
        )


def _note_short(options: dict[str, Any], load: Load) -> None:
    """A run in which nothing is compacted looks like a comparison, and is none."""
    asked = CompressionConfig(**_compression(options))
    tail_len = asked.kv_budget + asked.evict_interval
    if asked.kv_mode == "fixed" and load.max_tokens < tail_len:
        typer.echo(
            f"zipage: each request draws {load.max_tokens} tokens, less than K+E={tail_len}, so "
            "nothing is compacted; raise --max-tokens or lower --kv-budget",
            err=True,
        )


def _compression(options: dict[str, Any]) -> dict[str, Any]:
    names = ("kv_mode", "kv_budget", "evict_interval", "policy", "protect")
    return {name: options[name] for name in names if name in options}


def _runs(
    engine: "Engine", settings: dict[str, KVParams], load: Load, repeats: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(setting, result) of each run; the settings take turns, after one short run of each."""
    from zipage_lang.commands.bench_load import make_job, run_job

    def job(kv: KVParams, max_tokens: int) -> "Job":
        shape = {"prompt_len": load.prompt_len, "vocab_size": engine.ready.vocab_size}
        return make_job(load.batch, max_tokens, kv, **shape)

    for kv in settings.values():
        run_job(engine, job(kv, min(WARM_UP_TOKENS, load.max_tokens)))
    for _ in range(repeats):
        for name, kv in settings.items():
            asked = job(kv, load.max_tokens)
            result = run_job(engine, asked)
            yield name, {"tok_s": asked.num_tokens / result["wall_s"], **result}


def _settings(options: dict[str, Any]) -> dict[str, KVParams]:
    """What runs, by name: the budget that was asked for, if any, and the full cache."""
    asked = CompressionConfig(**_compression(options))
    full = {"full KV": KVParams(mode="off")}
    if asked.kv_mode == "off":
        return full
    bounded = KVParams(
        mode=asked.kv_mode,
        budget=asked.kv_budget,
        interval=asked.evict_interval,
        policy=asked.policy,
        protect=asked.protect,
    )
    return {f"K={asked.kv_budget} E={asked.evict_interval}": bounded, **full}


def _about(engine: "Engine", load: Load) -> str:
    ready = engine.ready
    return (
        f"{ready.model} on {ready.backend} ({machine_name()}): {load.batch} requests at once, "
        f"{load.prompt_len} prompt tokens and {load.max_tokens} drawn each"
    )


def _line(name: str, result: dict[str, Any]) -> str:
    return (
        f"{name:>16}  {result['tok_s']:8.1f} tok/s  first token {result['ttft_ms_median']:.0f} ms, "
        f"then {result['tpot_ms_median']:.1f} ms each (p99 {result['tpot_ms_p99']:.1f}); "
        f"{result['peak_held_blocks']} blocks at most, {result['num_compactions']:.0f} compactions"
    )


def _summary(rates: dict[str, list[float]]) -> str:
    medians = {name: statistics.median(values) for name, values in rates.items()}
    told = ", ".join(f"{name} {rate:.1f} tok/s" for name, rate in medians.items())
    if len(medians) == 1:
        return f"median: {told}"
    (first, one), (second, other) = medians.items()
    return f"median: {told}; {first} is {one / other:.2f} x {second}"


def _as_json(load: Load, result: dict[str, Any]) -> str:
    values = {**load._asdict(), **result}
    return json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()})
