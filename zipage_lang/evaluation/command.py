"""`zipage eval`: the command's options, checked and handed on.

Knows nothing of how anything is evaluated; what does is loaded once the options are right, since it
brings numpy and, for an engine in this process, torch.
"""

import signal
from pathlib import Path
from typing import Annotated

import typer

from zipage_lang.evaluation.grid import split_list
from zipage_lang.evaluation.options import (
    FAMILY_MODEL,
    OTHER_MODEL,
    EvalOptions,
    make_grid,
    parse_lengths,
    parse_pairs,
    parse_part,
)
from zipage_lang.one_line_errors import one_line_errors

EXIT_INTERRUPTED = 130
TASKS, GRID, SAMPLING = "What is asked", "What is swept", "How answers are sampled"
ENGINE, OUTPUT = "The engine", "Results"


def evaluate(
    out: Annotated[
        Path,
        typer.Option(help="folder of the results; a sweep goes on there", rich_help_panel=OUTPUT),
    ],
    family: Annotated[
        str,
        typer.Option(
            help="built-in families: recall,trace; a mixture is trace+recall; trace@0-2 are levels",
            rich_help_panel=TASKS,
        ),
    ] = "",
    level: Annotated[
        str | None,
        typer.Option(help="levels of all families: 2, 0-3 or 0,2", rich_help_panel=TASKS),
    ] = None,
    task: Annotated[
        list[Path] | None,
        typer.Option(
            help="a JSONL file of prompt, answer, checker; repeatable", rich_help_panel=TASKS
        ),
    ] = None,
    dataset: Annotated[
        str,
        typer.Option(
            help="amc23,aime24,aime25,math500,gsm8k,livecodebench, from --data",
            rich_help_panel=TASKS,
        ),
    ] = "",
    data: Annotated[
        Path, typer.Option(help="folder of the published files", rich_help_panel=TASKS)
    ] = Path("data"),
    problems: Annotated[
        int, typer.Option(help="problems per task at most", rich_help_panel=TASKS)
    ] = 200,
    perplexity: Annotated[
        Path | None,
        typer.Option(help="perplexity of this text under each setting", rich_help_panel=TASKS),
    ] = None,
    needle: Annotated[
        bool,
        typer.Option("--needle", help="recall of a fact in a long text", rich_help_panel=TASKS),
    ] = False,
    window: Annotated[
        int, typer.Option(help="tokens of a text for these two", rich_help_panel=TASKS)
    ] = 1024,
    policy: Annotated[
        str,
        typer.Option(
            help="zipage,rkv or rkv:mass_weight=0.5; full KV is always run too",
            rich_help_panel=GRID,
        ),
    ] = "",
    budget: Annotated[
        str,
        typer.Option(
            help="K: 64,128 tokens, or 6%,25% of the mean full-KV solution length",
            rich_help_panel=GRID,
        ),
    ] = "",
    interval: Annotated[
        str, typer.Option(help="E: tokens or shares, as --budget", rich_help_panel=GRID)
    ] = "32",
    mode: Annotated[str, typer.Option(help="fixed,adaptive", rich_help_panel=GRID)] = "fixed",
    protect: Annotated[str, typer.Option(help="prompt,none", rich_help_panel=GRID)] = "prompt",
    mean_length: Annotated[
        list[str] | None,
        typer.Option(help="TASK=TOKENS for shares, else measured", rich_help_panel=GRID),
    ] = None,
    samples: Annotated[int, typer.Option(help="per problem", rich_help_panel=SAMPLING)] = 4,
    temperature: Annotated[float, typer.Option(help="0 is greedy", rich_help_panel=SAMPLING)] = 0.6,
    top_p: Annotated[float, typer.Option(help="1 is off", rich_help_panel=SAMPLING)] = 1.0,
    max_tokens: Annotated[
        int | None, typer.Option(help="else what the context leaves", rich_help_panel=SAMPLING)
    ] = None,
    seed: Annotated[
        int, typer.Option(help="of problems and samples", rich_help_panel=SAMPLING)
    ] = 0,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"else {FAMILY_MODEL} for families, {OTHER_MODEL} for the rest",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="an engine option, say dtype=bfloat16; repeatable", rich_help_panel=ENGINE
        ),
    ] = None,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process", help="no engine process, no sockets: fastest", rich_help_panel=ENGINE
        ),
    ] = False,
    mixed: Annotated[
        bool,
        typer.Option(
            "--mixed", help="cells share the engine: faster, but no rates", rich_help_panel=ENGINE
        ),
    ] = False,
    part: Annotated[
        str, typer.Option(help="I/N: only each N-th cell, for several runs", rich_help_panel=ENGINE)
    ] = "1/1",
    graders: Annotated[
        int, typer.Option(help="threads that check answers", rich_help_panel=ENGINE)
    ] = 2,
    keep_text: Annotated[
        bool,
        typer.Option("--keep-text", help="outputs too, not only verdicts", rich_help_panel=OUTPUT),
    ] = False,
    report_only: Annotated[
        bool,
        typer.Option("--report-only", help="sum up what is in the folder", rich_help_panel=OUTPUT),
    ] = False,
) -> None:
    """Accuracy, length, speed and memory of a model under full KV and under compression."""
    with one_line_errors():
        if report_only:
            _report(out)
            return
        families = split_list(family)
        options = EvalOptions(
            families=families,
            levels=level,
            task_files=tuple(task or ()),
            datasets=split_list(dataset),
            data_folder=data,
            perplexity_file=perplexity,
            asks_needle=needle,
            window_len=window,
            num_problems=problems,
            num_samples=samples,
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens,
            seed=seed,
            grid=make_grid(policy, budget, interval, mode, protect),
            mean_lens=parse_lengths(mean_length or []),
            model=model or (FAMILY_MODEL if families else OTHER_MODEL),
            engine=parse_pairs("engine", engine or []),
            is_in_process=in_process,
            is_mixed=mixed,
            part=parse_part(part),
            num_graders=graders,
            keeps_text=keep_text,
            out=out,
        )
        _run(options)


def _run(options: EvalOptions) -> None:
    # Both bring numpy.
    from zipage_lang.evaluation.evaluation import run_evaluation
    from zipage_lang.evaluation.probe_run import run_probes

    # Being told to end is like Ctrl-C, which a shell's background jobs do not hear.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        lines = run_probes(options) if options.is_probe else run_evaluation(options)
    except KeyboardInterrupt:
        typer.echo(f"\nstopped; the same command goes on in {options.out}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    for line in lines:
        typer.echo(line)


def _report(out: Path) -> None:
    from zipage_lang.evaluation.results import read_facts, write_results  # brings numpy

    results = write_results(out, read_facts(out))
    typer.echo(f"{len(results.cells)} cells in {out / 'report.html'}")
