"""The site builds strictly, asks nothing from outside, and has the drawings in its pages.

Knows nothing of what the pages say.
"""

import os
import re
import subprocess
import sys

import pytest
from test_support.doc_blocks import ROOT

OUTSIDE = re.compile(r"""(?:src|href|url)\s*[=(]\s*["']?(https?:)?//[^"'\s)>]+""")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_pages_of_the_site_load_nothing_from_outside(site):
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text()):
            assert not OUTSIDE.search(tag), f"{page.name} loads {tag}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\(['\"]?(https?:)?//", sheet.read_text()), sheet.name


def test_drawings_stand_in_the_page_and_links_to_programs_stay_on_the_site(site):
    page = (site / "how-it-works" / "index.html").read_text()
    for name in ("memory", "step", "tree"):
        assert f'<svg xmlns="http://www.w3.org/2000/svg" id="zp-{name}"' in page
    assert not re.search(r'<img[^>]+\.svg"', page)
    assert 'href="../examples/#game_of_24py"' in (site / "language" / "index.html").read_text()
    assert 'href="../quality/"' in (site / "policies" / "index.html").read_text()
    programs = (site / "examples" / "index.html").read_text()
    assert "--8&lt;--" not in programs
    assert programs.count("zipage") > 40
