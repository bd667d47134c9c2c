"""The page's colours: text can be read, and owners can be told apart by all eyes."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from zipage_lang.server.live.routes import PAGE, headers_of

TEXT = PAGE.read_text(encoding="utf-8")
OWNERS = ("prefix", "cached", "tail", "compacted", "old", "held")
# Machado, Oliveira and Fernandes 2009, severity 1, for linear RGB.
EYES = {
    "usual": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def colours(theme):
    """{name: linear RGB} of a theme; dark takes from light what it does not change."""
    blocks = {
        "light": re.search(r":root \{(.*?)\n\}", TEXT, re.S).group(1),
        "dark": re.search(r":root\[data-theme=dark\] \{(.*?)\n\}", TEXT, re.S).group(1),
    }
    names = blocks["light"] if theme == "light" else blocks["light"] + blocks["dark"]
    return {
        name: linear(value) for name, value in re.findall(r"--([\w-]+): #([0-9a-f]{6});", names)
    }


def linear(value):
    rgb = np.array([int(value[i : i + 2], 16) / 255 for i in (0, 2, 4)])  # [3]
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)  # [3]


def luminance(rgb):
    return float(rgb @ [0.2126, 0.7152, 0.0722])


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def lab(rgb):
    """CIELAB under D65."""
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    ratio = (to_xyz @ np.clip(rgb, 0, 1)) / [0.9505, 1.0, 1.089]  # [3]
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)  # [3]
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])  # [3]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["ink", "muted", "faint", "warn", "good", "bad", "flash"])
def test_text_can_be_read_on_the_page(theme, name):
    names = colours(theme)
    assert contrast(names[name], names["page"]) >= 4.5


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    ("text", "ground"),
    [
        ("warn", "warn-soft"),
        ("good", "soft"),
        ("ink", "cached"),
        ("ink", "old"),
        ("on-compacted", "compacted"),
    ],
)
def test_text_can_be_read_on_coloured_ground(theme, text, ground):
    names = colours(theme)
    assert contrast(names[text], names[ground]) >= 4.5


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_labels_in_the_tree_can_be_read(theme):
    names = colours(theme)
    assert contrast(names["on-prefix"], names["prefix"]) >= 4.5


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("eyes", EYES)
def test_owners_can_be_told_apart_by_all_eyes(theme, eyes):
    """A difference of 10 in CIELAB is plain between neighbouring squares."""
    names = colours(theme)
    seen = {owner: lab(np.array(EYES[eyes]) @ names[owner]) for owner in OWNERS}
    for one, other in itertools.combinations(OWNERS, 2):
        apart = float(np.linalg.norm(seen[one] - seen[other]))
        assert apart >= 10, f"{one} and {other}: {apart:.1f}"


def test_the_page_is_one_file_that_names_no_other_place():
    assert Path(PAGE).suffix == ".html"
    addresses = re.findall(r"https?://[^\s\"')]+", TEXT)
    assert {address.replace("%27", "'") for address in addresses} <= {"http://www.w3.org/2000/svg"}
    assert "src=" not in TEXT
    policy = headers_of(PAGE.read_text())["content-security-policy"]
    assert "connect-src 'self'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
