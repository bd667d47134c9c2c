"""Self-consistency: ask one question, think about it several times at once, and let the answers vote.

All chains share the prompt's KV cache; what each one adds is compacted as it grows, so that a chain
holds at most `budget` + `interval` slots beyond the prompt, however long it thinks.

    python examples/self_consistency.py --samples 8 --budget 48
"""

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import zipage_lang as zipage
from zipage_lang.frontend.outputs import RequestOutput

TASK = "Solve the problem step by step. End with the words: The answer is <number>."
WORKED_QUESTION = (
    "A baker makes 12 rolls in the morning and 8 rolls in the afternoon. She sells 15 rolls. "
    "How many rolls are left?"
)
WORKED_ANSWER = (
    "First, count the rolls that the baker makes. In the morning she makes 12 rolls and in the "
    "afternoon she makes 8 rolls. That is 12 + 8 = 20 rolls in all. Next, take away the rolls that "
    "she sells. She sells 15 rolls, so 20 - 15 = 5 rolls are left. The answer is 5."
)
QUESTION = (
    "Anna picks 8 apples in the morning and 6 apples in the afternoon. She gives 5 apples to Ben. "
    "How many apples are left?"
)
RIGHT_ANSWER = "9"


@zipage.function
def self_consistency(s, question: str, samples: int, watch: Callable[[int], None]):
    s += zipage.system(TASK)
    s += zipage.user(WORKED_QUESTION) + zipage.assistant(WORKED_ANSWER)
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
    table = Table(title="Chains of thought")
    table.add_column("chain", justify="right")
    table.add_column("answer", justify="right", style="bold")
    for name in ("votes", "tokens", "prefix reused", "compactions"):
        table.add_column(name, justify="right")
    for name in ("KV kept", "KV dropped", "resident / logical", "tokens/s"):
        table.add_column(name, justify="right")
    for number, output in enumerate(outputs):
        answer = answer_in(output.text)
        table.add_row(str(number), answer, str(votes[answer]), *costs([output]), "")
    total = sum(output.usage.completion_tokens for output in outputs)
    winner, num_votes = votes.most_common(1)[0]
    table.add_section()
    speed = f"{total / seconds:.1f}"
    table.add_row("all", winner, f"{num_votes} of {len(outputs)}", *costs(outputs), speed)
    return table


def costs(outputs: Sequence[RequestOutput]) -> list[str]:
    """Tokens, prefix tokens reused, compactions, tail slots kept and dropped, resident / logical."""
    resident = sum(output.kv.resident_len for output in outputs)
    logical = sum(output.kv.logical_len for output in outputs)
    return [
        str(sum(output.usage.completion_tokens for output in outputs)),
        str(sum(output.usage.cached_tokens for output in outputs)),
        str(sum(output.kv.compactions for output in outputs)),
        str(resident - sum(output.kv.protected_len for output in outputs)),
        str(sum(output.kv.dropped for output in outputs)),
        f"{resident} / {logical}",
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
            temperature=0.7,
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
