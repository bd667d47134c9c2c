"""The laws are looked at as often as the environment asks."""

import pytest

from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.self_check import CHECK_EVERY, SelfCheck


def test_nothing_is_checked_unless_asked_for():
    check = SelfCheck(lambda: pytest.fail("checked"), {})
    for _ in range(1000):
        check.note_step()
    assert check.num_checks == 0


def test_every_so_many_steps():
    seen = []
    check = SelfCheck(lambda: seen.append(1), {CHECK_EVERY: "3"})
    for _ in range(10):
        check.note_step()
    assert len(seen) == check.num_checks == 3


def test_a_broken_law_ends_the_step(make_engine, monkeypatch):
    monkeypatch.setenv(CHECK_EVERY, "1")
    engine = make_engine()
    engine.handle(
        AddRequest(request_id="r", token_ids=[1, 2], sampling=SamplingParams(max_tokens=3))
    )
    engine.step()
    assert engine.stats()["num_self_checks"] == 1
    engine.scheduler._state._free_rows.pop()
    with pytest.raises(AssertionError, match="7 of 8 rows"):
        engine.step()


def test_what_is_no_number_of_steps_is_refused(make_engine, monkeypatch):
    monkeypatch.setenv(CHECK_EVERY, "often")
    with pytest.raises(ValueError, match=f"{CHECK_EVERY}='often' must be a number"):
        make_engine()
