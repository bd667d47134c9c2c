"""Looks into a wheel and an sdist: every file of the package is there once, and nothing else is.

Knows nothing of how they are built or installed.
"""

import hashlib
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

Contents = Mapping[str, bytes]  # path in the archive -> bytes

LARGE_BYTES = 1_000_000
MAX_ARCHIVE_BYTES = 40_000_000  # the tiny reasoner's weights are 27 MB of it
MODEL = "zipage-tiny-reasoner"
STRAYS = ("tests/", "benchmarks/", "training/", ".venv/", "build/", "__pycache__/")


def main(tree: Path, folder: Path) -> int:
    """Check the one wheel and the one sdist in `folder` against `tree`; returns the exit code."""
    wheel = only(folder.glob("*.whl"))
    sdist = only(folder.glob("*.tar.gz"))
    faults = [
        *wheel_faults(tree, wheel_contents(wheel)),
        *sdist_faults(tree, sdist_contents(sdist)),
        *size_faults([wheel, sdist]),
    ]
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults:
        for archive in (wheel, sdist):
            print(f"{archive.name}: {archive.stat().st_size / 1e6:.1f} MB, as it should be")
    return 1 if faults else 0


def only(paths: Iterable[Path]) -> Path:
    found = sorted(paths)
    if len(found) != 1:
        raise SystemExit(f"expected one archive of a kind, found {[path.name for path in found]}")
    return found[0]


def wheel_contents(wheel: Path) -> Contents:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sdist_contents(sdist: Path) -> Contents:
    """Without the folder that all of an sdist lies in."""
    contents = {}
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            if file is not None:
                contents[member.name.partition("/")[2]] = file.read()
    return contents


def wheel_faults(tree: Path, contents: Contents) -> list[str]:
    faults = missing("wheel", package_files(tree).values(), contents)
    metadata = [name for name in contents if ".dist-info/" in name]
    faults += [
        f"the wheel has {name}, which is no part of the package"
        for name in contents
        if not name.startswith("zipage_lang/") and name not in metadata
    ]
    if not any(name.endswith("licenses/LICENSE") for name in metadata):
        faults.append("the wheel has no LICENSE")
    return faults + stray("wheel", contents) + doubled("wheel", contents)


def sdist_faults(tree: Path, contents: Contents) -> list[str]:
    single = ["pyproject.toml", "README.md", "LICENSE", "constraints.txt", "mkdocs.yml", "Makefile"]
    faults = missing("sdist", [*single, *package_files(tree)], contents)
    return faults + stray("sdist", contents) + doubled("sdist", contents)


def package_files(tree: Path) -> dict[str, str]:
    """Every file of the rooms -> where it lies in the wheel."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())
    folders = project["tool"]["setuptools"]["package-dir"]
    rooms = {folder: name for name, folder in folders.items() if "/" not in folder}
    files = {}
    for folder, name in rooms.items():
        for path in (tree / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                inside = path.relative_to(tree / folder)
                files[f"{folder}/{inside}"] = f"{name.replace('.', '/')}/{inside}"
    assert any(MODEL in name for name in files), "the tiny reasoner is not in the tree"
    return files


def missing(archive: str, wanted: Iterable[str], contents: Contents) -> list[str]:
    return [f"the {archive} lacks {name}" for name in wanted if name not in contents]


def stray(archive: str, contents: Contents) -> list[str]:
    return [
        f"the {archive} should not have {name}"
        for name in contents
        if any(f"/{part}" in f"/{name}" for part in STRAYS)
    ]


def doubled(archive: str, contents: Contents) -> list[str]:
    seen: dict[str, str] = {}
    faults = []
    for name, data in contents.items():
        if len(data) < LARGE_BYTES:
            continue
        digest = hashlib.sha256(data).hexdigest()
        if digest in seen:
            faults.append(f"the {archive} has the same bytes twice: {seen[digest]} and {name}")
        seen[digest] = name
    return faults


def size_faults(archives: Iterable[Path]) -> list[str]:
    return [
        f"{path.name} has {path.stat().st_size:,} bytes, more than {MAX_ARCHIVE_BYTES:,}"
        for path in archives
        if path.stat().st_size > MAX_ARCHIVE_BYTES
    ]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
