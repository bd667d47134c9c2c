"""docs/reference.md is what the commands and the settings say now."""

from pathlib import Path

from zipage_lang.cli import ENTRIES
from zipage_lang.reference import reference

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_reference_page_is_up_to_date():
    page = (ROOT / "docs" / "reference.md").read_text()
    assert page == reference(), (
        "docs/reference.md is old; from another folder run "
        "python -m zipage_lang.reference > docs/reference.md"
    )


def test_the_reference_names_every_command_and_leaves_no_cell_open():
    page = reference()
    for name in ENTRIES:
        assert f"### zipage {name}" in page
    for line in page.splitlines():
        if line.startswith("| "):
            assert not line.endswith("|  |"), f"nothing says what this is: {line}"
