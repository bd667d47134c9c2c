"""Lines of a stream, however it is cut. Knows nothing of connections."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zipage_lang import event_lines
from zipage_lang.event_lines import EventLines, LineTooLongError

TEXT = st.text(alphabet="ab\r\n\u2028\u0085é👋", max_size=30)


def lines_of(pieces):
    lines = EventLines()
    return [line for piece in pieces for line in lines.feed(piece)]


@given(text=TEXT, data=st.data())
def test_however_a_stream_is_cut_its_lines_are_those_of_the_whole(text, data):
    whole = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert lines_of(pieces) == re.split("\r\n|\n|\r", text)[:-1]


def test_nothing_between_two_halves_of_a_line_end_changes_nothing():
    assert lines_of([b"a\r", b"", b"\n", b"", b"b\n"]) == ["a", "b"]
    assert lines_of([b"a\r", b"\n\n"]) == ["a", ""]
    assert lines_of([b"a\r", b"\r", b"\n"]) == ["a", ""]


def test_a_line_is_not_cut_at_what_only_unicode_calls_a_line_end():
    text = 'data: {"text": "a\u2028b\u2029c\u0085d\x0be\x1cf"}'
    assert lines_of([text.encode() + b"\n\n"]) == [text, ""]


def test_bytes_that_are_no_text_are_marked():
    assert lines_of([b"a\xffb\n"]) == ["a\ufffdb"]


def test_a_line_without_an_end_is_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(event_lines, "MAX_LINE_BYTES", 100)
    lines = EventLines()
    assert lines.feed(b"x" * 100) == []
    with pytest.raises(LineTooLongError, match="longer than 100 bytes"):
        lines.feed(b"x")
