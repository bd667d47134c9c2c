"""What installing the package brings along: every one of them pinned, and under which licence.

Read from the metadata of the environment that runs this. Knows nothing of what the packages do.

    python packaging/dependencies.py pins [--write]       constraints.txt pins all that is installed
    python packaging/dependencies.py licences [--write]   LICENSES.md lists what users install
"""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
OURS = "zipage-lang"
EXTRAS = ("audit", "docs", "eval", "fuzz", "gpu", "otel", "serve", "test")
RUN_TIME_EXTRAS = ("eval", "otel", "serve")
VENDORS = ("nvidia-", "cuda-")  # come with torch's builds for cards, in versions of its own choice
FORBIDDEN = re.compile(r"(?<!L)GPL|GNU (Affero )?General Public|SSPL|Commons Clause|Proprietary")

HEAD = """\
# Licences

Zipage-Lang is under the Apache License 2.0 ([LICENSE](LICENSE)). This is what `pip install` of the
package with its extras `eval`, `otel` and `serve` brings along, and under which licence; made by
`python packaging/dependencies.py licences --write`, and a test holds it to what is installed.

None of these is under a GPL. The extra `gpu` adds `flashinfer-python` (Apache-2.0) and what it
needs; builds of torch for NVIDIA's cards bring NVIDIA's libraries under NVIDIA's own terms.

| Package | Version | Licence |
|---|---|---|
"""


def brought_along(name: str, extras: Sequence[str]) -> dict[str, Distribution]:
    """Canonical name -> distribution of all that is installed for `name` with these extras."""
    found: dict[str, Distribution] = {}
    todo = [(name, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        asked = todo.pop()
        if asked in seen or asked[0].startswith(VENDORS):
            continue
        seen.add(asked)
        try:
            made = distribution(asked[0])
        except PackageNotFoundError:  # of an extra that is not installed here
            continue
        found[asked[0]] = made
        todo += _needs(made, asked[1])
    return {name: made for name, made in found.items() if name not in (OURS, "pip")}


def _needs(made: Distribution, extras: Iterable[str]) -> list[tuple[str, frozenset[str]]]:
    needed = []
    for line in made.requires or ():
        wanted = Requirement(line)
        places = [{"extra": extra} for extra in extras] or [{"extra": ""}]
        if wanted.marker is None or any(map(wanted.marker.evaluate, places)):
            needed.append((canonicalize_name(wanted.name), frozenset(wanted.extras)))
    return needed


def read_pins(path: Path) -> dict[str, str]:
    """Canonical name -> version of each `name==version` line."""
    lines = [line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    pairs = [line.split("==") for line in lines if line]
    return {canonicalize_name(name): version for name, version in pairs}


def wrong_pins(pins: Mapping[str, str], installed: Mapping[str, Distribution]) -> list[str]:
    """What is installed without a pin, or in another version than its pin says."""
    found = []
    for name, made in sorted(installed.items()):
        version = Version(made.version).public
        if name not in pins:
            found.append(f"{name}=={version} has no pin")
        elif Version(pins[name]) != Version(version):
            found.append(f"{name} is pinned at {pins[name]} but {version} is installed")
    return found


def licence_of(made: Distribution) -> str:
    """The licence as one short expression; "" where the package states none."""
    said = made.metadata.get_all("License-Expression") or []
    if said:
        return " ".join(said)
    kinds = [
        line.rpartition(" :: ")[2].replace("OSI Approved", "")
        for line in made.metadata.get_all("Classifier") or []
        if line.startswith("License ::")
    ]
    text = (made.metadata.get("License") or "").strip().splitlines()
    short = text[0] if text and len(text[0]) <= 60 and text[0] != "UNKNOWN" else ""
    return " or ".join(filter(None, kinds)) or short


def licence_faults(installed: Mapping[str, Distribution]) -> list[str]:
    """Packages whose licence is not known, or is none to build upon here."""
    found = []
    for name, made in sorted(installed.items()):
        licence = licence_of(made)
        if not licence or FORBIDDEN.search(licence):
            found.append(f"{name}: {licence or 'states no licence'}")
    return found


def licence_page(installed: Mapping[str, Distribution]) -> str:
    rows = [
        f"| {name} | {Version(made.version).public} | {licence_of(made)} |"
        for name, made in sorted(installed.items())
    ]
    return HEAD + "\n".join(rows) + "\n"


def check_pins(path: Path, *, write: bool) -> list[str]:
    installed = brought_along(OURS, EXTRAS)
    pins = read_pins(path)
    faults = wrong_pins(pins, installed)
    if write and faults:
        pins |= {name: Version(made.version).public for name, made in installed.items()}
        path.write_text("".join(f"{n}=={v}\n" for n, v in sorted(pins.items())), encoding="utf-8")
        return []
    return faults


def check_licences(path: Path, *, write: bool) -> list[str]:
    installed = brought_along(OURS, RUN_TIME_EXTRAS)
    page = licence_page(installed)
    if write:
        path.write_text(page, encoding="utf-8")
    is_current = path.is_file() and path.read_text(encoding="utf-8") == page
    stale = [] if is_current else [f"{path.name} is not current; run this with --write"]
    return licence_faults(installed) + stale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("pins", "licences"))
    parser.add_argument("--write", action="store_true", help="mend the file")
    options = parser.parse_args()
    if options.what == "pins":
        faults = check_pins(ROOT / "constraints.txt", write=options.write)
    else:
        faults = check_licences(ROOT / "LICENSES.md", write=options.write)
    print("\n".join(faults) or f"{options.what}: as they should be")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
