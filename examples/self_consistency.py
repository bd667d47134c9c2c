"""Self-consistency: ask one question, think about it several times, let the answers vote.

Chains begin as others end; the vote is over as soon as nothing can change its winner, and chains
that still think, or have not begun, are stopped.
All chains share the prompt's KV cache; what each one adds is compacted as it grows, so that a chain
holds at most `budget` + `interval` slots beyond the prompt, however long it thinks.

    python examples/self_consistency.py --samples 12 --at-once 4 --budget 48
"""

import argparse
import re
import time
from collections.abc import Callable

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
def self_consistency(s, question: str, samples: int, watch: Callable[[int, int], None]):
    s += zipage.system(TASK)
    for worked_question, reasoning in WORKED:
        s += zipage.user(worked_question) + zipage.assistant(reasoning)
    s += zipage.user(question)

    async def think(chain):
        chain += zipage.assistant(zipage.gen("chain"))
        async for _, call in chain.text_async_iter("chain", return_meta_data=True):
            watch(chain.index, call["completion_tokens"])
        watch(chain.index, (await chain.meta("chain")).usage.completion_tokens)
        return await chain["chain"]

    return zipage.vote(s, samples, think, key=answer_in)


def answer_in(chain: str) -> str | None:
    """The number the chain ends with; None, which is no vote, where it came to no answer."""
    found = re.findall(r"answer is\D{0,20}?(-?\d[\d,]*)", chain)
    return found[-1].replace(",", "") if found else None


class TokenBar:
    """A progress bar over the tokens of all chains; remembers how many each has drawn."""

    def __init__(self, console: Console, total: int) -> None:
        columns = (TextColumn("[bold]thinking"), BarColumn(), MofNCompleteColumn())
        columns = (*columns, TextColumn("tokens"), TimeElapsedColumn())
        self.bar = Progress(*columns, console=console)
        self.task = self.bar.add_task("", total=total)
        self.num_tokens: dict[int, int] = {}

    def watch(self, chain: int, num_tokens: int) -> None:
        self.num_tokens[chain] = num_tokens
        self.bar.update(self.task, completed=sum(self.num_tokens.values()))

    def finish(self) -> None:
        """Full, though some chains ended early."""
        self.bar.update(self.task, total=sum(self.num_tokens.values()))


def table_of(result: zipage.VoteResult, num_tokens: dict[int, int], seconds: float) -> Table:
    """One row for each chain, and the sums. KV slots are counted per layer and KV head."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("chain", "answer", "tokens", "prefix\nreused", "compac-\ntions"):
        table.add_column(name, justify="right")
    for name in ("KV\nkept", "KV\ndrop", "resident\n/logical", "tok/s"):
        table.add_column(name, justify="right")
    outputs = []
    for chain, text in enumerate(result.answers):
        drawn = str(num_tokens.get(chain, 0))
        if text is None:  # no output: it was stopped, or it failed
            table.add_row(str(chain), "stopped", drawn)
            continue
        outputs.append(result.branches[chain].meta("chain"))
        table.add_row(str(chain), answer_in(text) or "none", drawn, *costs(outputs[-1:]))
    table.add_section()
    total = sum(num_tokens.values())
    table.add_row("all", str(result.winner), str(total), *costs(outputs), f"{total / seconds:.1f}")
    return table


def costs(outputs: list[RequestOutput]) -> list[str]:
    """Prefix tokens reused, compactions, tail slots kept, dropped, resident/logical."""
    resident = sum(output.kv.resident_len for output in outputs)
    logical = sum(output.kv.logical_len for output in outputs)
    return [
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
    parser.add_argument("--samples", type=int, default=12, help="chains of thought")
    parser.add_argument("--at-once", type=int, default=4, help="chains that think side by side")
    parser.add_argument("--budget", type=int, default=48, help="KV slots a chain keeps")
    parser.add_argument("--interval", type=int, default=16, help="slots that may pile up on top")
    parser.add_argument("--max-tokens", type=int, default=200, help="tokens of a chain at most")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same chains")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    console = Console()
    with console.status(f"starting {options.model}"):
        engine = zipage.Engine(options.model, max_running=options.at_once)
    with engine as running:
        report(options, running, console)


def report(options: argparse.Namespace, engine: zipage.Engine, console: Console) -> None:
    start = time.perf_counter()
    tokens = TokenBar(console, options.samples * options.max_tokens)
    with tokens.bar:
        result = self_consistency.run(
            QUESTION,
            options.samples,
            tokens.watch,
            backend=engine,
            kv=zipage.KV(mode="fixed", budget=options.budget, interval=options.interval),
            seed=options.seed,
            max_tokens=options.max_tokens,
            temperature=0.5,
            top_p=0.95,
        ).ret_value
        seconds = time.perf_counter() - start
        tokens.finish()
    console.print(f"[bold]Question:[/bold] {QUESTION}")
    if result.branch is not None:
        chain = result.answers[result.branch.index].strip()
        console.print(f"[bold]Chain {result.branch.index}:[/bold] {chain}")
    console.print(table_of(result, tokens.num_tokens, seconds))
    votes = f"{result.counts.get(result.winner, 0)} of {sum(result.counts.values())} votes"
    console.print(f"{votes} for {result.winner}; {result.num_stopped} chains stopped early.")
    console.print(f"The right answer is {RIGHT_ANSWER}.")


if __name__ == "__main__":
    main()
