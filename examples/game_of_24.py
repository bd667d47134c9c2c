"""Tree of thought: make 24 of four numbers. The model proposes and values; code does the sums.

At each level the model writes possible steps, code keeps those whose arithmetic can be done and
works them out, the model says how good what is left looks, and the best five states go on. What is
dropped is aborted, and its memory is free at the next step.

    python examples/game_of_24.py --numbers 3 8 2 2 --trace game.jsonl
"""

import argparse
import operator
import re
from collections import Counter
from fractions import Fraction

import zipage_lang as zipage

TARGET = 24
BREADTH = 5
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
VERDICTS = {" sure": 1.0, " likely": 0.5, " impossible": 0.0}
STEP = re.compile(r"(\S+) ([-+*/]) (\S+) =")
SHOTS = """Use each number once to make 24.
Numbers: 2 8 8 14
2 + 8 = 10 (left: 8 10 14)
14 - 8 = 6 (left: 6 10)
"""
JUDGED = """Can the numbers make 24?
10 14: 10 + 14 = 24. sure
11 12: 11 + 12 = 23. impossible
4 4 10: 4 * 4 = 16, 16 + 10 = 26. likely
"""


@zipage.function
def game_of_24(s, numbers: list[int]):
    s += SHOTS + "Numbers: " + " ".join(map(str, numbers)) + "\n"
    return zipage.search(
        s,
        propose=propose,
        evaluate=value,
        is_done=lambda branch: numbers_left(branch.text()) == [TARGET],
        width=BREADTH,
        depth=len(numbers) - 1,
    )


def propose(branch) -> list[str]:
    """Steps the model thinks of, each worked out; wrong and repeated ones are left out."""
    numbers = numbers_left(branch.text())
    if len(numbers) < 2:
        return []
    operand = "(" + "|".join(str(number) for number in sorted(set(numbers))) + ")"
    with branch.scratch() as notes:
        pattern = f"{operand} [-+*/] {operand} ="
        notes += zipage.gen("steps", n=2 * BREADTH, max_tokens=16, regex=pattern)
    lines = [worked_out(numbers, step) for step in notes["steps"]]
    return [line for line in dict.fromkeys(lines) if line is not None]


def worked_out(numbers: list[Fraction], step: str) -> str | None:
    """The step's whole line; None for a step that can't be done with these numbers."""
    found = STEP.fullmatch(step.strip())
    if found is None:
        return None
    left, right = Fraction(found[1]), Fraction(found[3])
    rest = Counter(numbers)
    rest.subtract([left, right])
    if min(rest.values()) < 0 or (found[2] == "/" and right == 0):
        return None
    result = OPERATIONS[found[2]](left, right)
    shown = " ".join(map(str, sorted([*rest.elements(), result])))
    return f"{left} {found[2]} {right} = {result} (left: {shown})\n"


def value(branch) -> float:
    """How likely the numbers that are left make 24, by the model; the last one by code."""
    numbers = numbers_left(branch.text())
    if len(numbers) == 1:
        return float(numbers == [TARGET])
    with branch.scratch() as notes:
        notes += JUDGED + " ".join(map(str, numbers)) + ":"
        notes += zipage.select("verdict", list(VERDICTS))
    weights = zip(VERDICTS.values(), notes.meta("verdict").probabilities, strict=True)
    return sum(worth * probability for worth, probability in weights)


def numbers_left(text: str) -> list[Fraction]:
    """What the last line of a state says is left."""
    last = text.strip().rsplit("\n", 1)[-1]
    shown = last.partition("Numbers: ")[2] or last.partition("(left: ")[2].rstrip(")")
    return [Fraction(number) for number in shown.split()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="name, folder or GGUF file")
    parser.add_argument("--numbers", type=int, nargs="+", default=[3, 8, 2, 2])
    parser.add_argument("--seed", type=int, default=0, help="the same seed searches the same tree")
    parser.add_argument("--trace", help="a file for the events; see `zipage trace`")
    options = parser.parse_args()
    with zipage.Engine(options.model) as engine:
        state = game_of_24.run(
            options.numbers, backend=engine, seed=options.seed, trace=options.trace
        )
    report(state.ret_value)


def report(found: zipage.SearchResult) -> None:
    for node in found.best.path if found.best else []:
        print(f"{node.score:.2f}  {node.step.strip()}")
    verdict = "solved" if found.best and found.best.is_done else "not solved"
    print(f"{verdict}: {found.num_nodes} states tried, ended by {found.reason}")


if __name__ == "__main__":
    main()
