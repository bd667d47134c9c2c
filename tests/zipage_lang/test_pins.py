"""Pinned prefixes: held between programs, started from, given back."""

import pytest

import zipage_lang as zipage
from zipage_lang.frontend.pin_board import PinBoard
from zipage_lang.testing import ScriptedBackend, StatefulBackend


@zipage.function
def ask(s, text):
    s += text + zipage.gen("a")
    return s["a"]


def test_programs_that_begin_with_it_start_from_its_end():
    backend = StatefulBackend("yes")
    with zipage.pin("You are a judge. ", backend=backend) as kept:
        assert kept.is_warm
        num_before = backend.num_computed_tokens
        ask.run("You are a judge. Is it?", backend=backend)
        assert backend.num_computed_tokens - num_before == len("Is it?")
        assert len(backend.held) == 1
    ask.run("x", backend=backend)  # the loop has come round
    assert backend.held == {}
    assert not kept.is_warm


def test_other_prompts_do_not_start_from_it():
    backend = StatefulBackend("yes")
    with zipage.pin("You are a judge. ", backend=backend):
        num_before = backend.num_computed_tokens
        ask.run("Who?", backend=backend)
        assert backend.num_computed_tokens - num_before == len("Who?")


def test_messages_are_pinned_as_the_template_writes_them():
    @zipage.function
    def chat(s):
        s += zipage.system("Be brief.") + zipage.user("hi") + zipage.assistant(zipage.gen("a"))

    backend = StatefulBackend("yes")
    with zipage.pin([{"role": "system", "content": "Be brief."}], backend=backend):
        before = backend.num_computed_tokens
        state = chat.run(backend=backend)
        computed = backend.num_computed_tokens - before
    assert computed < len(state.meta("a").prompt_token_ids) - len("Be brief.")


def test_a_state_can_be_pinned_and_outlives_its_run():
    backend = StatefulBackend("yes")
    state = ask.run("Long story. ", backend=backend)
    with zipage.pin(state):
        before = backend.num_computed_tokens
        ask.run(state.text() + " And then?", backend=backend)
        assert backend.num_computed_tokens - before == len(" And then?")


def test_time_runs_out_and_use_begins_it_anew():
    backend = StatefulBackend("yes")

    @zipage.function
    async def program(s):
        loop = backend.loop
        kept = zipage.pin("prefix", ttl=1000.0)
        async with kept:
            kept._deadline = 0.0  # as if the time had passed
            kept._touch()
            kept._look_at_clock()
            was_warm = kept.is_warm
            kept._deadline = loop.time() - 1.0
            kept._look_at_clock()
            return was_warm, kept.is_warm

    zipage.set_default_backend(backend)
    try:
        assert program.run(backend=backend).ret_value == (True, False)
    finally:
        zipage.set_default_backend(None)
    assert backend.held == {}


def test_a_pin_used_late_is_held_anew_and_so_is_the_youngest():
    backend = StatefulBackend("yes")
    with zipage.pin("prefix", ttl=1000.0, backend=backend) as kept:
        (first,) = backend.held
        kept._held_since -= 600.0
        ask.run("prefix and more", backend=backend)
        kept.wait()
        (second,) = backend.held
        assert second != first


def test_releasing_twice_is_no_error():
    kept = zipage.pin("prefix", backend=StatefulBackend("yes"))
    kept.release()
    kept.release()


@pytest.mark.parametrize("bad", [{"prefix": ""}, {"prefix": []}, {"ttl": 0}, {"ttl": True}])
def test_what_cannot_be_pinned_is_refused(bad):
    with pytest.raises(ValueError):
        zipage.pin(**{"prefix": "x", "backend": StatefulBackend(), **bad})


def test_a_backend_that_holds_nothing_says_so():
    with pytest.raises(zipage.UnsupportedError, match="ScriptedBackend can't do pin"):
        zipage.pin("x", backend=ScriptedBackend())


class TestPinBoard:
    def test_the_longest_prefix_is_found_and_told(self):
        board, used = PinBoard(), []
        board.add("short", [1, 2, 3], lambda: used.append("short"))
        board.add("long", [1, 2, 3, 4, 5], lambda: used.append("long"))
        assert board.find([1, 2, 3, 4, 5, 6]) == "long"
        assert board.find([1, 2, 9, 9]) == "short"  # the end may be spelled differently
        assert board.find([2, 3]) is None
        assert used == ["long", "short"]

    def test_what_was_removed_is_not_found(self):
        board = PinBoard()
        board.add("a", [1], lambda: None)
        board.remove("a")
        board.remove("a")
        assert board.find([1, 2]) is None
