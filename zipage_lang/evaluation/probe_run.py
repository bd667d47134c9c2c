"""Runs a probe from start to end: texts, engine, figures, results.

Knows nothing of command lines.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zipage_lang.evaluation.engine_start import facts_of, started_runner
from zipage_lang.evaluation.grid import FULL
from zipage_lang.evaluation.needle import DEPTHS, needle_figures, needle_texts
from zipage_lang.evaluation.options import EvalOptions
from zipage_lang.evaluation.perplexity import perplexity_figures, text_windows
from zipage_lang.evaluation.probe import ProbeText, score_texts
from zipage_lang.evaluation.probe_report import ProbeSummary, interval_text, summary_of, write_probe
from zipage_lang.evaluation.runner import Runner
from zipage_lang.evaluation.statistics import Interval
from zipage_lang.evaluation.sweep_progress import SweepProgress
from zipage_lang.evaluation.warm_up import warm_up
from zipage_lang.runtime.messages import LogprobEntry

Scores = Sequence[Sequence[LogprobEntry]]
Figures = Callable[[Sequence[ProbeText], Scores, Scores], dict[str, Interval]]


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """One kind: how its texts and figures are made."""

    name: str
    title: str
    make_texts: Callable[[EvalOptions, Runner], list[ProbeText]]
    figures: Figures


def run_probes(options: EvalOptions) -> list[str]:
    """Those that were asked for, under every setting; returns lines to print.

    Raises ValueError for input to be mended, ZipageError where the engine does not go on.
    """
    if "adaptive" in options.grid.modes:
        raise ValueError(
            "--perplexity and --needle compact when due, so only --mode fixed shows anything; "
            "adaptive mode compacts under pressure"
        )
    probes = [PERPLEXITY] if options.perplexity_file is not None else []
    probes += [NEEDLE] if options.asks_needle else []
    lines: list[str] = []
    with started_runner(options) as runner:
        warm_up(runner, options.grid)
        for probe in probes:
            lines += _run(probe, options, runner)
    return lines


def _run(probe: Probe, options: EvalOptions, runner: Runner) -> list[str]:
    texts = probe.make_texts(options, runner)
    lens = [len(text.token_ids) for text in texts]
    mean_len = sum(lens) / len(lens)
    settings = [FULL, *options.grid.settings(mean_len)]
    with SweepProgress() as progress:
        scores = score_texts(runner, texts, settings, progress)
    rows = [
        summary_of(setting, probe.figures(texts, scores[setting], scores[FULL]))
        for setting in settings
    ]
    facts: Mapping[str, str] = {
        "model": Path(runner.ready.model).name,
        "texts": f"{len(texts)}, {mean_len:,.0f} tokens each on average",
        **facts_of(options, runner),
    }
    paths = write_probe(options.out, probe.name, probe.title, facts, rows)
    return [*map(_line, rows), " and ".join(map(str, paths))]


def _line(row: ProbeSummary) -> str:
    where = "" if row.is_full else f" K={row.budget} E={row.interval} {row.protect}"
    figures = [f"{name} {interval_text(value)}" for name, value in list(row.figures.items())[:2]]
    return f"{row.label}{where}: {', '.join(figures)}"


def _perplexity_texts(options: EvalOptions, runner: Runner) -> list[ProbeText]:
    assert options.perplexity_file is not None
    text = options.perplexity_file.read_text(encoding="utf-8")
    bos = runner.tokenizer.bos_token_id
    token_ids = runner.tokenizer.encode(text, add_special_tokens=False)
    prefix = [] if bos is None else [bos]
    window_len = _window_len(options, runner)
    return text_windows(token_ids, window_len, options.num_problems, prefix)


def _needle_texts(options: EvalOptions, runner: Runner) -> list[ProbeText]:
    num_rounds = max(1, options.num_problems // len(DEPTHS))
    return needle_texts(runner.tokenizer, _window_len(options, runner), num_rounds, options.seed)


def _window_len(options: EvalOptions, runner: Runner) -> int:
    longest = runner.ready.max_model_len - 1
    if not 32 <= options.window_len <= longest:
        raise ValueError(f"--window {options.window_len} must be from 32 to {longest} tokens")
    return options.window_len


PERPLEXITY = Probe(
    "perplexity", "Perplexity under compression", _perplexity_texts, perplexity_figures
)
NEEDLE = Probe("needle", "Needle recall under compression", _needle_texts, needle_figures)
