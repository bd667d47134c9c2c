"""What an evaluation is asked to do, from the words of its command line.

Knows nothing of how it is done.
"""

import dataclasses
from pathlib import Path
from typing import Any

from zipage_lang.evaluation.grid import (
    Grid,
    check_choices,
    parse_amounts,
    parse_value,
    split_list,
)

MODES = ("fixed", "adaptive")
PROTECTS = ("prompt", "none")
FAMILY_MODEL = "zipage-tiny-reasoner"
OTHER_MODEL = "smollm2-135m"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """A checked command line. `model` and `engine` are EngineConfig's options."""

    families: tuple[str, ...]
    levels: str | None
    task_files: tuple[Path, ...]
    datasets: tuple[str, ...]
    data_folder: Path
    perplexity_file: Path | None
    asks_needle: bool
    window_len: int
    num_problems: int
    num_samples: int
    temperature: float
    top_p: float
    max_tokens: int | None
    seed: int
    grid: Grid
    mean_lens: dict[str, float]
    model: str
    engine: dict[str, Any]
    is_in_process: bool
    is_mixed: bool
    part: tuple[int, int]
    num_graders: int
    keeps_text: bool
    out: Path

    def __post_init__(self) -> None:
        kinds = (self.families, self.task_files, self.datasets)
        if not any(kinds) and not self.is_probe:
            raise ValueError(
                "nothing to evaluate: give --family, --task, --dataset, --perplexity or --needle"
            )
        if any(kinds) and self.is_probe:
            raise ValueError(
                "--perplexity and --needle are reports of their own; give them without tasks"
            )
        for name in ("num_problems", "num_samples", "num_graders", "window_len"):
            if getattr(self, name) < 1:
                option = name.removeprefix("num_").replace("_len", "").replace("_", "-")
                raise ValueError(f"--{option} {getattr(self, name)} must be at least 1")

    @property
    def is_probe(self) -> bool:
        """Whether known texts are scored rather than problems solved."""
        return self.perplexity_file is not None or self.asks_needle


def make_grid(policy: str, budget: str, interval: str, mode: str, protect: str) -> Grid:
    """From comma-separated lists. Raises ValueError that names the option."""
    return Grid(
        policies=tuple(item for item in split_list(policy) if item not in ("full", "off")),
        budgets=parse_amounts(budget),
        intervals=parse_amounts(interval),
        modes=check_choices("mode", split_list(mode), MODES),
        protects=check_choices("protect", split_list(protect), PROTECTS),
    )


def parse_pairs(option: str, pairs: list[str]) -> dict[str, Any]:
    """`name=value` of an option that may be given several times. Raises ValueError."""
    found = {}
    for pair in pairs:
        name, is_there, value = pair.partition("=")
        if not (name and is_there and value):
            raise ValueError(f"--{option} {pair!r} must be NAME=VALUE")
        found[name] = parse_value(value)
    return found


def parse_lengths(pairs: list[str]) -> dict[str, float]:
    """`--mean-length TASK=TOKENS`. Raises ValueError."""
    lengths = parse_pairs("mean-length", pairs)
    for name, value in lengths.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not value > 0:
            raise ValueError(f"--mean-length {name}={value} must be a number of tokens above 0")
    return {name: float(value) for name, value in lengths.items()}


def parse_part(text: str) -> tuple[int, int]:
    """`1/4`: the first of four. Raises ValueError."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise ValueError(f"--part {text!r} must be like 1/4, the first of four")
    return int(number) - 1, int(count)
