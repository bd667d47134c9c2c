"""The prompts that the tiny reasoner's forecast of attention is calibrated on.

    python training/calibration_prompts.py MODEL_FOLDER

Writes calibration.jsonl there: NUM_PROMPTS of the training split, families in turn, easy levels
first. Knows nothing of how a forecast is fitted.
"""

import json
import sys
from pathlib import Path

from zipage_lang.evaluation.families import find_family
from zipage_lang.evaluation.families.family import problem_rng

FAMILIES = ("trace", "recall", "multiply", "countdown")
NUM_PROMPTS, NUM_LEVELS = 64, 4
FIRST_INDEX = 5000  # in the random source train/0/i


def calibration_lines() -> list[str]:
    """JSON lines, one prompt each."""
    lines = []
    for index in range(NUM_PROMPTS):
        family = find_family(FAMILIES[index % len(FAMILIES)])
        level = index // len(FAMILIES) % NUM_LEVELS
        problem = family.draw(problem_rng("train", 0, FIRST_INDEX + index), level)
        lines.append(json.dumps({"prompt": problem.prompt}))
    return lines


if __name__ == "__main__":
    target = Path(sys.argv[1]) / "calibration.jsonl"
    target.write_text("\n".join(calibration_lines()) + "\n", encoding="utf-8")
