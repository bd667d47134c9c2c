"""The package's optional extras, and what is not installed of each.

Knows nothing of what the packages are for.
"""

import importlib.metadata
import re
from collections.abc import Iterator

PACKAGE = "zipage-lang"
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?P<rest>[^;]*)(;(?P<marker>.*))?")
_EXTRA = re.compile(r"""extra\s*==\s*["']([\w.-]+)["']""")


def extras() -> dict[str, list[str]]:
    """Extra -> the packages it asks for on this system, as the installed package says."""
    found: dict[str, list[str]] = {}
    for name, marker in _requirements():
        extra = _EXTRA.search(marker)
        is_elsewhere = "platform_system == 'Windows'" in marker.replace('"', "'")
        if extra is not None and name != PACKAGE and not is_elsewhere:
            found.setdefault(extra[1], []).append(name)
    return found


def missing(packages: list[str]) -> list[str]:
    """Those that are not installed."""
    return [name for name in packages if version_of(name) is None]


def version_of(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements() -> Iterator[tuple[str, str]]:
    """(package, marker)."""
    for line in importlib.metadata.requires(PACKAGE) or ():
        match = _REQUIREMENT.match(line)
        if match is not None:
            yield match["name"], match["marker"] or ""
