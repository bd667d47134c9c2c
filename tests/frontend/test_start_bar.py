"""What is told while an engine starts reaches the caller, and a terminal shows it."""

from zipage_lang.frontend.llm import Engine
from zipage_lang.frontend.start_bar import start_bar
from zipage_lang.runtime.messages import Starting


def test_the_caller_hears_what_the_engine_is_at_and_when_it_is_done(command):
    told = []
    with Engine(engine_command=command, on_progress=told.append):
        pass
    assert told == [
        Starting(stage="loading weights", done=1, total=2),
        Starting(stage="loading the tokenizer"),
        Starting(stage="loading the tokenizer", done=1, total=1),
    ]


def test_a_terminal_shows_stages_and_counts(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with start_bar("tiny") as report:
        report(Starting(stage="loading weights", done=3, total=8))
        report(Starting(stage="loading the tokenizer", done=1, total=1))
        report(Starting(stage="capturing decode graphs", done=2, total=9))
    shown = capsys.readouterr().err
    assert "tiny: loading weights" in shown
    assert "3/8" in shown
    assert "2/9" in shown
    assert "loading the tokenizer" not in shown  # it was done: the line was taken away


def test_nothing_is_drawn_where_there_is_no_terminal(capsys):
    with start_bar("tiny") as report:
        report(Starting(stage="loading weights", done=3, total=8))
    assert capsys.readouterr().err == ""
