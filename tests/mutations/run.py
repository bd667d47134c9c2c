"""Plants each fault of tests/mutations/*.toml in a copy of the tree and runs the tests it names.

A fault is caught when its tests, which pass on the clean copy, fail with it. The working tree is
never written to. Knows nothing of what the faults or the tests are about.

    python tests/mutations/run.py [--only WORD] [--list]
"""

import argparse
import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 180.0  # of one fault's tests; to wait in vain for some process to end takes 90 s of it
LEFT_OUT = (".git", ".venv", "build", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")
COPY = "ZIPAGE_MUTATIONS_COPY"  # in the environment of all that a copy's tests start
FIELDS = ("name", "file", "old", "new", "tests")
TESTS_FAILED = 1  # pytest's exit code; 2 and above: nothing was found out


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One planted fault: `old`, which stands once in `file`, becomes `new`; `tests` must notice."""

    room: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def read_mutations(folder: Path) -> list[Mutation]:
    """All faults of the folder's TOML files. Raises ValueError for an entry that is not whole."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("mutation", []):
            if sorted(entry) != sorted(FIELDS):
                raise ValueError(f"{path.name}: {entry.get('name')!r} needs {', '.join(FIELDS)}")
            found.append(Mutation(path.stem, **entry | {"tests": tuple(entry["tests"])}))
    return found


def fault_of(mutation: Mutation, tree: Path) -> str | None:
    """Why the mutation can't be planted in `tree` or its tests can't be run; None where it can."""
    path = tree / mutation.file
    if not path.is_file():
        return f"there is no file {mutation.file}"
    count = path.read_text(encoding="utf-8").count(mutation.old)
    if count != 1:
        return f"`old` stands {count} times in {mutation.file}, not once"
    if mutation.old == mutation.new:
        return "`new` is `old`"
    missing = [test for test in mutation.tests if not _exists(test, tree)]
    return f"there is no test {missing[0]}" if missing or not mutation.tests else None


def _exists(test: str, tree: Path) -> bool:
    path, *names = test.split("::")
    if not (tree / path).is_file():
        return False
    text = (tree / path).read_text(encoding="utf-8")
    bare = [name.split("[")[0] for name in names]
    return all(re.search(rf"\b(def|class) {name}\b|^{name} = ", text, re.M) for name in bare)


def copy_tree(tree: Path, folder: Path) -> None:
    """A copy of the tree whose package is imported from `folder/site`, as a wheel lays it out."""
    shutil.copytree(tree, folder / "tree", ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))
    (folder / "site").mkdir()
    (folder / "site" / "zipage_lang").symlink_to(folder / "tree" / "zipage_lang")
    for package, place in project["tool"]["setuptools"]["package-dir"].items():
        inside = folder / "site" / package.replace(".", "/")
        if not inside.exists():
            inside.symlink_to(folder / "tree" / place)


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """pytest's exit code, None where it took too long, and its last line."""
    environment = os.environ | {
        "PYTHONPATH": str(folder / "site"),
        "PYTHONDONTWRITEBYTECODE": "1",  # a file's old bytecode may be as new as its next version
        "OMP_NUM_THREADS": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        COPY: str(folder),
    }
    command = [
        sys.executable,
        "-c",
        "import pytest, sys; sys.path.remove(''); sys.exit(pytest.main())",
    ]
    with subprocess.Popen(
        [*command, "-x", "-p", "no:cacheprovider", "--no-header", *tests],
        cwd=folder / "tree",
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return None, f"no end after {LIMIT_S:.0f} s"
        finally:
            end_what_is_left(folder)
    lines = [line for line in printed.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return process.returncode, (failed or lines or ["nothing was printed"])[-1]


def end_what_is_left(folder: Path) -> None:
    """Kill all that the copy's tests started and that runs on, engines in their own sessions too.

    That a process does not end by itself may be the very fault that was planted.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is none of ours
            if process.environ().get(COPY) == str(folder):
                process.kill()


def check_import(folder: Path) -> None:
    """Raises RuntimeError where the tests would import the working tree after all."""
    code = "import zipage_lang.runtime.messages as m, os; print(os.path.realpath(m.__file__))"
    environment = os.environ | {"PYTHONPATH": str(folder / "site")}
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, env=environment, cwd="/", capture_output=True, check=True)
    if not printed.stdout.decode().startswith(str(folder.resolve())):
        raise RuntimeError(f"the package is imported from {printed.stdout.decode().strip()}")


def try_mutation(mutation: Mutation, folder: Path) -> tuple[bool, str]:
    """(whether it was caught, what pytest said last)."""
    path = folder / "tree" / mutation.file
    clean = path.read_text(encoding="utf-8")
    path.write_text(clean.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        code, said = run_tests(folder, mutation.tests)
    finally:
        path.write_text(clean, encoding="utf-8")
    return code == TESTS_FAILED, said


def run_all(mutations: Sequence[Mutation], tree: Path) -> int:
    """Try them all and print a table; returns how many were not caught or could not be tried."""
    with tempfile.TemporaryDirectory(prefix="zipage-mutations-") as name:
        folder = Path(name)
        copy_tree(tree, folder)
        check_import(folder)
        bad = {m: fault for m in mutations if (fault := fault_of(m, folder / "tree")) is not None}
        tests = sorted({test for m in mutations if m not in bad for test in m.tests})
        clean: dict[str, int | None] = {}
        for file in sorted({test.split("::")[0] for test in tests}):
            own = [test for test in tests if test.split("::")[0] == file]
            code, said = run_tests(folder, own)
            clean |= dict.fromkeys(own, code)
            if code != 0:
                print(f"without a fault: {said}", flush=True)
        num_missed = 0
        for number, mutation in enumerate(mutations, 1):
            started = time.monotonic()
            red = [test for test in mutation.tests if clean.get(test, 0) != 0]
            if mutation in bad or red:
                caught, said = False, bad.get(mutation, f"fails without the fault: {red}")
            else:
                caught, said = try_mutation(mutation, folder)
            num_missed += not caught
            verdict = "caught" if caught else "MISSED"
            seconds = time.monotonic() - started
            place = f"{mutation.room}: {mutation.name} ({mutation.file})"
            print(f"{number:3} {verdict} {seconds:5.1f} s  {place}\n      {said[:150]}", flush=True)
    print(f"{len(mutations) - num_missed} of {len(mutations)} planted faults were caught")
    return num_missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rooms or names that hold this word")
    parser.add_argument("--list", action="store_true", help="name the faults, plant none")
    options = parser.parse_args()
    found = read_mutations(Path(__file__).parent)
    chosen = [m for m in found if options.only in f"{m.room}: {m.name}"]
    if options.list:
        for mutation in chosen:
            print(f"{mutation.room}: {mutation.name} ({mutation.file})")
        return 0
    if not chosen:
        raise SystemExit(f"no planted fault has {options.only!r} in its room or name")
    return 1 if run_all(chosen, ROOT) else 0


if __name__ == "__main__":
    sys.exit(main())
