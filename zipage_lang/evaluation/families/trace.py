"""Trace: run a straight-line register program; each value is written once and read much later.

Knows nothing of models, of other families or of how answers are scored together.

Each line of the program adds or subtracts, modulo 100, the value of the line before, that of a
register which may have been written long ago, and a third; so the last value depends on nearly all.
The solution repeats a line, reads its values, and writes the result beside the register's name,
which is where a later line finds it:

    27k=p+c-e 45+82-13 27-13 k14
"""

import random
from dataclasses import dataclass

from zipage_lang.evaluation.families.family import (
    ANSWER_MARK,
    Problem,
    check_level,
    final_answer,
)

MODULUS = 100
REGISTERS = "abcdefghijklmnopqrstuvwxyz"
FIRST_LINE = 10  # so that all line numbers have two digits
NUM_CONSTANTS = 4
NUM_HOT = 6  # registers mentioned last, which are used and overwritten more than all others
NUMBER_SHARE = 0.4  # of the third operands


@dataclass(frozen=True, slots=True)
class Difficulty:
    """How many lines the program has, and among how many registers it spreads its values."""

    min_lines: int
    max_lines: int
    num_registers: int


DIFFICULTIES = (
    Difficulty(20, 29, 12),
    Difficulty(30, 39, 16),
    Difficulty(40, 49, 20),
    Difficulty(50, 59, 24),
    Difficulty(60, 69, 26),
    Difficulty(70, 79, 26),
)


@dataclass(frozen=True, slots=True)
class Trace:
    """The family. The answer is the value of the program's last line, two digits."""

    name: str = "trace"
    levels: int = len(DIFFICULTIES)

    def draw(self, rng: random.Random, level: int) -> Problem:
        check_level(self, level)
        difficulty = DIFFICULTIES[level]
        program = _Program(rng, rng.sample(REGISTERS, difficulty.num_registers))
        for _ in range(rng.randint(difficulty.min_lines, difficulty.max_lines)):
            program.add_line()
        return program.finish()

    def check(self, answer: str, output: str) -> bool:
        return final_answer(output) == answer


class _Program:
    """A program in the making, run as it is written."""

    def __init__(self, rng: random.Random, registers: list[str]) -> None:
        self._rng = rng
        self._free = registers  # not written so far
        self._values: dict[str, str] = {}
        self._unread: set[str] = set()  # written and not read by a later line but the next
        self._mentioned: list[str] = []  # all with a value, the one mentioned last at the end
        self._last = ""  # what the line before wrote
        self._code: list[str] = []
        self._steps: list[str] = []

    def add_line(self) -> None:
        if len(self._code) < NUM_CONSTANTS:
            self._add_constant()
        else:
            self._add_sum()

    def finish(self) -> Problem:
        answer = self._values[self._last]
        self._write(f"print {self._last}", "")
        code = "".join([f"{line}\n" for line in self._code])
        steps = "".join([f"{line}\n" for line in self._steps])
        return Problem("trace", f"trace\n{code}", answer, f"{steps}{ANSWER_MARK}{answer}")

    def _add_constant(self) -> None:
        target, value = self._free.pop(), f"{self._rng.randrange(MODULUS):02d}"
        self._write(f"{target}={value}", f" {target}{value}")
        self._set(target, value)

    def _add_sum(self) -> None:
        operands = self._choose_operands()
        reads = [self._values.get(operand, operand) for operand in operands]
        first, second = self._rng.choice("+-"), self._rng.choice("+-")
        between = _combine(reads[0], first, reads[1])
        value = _combine(between, second, reads[2])
        self._mention([operand for operand in operands if operand in self._values])
        target = self._choose_target()
        code = f"{target}={operands[0]}{first}{operands[1]}{second}{operands[2]}"
        shown = f"{reads[0]}{first}{reads[1]}{second}{reads[2]} {between}{second}{reads[2]}"
        self._write(code, f" {shown} {target}{value}")
        self._set(target, value)

    def _choose_operands(self) -> list[str]:
        """The register of the line before, any other, and a number or one of the last mentioned."""
        others = self._mentioned[:-1]
        far = self._rng.choice(others)
        hot = [register for register in others[-NUM_HOT:] if register != far]
        third = self._rng.choice(hot)
        if self._rng.random() < NUMBER_SHARE:
            third = f"{self._rng.randrange(MODULUS):02d}"
        operands = [self._last, far, third]
        self._unread.difference_update((far, third))
        self._rng.shuffle(operands)
        return operands

    def _choose_target(self) -> str:
        """A register without a value, or one that was read and mentioned lately: old ones stay."""
        if self._free:
            return self._free.pop()
        hot = self._mentioned[-NUM_HOT:]
        return self._rng.choice([name for name in hot if name not in self._unread] or hot)

    def _set(self, target: str, value: str) -> None:
        self._values[target] = value
        self._unread.add(target)
        self._mention([target])
        self._last = target

    def _mention(self, registers: list[str]) -> None:
        for register in registers:
            if register in self._mentioned:
                self._mentioned.remove(register)
            self._mentioned.append(register)

    def _write(self, code: str, step: str) -> None:
        line = f"{FIRST_LINE + len(self._code)}{code}"
        self._code.append(line)
        self._steps.append(line + step)


def _combine(one: str, operation: str, other: str) -> str:
    number = int(one) + int(other) if operation == "+" else int(one) - int(other)
    return f"{number % MODULUS:02d}"
