"""The shipped calibration prompts are what their script draws, and no held-out problem."""

import json

from calibration_prompts import NUM_PROMPTS, calibration_lines
from model_card import FORECAST

from zipage_lang.evaluation.family_tasks import family_task
from zipage_lang.runtime.model_store import resolve_model

FOLDER = resolve_model("zipage-tiny-reasoner")


def test_the_shipped_prompts_are_the_drawn_ones():
    shipped = (FOLDER / "calibration.jsonl").read_text(encoding="utf-8").splitlines()
    assert shipped == calibration_lines()
    assert len(set(shipped)) == NUM_PROMPTS


def test_no_problem_that_is_evaluated_is_calibrated_on():
    calibrated = {json.loads(line)["prompt"] for line in calibration_lines()}
    for name in ("trace", "recall", "multiply", "countdown"):
        asked = family_task(name, 200, "0-3", seed=0).problems
        assert not calibrated & {problem.prompt for problem in asked}


def test_the_shipped_card_says_where_the_forecast_comes_from():
    assert (FOLDER / "README.md").read_text(encoding="utf-8").endswith(FORECAST)
