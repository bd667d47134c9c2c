"""Self-consistency: ask one question, think about it several times, let the answers vote.

All chains share the prompt's KV cache; what each one adds is compacted as it grows, so that a chain
holds at most `budget` + `interval` slots beyond the prompt, however long it thinks.

    python examples/self_consistency.py --samples 8 --budget 48
"""

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import zipage_lang as zipage
from zipage_lang.frontend.outputs import RequestOutput

TASK = "Add the numbers one by one."
WORKED = (
    (
        "Mia saves some coins: 5 on Monday, 2 on Tuesday, 4 on Wednesday, 3 on Thursday and 1 on "
        "Friday. How many coins in all?",
        "Start with Monday: 5 coins. Add 2 for Tuesday: 5 + 2 = 7 coins. Add 4 for Wednesday: "
        "7 + 4 = 11 coins. Add 3 for Thursday: 11 + 3 = 14 coins. Add 1 for Friday: "
        "14 + 1 = 15 coins. The answer is 15.",
    ),
    (
        "Tom finds some shells: 1 on Monday, 6 on Tuesday, 2 on Wednesday, 2 on Thursday and 5 on "
        "Friday. How many shells in all?",
        "Start with Monday: 1 shells. Add 6 for Tuesday: 1 + 6 = 7 shells. Add 2 for Wednesday: "
        "7 + 2 = 9 shells. Add 2 for Thursday: 9 + 2 = 11 shells. Add 5 for Friday: "
        "11 + 5 = 16 shells. The answer is 16.",
    ),
    (
        "Eva plants some trees: 2 on Monday, 3 on Tuesday, 1 on Wednesday, 4 on Thursday and 2 on "
        "Friday. How many trees in all?",
        "Start with Monday: 2 trees. Add 3 for Tuesday: 2 + 3 = 5 trees. Add 1 for Wednesday: "
        "5 + 1 = 6 trees. Add 4 for Thursday: 6 + 4 = 10 trees. Add 2 for Friday: "
        "10 + 2 = 12 trees. The answer is 12.",
    ),
)
QUESTION = (
    "Ben reads some pages: 3 on Monday, 2 on Tuesday, 1 on Wednesday, 2 on Thursday and 2 on "
    "Friday. How many pages in all?"
)
RIGHT_ANSWER = "10"


@zipage.function
def self_consistency(s, question: str, samples: int, watch: Callable[[int], None]):
    s += zipage.system(TASK)
    for worked_question, reasoning in WORKED:
        s += zipage.user(worked_question) + zipage.assistant(reasoning)
    s += zipage.user(question)
    chains = s.fork(samples)
    chains += zipage.assistant(zipage.gen("chain"))
    for delta in chains.deltas():
        watch(delta.num_tokens)
    chains.join()
    return Counter(answer_in(chain) for chain in s["chain"])


def answer_in(chain: str) -> str:
    """The number the chain ends with; "none" where it came to no answer."""
    found = re.findall(r"answer is\D{0,20}?(-?\d[\d,]*)", chain)
    return found[-1].replace(",", "").rstrip(",") if found else "none"


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("[bold]thinking"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TextColumn("tokens"), TimeElapsedColumn(), console=console)


def table_of(outputs: Sequence[RequestOutput], votes: Counter[str], seconds: float) -> Table:
    """One row for each chain, and the sums. KV slots are counted per layer and KV head."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("chain", "answer", "votes", "tokens", "prefix\nreused", "compac-\ntions"):
        table.add_column(name, justify="right")
    for name in ("KV\nkept", "KV\ndrop", "resident\n/logical", "tok/s"):
        table.add_column(name, justify="right")
    for number, output in enumerate(outputs):
        answer = answer_in(output.text)
        table.add_row(str(number), answer, str(votes[answer]), *costs([output]))
    table.add_section()
    winner, num_votes = votes.most_common(1)[0]
    total = sum(output.usage.completion_tokens for output in outputs)
    share = f"{num_votes} of {len(outputs)}"
    table.add_row("all", winner, share, *costs(outputs), f"{total / seconds:.1f}")
    return table


def costs(outputs: Sequence[RequestOutput]) -> list[str]:
    """Tokens, prefix tokens reused, compactions, tail slots kept, dropped, resident/logical."""
    resident = sum(output.kv.resident_len for output in outputs)
    logical = sum(output.kv.logical_len for output in outputs)
    return [
        str(sum(output.usage.completion_tokens for output in outputs)),
        str(sum(output.usage.cached_tokens for output in outputs)),
        str(sum(output.kv.compactions for output in outputs)),
        str(resident - sum(output.kv.protected_len for output in outputs)),
        str(sum(output.kv.dropped for output in outputs)),
        f"{resident}/{logical}",
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="name, folder or GGUF file")
    parser.add_argument("--samples", type=int, default=8, help="chains of thought")
    parser.add_argument("--budget", type=int, default=48, help="KV slots a chain keeps")
    parser.add_argument("--interval", type=int, default=16, help="slots that may pile up on top")
    parser.add_argument("--max-tokens", type=int, default=200, help="tokens of a chain at most")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same chains")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    console = Console()
    with console.status(f"starting {options.model}"):
        engine = zipage.Engine(
            options.model,
            kv_mode="fixed",
            kv_budget=options.budget,
            evict_interval=options.interval,
            policy="zipage",
        )
    with engine:
        report(options, engine, console)


def report(options: argparse.Namespace, engine: zipage.Engine, console: Console) -> None:
    start = time.perf_counter()
    with progress_bar(console) as progress:
        task = progress.add_task("", total=options.samples * options.max_tokens)
        state = self_consistency.run(
            QUESTION,
            options.samples,
            lambda num_tokens: progress.advance(task, num_tokens),
            backend=engine,
            seed=options.seed,
            max_tokens=options.max_tokens,
            temperature=0.5,
            top_p=0.95,
        )
        seconds = time.perf_counter() - start
        progress.update(task, total=progress.tasks[task].completed)  # some chains ended early
    console.print(f"[bold]Question:[/bold] {QUESTION}")
    console.print(f"[bold]Chain 0:[/bold] {state['chain'][0].strip()}")
    console.print(table_of(state.meta("chain"), state.ret_value, seconds))
    console.print(f"The right answer is {RIGHT_ANSWER}.")


if __name__ == "__main__":
    main()
