"""Tasks drawn from the built-in families, by name, levels and seed; mixtures too.

Knows nothing of what the families ask.
"""

from collections.abc import Sequence

from zipage_lang.evaluation.checkers.family_answer import FAMILY_PREFIX
from zipage_lang.evaluation.families import find_family
from zipage_lang.evaluation.families.family import Family, problem_rng
from zipage_lang.evaluation.problem import EvalProblem, Task


def family_task(spec: str, num_problems: int, levels: str | None, seed: int) -> Task:
    """Held-out problems of one family, or of several in turn.

    spec: `trace`, `trace@0-2`, or a mixture `trace@3+recall`. levels: for families without an @;
    None is all of a family's. Levels take turns, so problem i is the same however many are drawn.
    Raises ValueError for an unknown family or level.
    """
    parts = [_family_and_levels(part, levels) for part in spec.split("+")]
    problems = []
    for index in range(num_problems):
        family, family_levels = parts[index % len(parts)]
        level = family_levels[index // len(parts) % len(family_levels)]
        problem = family.draw(problem_rng("held-out", seed, index), level)
        problems.append(
            EvalProblem(
                id=f"{family.name}/{level}/{index}",
                prompt=problem.prompt,
                answer=problem.answer,
                checker=FAMILY_PREFIX + family.name,
            )
        )
    return Task(spec if levels is None or "@" in spec else f"{spec}@{levels}", tuple(problems))


def parse_levels(text: str, family: Family) -> tuple[int, ...]:
    """`2`, `0-3` or `0,2,5`, within what the family has. Raises ValueError."""
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise ValueError(f"--level {text!r} must be like 2, 0-3 or 0,2,5")
        found.extend(range(int(low), int(high if dash else low) + 1))
    wrong = [level for level in found if level >= family.levels]
    if wrong or not found:
        raise ValueError(
            f"--level {text!r}: family {family.name!r} has levels 0 to {family.levels - 1}"
        )
    return tuple(found)


def _family_and_levels(part: str, levels: str | None) -> tuple[Family, Sequence[int]]:
    name, has_own, own = part.partition("@")
    family = find_family(name)
    asked = own if has_own else levels
    return family, range(family.levels) if asked is None else parse_levels(asked, family)
