"""Plots as PNG files: what their legend says. Knows nothing of how numbers came to be."""

import pytest

from zipage_lang.evaluation.chart_data import Panel, Point, Series
from zipage_lang.evaluation.png_plots import _legend
from zipage_lang.evaluation.statistics import Interval

pytest.importorskip("matplotlib")

HALF = Interval(0.5, 0.4, 0.6)


def legend(*points):
    panel = Panel("a", "x", (Series("mine", points),), None, is_log=False, has_lines=False)
    return [(handle.get_label(), handle.get_marker()) for handle in _legend([panel], ["mine"])]


def test_one_kind_of_point_needs_no_word():
    circles = legend(Point(1, HALF, ""), Point(2, HALF, ""))
    assert circles == [("full", "None"), ("mine", "o")]
    squares = legend(Point(1, HALF, "", is_adaptive=True))
    assert [label for label, _ in squares] == ["full", "mine"]


def test_modes_in_one_panel_are_told_apart():
    both = legend(Point(1, HALF, ""), Point(2, HALF, "", is_adaptive=True))
    assert both[2:] == [("fixed", "o"), ("adaptive", "s")]


def test_an_open_mark_is_explained_beside_filled_ones():
    both = legend(Point(1, HALF, ""), Point(2, HALF, "", is_unprotected=True))
    assert both[2:] == [("prompt evictable", "o")]
