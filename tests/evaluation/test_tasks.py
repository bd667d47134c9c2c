"""Tasks of a user's file and of the families. Knows nothing of engines."""

import json

import pytest

from zipage_lang.evaluation.families import FAMILIES
from zipage_lang.evaluation.family_tasks import family_task
from zipage_lang.evaluation.task_files import read_task_file

GOOD = {"prompt": "1+1?", "answer": "2", "checker": "boxed"}


def write(tmp_path, *rows):
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_a_task_file_is_read_whole(tmp_path):
    rows = (GOOD, {**GOOD, "id": "second", "chat": False, "checker": "choice", "answer": "B"})
    task = read_task_file(write(tmp_path, *rows))
    assert task.name == "mine"
    assert [problem.id for problem in task.problems] == ["1", "second"]
    assert [problem.is_chat for problem in task.problems] == [True, False]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "?"}, "answer and checker missing"),
        ({**GOOD, "level": 3}, "'level' is not known"),
        ({**GOOD, "prompt": ""}, "prompt='' must be a text"),
        ({**GOOD, "checker": "magic"}, "checker 'magic' is not known"),
        ({**GOOD, "checker": 1}, "checker=1 must be a text"),
        ({**GOOD, "checker": "choice"}, "must be one letter"),
        ({**GOOD, "chat": "yes"}, "chat='yes' must be true or false"),
        ({**GOOD, "id": "1"}, "id='1' is there twice"),
    ],
)
def test_a_bad_row_is_told_with_its_number(tmp_path, row, message):
    with pytest.raises(ValueError, match=rf"mine.jsonl, row 2: .*{message}"):
        read_task_file(write(tmp_path, GOOD, row))


def test_an_empty_file_has_no_problems(tmp_path):
    with pytest.raises(ValueError, match="task 'mine' has no problems"):
        read_task_file(write(tmp_path))


def test_a_family_task_is_the_same_again_and_grows_at_its_end():
    few, many = family_task("trace", 6, None, 3), family_task("trace", 20, None, 3)
    assert many.problems[:6] == few.problems
    assert family_task("trace", 6, None, 4).problems != few.problems


def test_levels_take_turns():
    ids = [problem.id for problem in family_task("recall@1-2", 4, None, 0).problems]
    assert ids == ["recall/1/0", "recall/2/1", "recall/1/2", "recall/2/3"]
    assert family_task("recall", 1, "0,2", 0).name == "recall@0,2"
    all_levels = {p.id.split("/")[1] for p in family_task("recall", 40, None, 0).problems}
    assert len(all_levels) == FAMILIES["recall"].levels


def test_a_mixture_draws_from_its_families_in_turn():
    problems = family_task("trace@0+recall@1", 6, None, 0).problems
    assert [problem.checker for problem in problems] == ["family:trace", "family:recall"] * 3


@pytest.mark.parametrize(
    ("spec", "levels", "message"),
    [
        ("chess", None, "give one of countdown"),
        ("trace@99", None, "family 'trace' has levels 0 to"),
        ("trace", "x", "must be like 2, 0-3 or 0,2,5"),
        ("trace", "3-1", "has levels 0 to"),
    ],
)
def test_unknown_families_and_levels_are_refused(spec, levels, message):
    with pytest.raises(ValueError, match=message):
        family_task(spec, 2, levels, 0)
