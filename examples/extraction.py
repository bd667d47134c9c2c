"""Typed extraction over a batch: free text in, dataclasses out, errors in their place.

Each text is a program of its own; all run at once and share the prompt. The model can only write
JSON of the given type, so what comes back is a value or a named error, never a text to mend.

    python examples/extraction.py
"""

import argparse
import dataclasses
from typing import Literal

import zipage_lang as zipage


@dataclasses.dataclass
class Ticket:
    """What a message to the support desk says."""

    product: Literal["router", "printer", "phone", "other"]
    urgent: bool
    days: int


TASK = "Read the message. Write JSON with product, urgent, and for how many days it has lasted."
EXAMPLE = "My printer smokes since this morning, come at once!"
EXAMPLE_TICKET = '{"product": "printer", "urgent": true, "days": 0}'
MESSAGES = (
    "The router in the hall has been losing its connection for 3 days. We cannot work.",
    "",
    "My phone shows a scratch. No hurry. It is like that for 2 days now.",
    "The printer prints pale pages for 9 days. Please look at it some time.",
)


@zipage.function
def extract(s, message: str):
    if not message.strip():
        raise ValueError("the message is empty")
    s += zipage.system(TASK)
    s += zipage.user(EXAMPLE) + zipage.assistant(EXAMPLE_TICKET)
    s += zipage.user(message)
    s += zipage.assistant(zipage.gen("ticket", type=Ticket, max_tokens=40, temperature=0))
    return s["ticket"]  # a value that is cut off or wrong raises here


def extract_all(
    messages: list[str], backend: object, **options: object
) -> list[Ticket | BaseException]:
    """One entry for each message, in order."""
    states = extract.run_batch(
        [{"message": message} for message in messages],
        backend=backend,
        return_exceptions=True,
        timeout=60.0,
        retries=1,
        **options,
    )
    return [state if isinstance(state, BaseException) else state.ret_value for state in states]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="name, folder or GGUF file")
    parser.add_argument("--trace", help="a file for the events; see `zipage trace`")
    options = parser.parse_args()
    with zipage.Engine(options.model) as engine:
        results = extract_all(list(MESSAGES), engine, trace=options.trace)
    report(list(MESSAGES), results)


def report(messages: list[str], results: list[Ticket | BaseException]) -> None:
    for message, result in zip(messages, results, strict=True):
        print(f"{message[:60]!r}\n    {result!r}")
    num_errors = sum(isinstance(result, BaseException) for result in results)
    print(f"{len(results) - num_errors} tickets, {num_errors} errors")


if __name__ == "__main__":
    main()
