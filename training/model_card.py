"""The model card: what was trained on what, how the loss fell, how good it is; all from the log.

    python training/model_card.py MODEL_FOLDER LOG

Knows nothing of how any of it was measured.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from run_log import read_log

CURVE_POINTS = 16

HEAD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# zipage-tiny-reasoner

A small reasoning model whose accuracy under a compressed KV cache can be measured on any machine.
It writes long worked solutions, one character a token, to four generated kinds of problems:
`countdown` (search with backtracking), `trace` (a program's registers), `multiply` (long
multiplication) and `recall` (a fact stated once, asked for late). It knows nothing else, and is no
use outside such measurements.
"""

DATA = """\
## Data

All texts are drawn by the generators in `zipage_lang/evaluation/families`, fresh for every batch;
none is stored. Batch i of seed s is drawn from the random source `train/s/i`, held-out problems
from `held-out/s/j`, so the two never share a source. Documents are packed side by side, attention
stays inside each; only the solution's tokens count in the loss. Easy levels come more often in the
first eighth of the training; afterwards levels that are still got wrong do.
"""

FORECAST = """\
## Forecast of attention

`forecast.safetensors` is what the compression policy `zipage2` reads; engines have no other use for
it. It was fitted to 128 texts of up to 2,048 tokens that this model wrote to the 64 prompts of
`calibration.jsonl` (training split, levels 0 to 3, `training/calibration_prompts.py`), in bfloat16
on an H200, as `benchmarks/card/calibrate.sh` does.
"""


def write_model_card(folder: Path, log: Path) -> None:
    """Write README.md into the model's folder from the training's log."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "README.md").write_text(model_card(config, read_log(log)), encoding="utf-8")


def model_card(config: dict[str, Any], records: Sequence[dict[str, Any]]) -> str:
    """The card's text. records: of one log, all pieces of the training."""
    steps = [record for record in records if record["kind"] == "step"]
    parts = [HEAD, _architecture(config), DATA, _training(records, steps)]
    if steps:
        parts.append("## Loss\n\n" + _curve(steps))
    parts.extend(_scores(records))
    parts.append(FORECAST)
    return "\n".join(parts)


def _architecture(config: dict[str, Any]) -> str:
    return (
        "## Model\n\n"
        f"Qwen3 architecture: {config['num_hidden_layers']} layers, {config['hidden_size']} wide, "
        f"{config['num_attention_heads']} query and {config['num_key_value_heads']} KV heads of "
        f"{config['head_dim']}, MLP {config['intermediate_size']}, vocabulary "
        f"{config['vocab_size']} (characters), context {config['max_position_embeddings']}, tied "
        "embeddings, bfloat16. Prompts are completed as they stand (`solve ...` and a newline), "
        "or as one user message of the chat template.\n"
    )


def _training(records: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> str:
    begins = [record for record in records if record["kind"] == "begin"]
    lines = [
        "## Training",
        "",
        "By `training/train.py`, Muon and AdamW, float32 weights, from nothing.",
    ]
    for number, begin in enumerate(begins, start=1):
        shown = ", ".join(f"{name} {value}" for name, value in _telling(begin["options"]))
        lines.append(f"Piece {number}: torch {begin['torch']}, {shown}.")
    if steps:
        last = steps[-1]
        lines.append(
            f"In all {last['step']:,} steps, {last['tokens'] / 1e9:.2f} G tokens, "
            f"{last['trained_s'] / 60:.1f} minutes of steps; the last loss is {last['loss']:.4f} "
            "nats a counted token."
        )
    return "\n".join(lines) + "\n"


def _telling(options: dict[str, str]) -> Iterable[tuple[str, str]]:
    names = ("seed", "device", "minutes", "until", "steps", "batch_tokens", "rate")
    return ((name, options[name]) for name in names if options.get(name, "0") != "0")


def _curve(steps: Sequence[dict[str, Any]]) -> str:
    count = min(CURVE_POINTS, len(steps))
    chosen = [steps[round((index + 1) * len(steps) / count) - 1] for index in range(count)]
    rows = [
        (f"{r['step']:,}", f"{r['tokens'] / 1e6:,.0f}", f"{r['loss']:.4f}", f"{r['rate']:.2g}")
        for r in chosen
    ]
    return _table(("step", "M tokens", "loss", "learning rate"), rows)


def _scores(records: Sequence[dict[str, Any]]) -> list[str]:
    parts = []
    exactness = [record for record in records if record["kind"] == "exactness"]
    generation = [record for record in records if record["kind"] == "generation"]
    if generation:
        text = (
            "Right answers, written at temperature 0.6 with the full KV cache; levels go from "
            "easy to hard.\n\n"
        )
        parts.append("## Held-out accuracy\n\n" + text + _by_level(generation[-1]["accuracy"]))
    if exactness:
        text = (
            "Share of held-out solutions that sampling at temperature 0.6 would write to the "
            "letter, from the probabilities of their tokens.\n\n"
        )
        parts.append("## Exact solutions\n\n" + text + _by_level(exactness[-1]["sampled"]))
    return parts


def _by_level(table: dict[str, list[float]]) -> str:
    num_levels = max(len(values) for values in table.values())
    rows = []
    for family, values in table.items():
        shown = [f"{value:.3f}" for value in values] + [""] * (num_levels - len(values))
        rows.append((family, f"{sum(values) / len(values):.3f}", *shown))
    return _table(("family", "mean", *(f"level {level}" for level in range(num_levels))), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_model_card(Path(sys.argv[1]), Path(sys.argv[2]))
