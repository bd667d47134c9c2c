"""Fuzzes one target: coverage-guided where atheris is installed (extra `fuzz`), else hypothesis.

New inputs that reach new code are kept in tests/fuzz/corpus/TARGET, small and merged; an input
that breaks the target is kept beside them and printed. Knows nothing of what the targets read.

    python tests/fuzz/run.py TARGET [--seconds N]      python tests/fuzz/run.py --list
"""

import argparse
import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
MAX_KEPT_BYTES = 512  # of one corpus input; the larger ones guide the run and are dropped
MAX_INPUT_BYTES = 4096
BROKE = "broke-"  # leads the names of inputs that once broke their target; they stay for good
MAX_RSS_MB = 3000
MAX_UNIT_S = 20


def target_names() -> list[str]:
    return sorted(path.stem for path in (HERE / "targets").glob("*.py"))


def load_target(name: str) -> Callable[[bytes], None]:
    """The function `target` of tests/fuzz/targets/NAME.py."""
    path = HERE / "targets" / f"{name}.py"
    if "test_support" not in sys.modules:  # as tests/conftest.py has it
        support = types.ModuleType("test_support")
        support.__path__ = [str(HERE.parent / "support")]
        sys.modules["test_support"] = support
    spec = importlib.util.spec_from_file_location(f"fuzz_target_{name}", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found: Callable[[bytes], None] = module.target
    return found


def corpus_of(name: str) -> list[Path]:
    folder = CORPUS / name
    return sorted(folder.iterdir()) if folder.is_dir() else []


def keep(name: str, data: bytes, prefix: str = "") -> Path:
    """Put an input into the target's corpus, named by its content."""
    path = CORPUS / name / (prefix + hashlib.sha256(data).hexdigest()[:16])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def fuzz_here(name: str, arguments: list[str]) -> None:
    """libFuzzer's loop, in this process, which it ends."""
    import atheris

    with atheris.instrument_imports(include=["zipage_lang"]):
        target = load_target(name)
    atheris.Setup(arguments, target)
    atheris.Fuzz()


def fuzz_guided(name: str, seconds: int) -> int:
    """One run of atheris in a child, then its corpus merged into the kept one."""
    with tempfile.TemporaryDirectory(prefix=f"fuzz-{name}-") as scratch:
        grown, merged, broken = (Path(scratch) / part for part in ("grown", "merged", "broken"))
        for folder in (grown, merged, broken):
            folder.mkdir()
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
        again = _program(name, Path(scratch))
        limits = [f"-max_len={MAX_INPUT_BYTES}", f"-rss_limit_mb={MAX_RSS_MB}"]
        limits += [f"-timeout={MAX_UNIT_S}", f"-artifact_prefix={broken}/", "-len_control=10"]
        run = [f"-max_total_time={seconds}", str(grown), str(CORPUS / name)]
        code = _child(again, [*limits, *run])
        for path in broken.iterdir():
            kept = keep(name, path.read_bytes(), BROKE)
            print(f"{name}: {path.name} breaks it, kept as {kept}")
        if code == 0:
            merge = ["-merge=1", f"-max_len={MAX_KEPT_BYTES}", str(merged), str(CORPUS / name)]
            _child(again, [*limits, *merge, str(grown)])
            _replace(name, [path.read_bytes() for path in merged.iterdir()])
        return code


def _replace(name: str, inputs: list[bytes]) -> None:
    """These inputs in place of the corpus, but for those that once broke the target."""
    kept = {keep(name, data) for data in inputs}
    for path in corpus_of(name):
        if kept and path not in kept and not path.name.startswith(BROKE):
            path.unlink()


def _program(name: str, folder: Path) -> Path:
    """The fuzzer as a program: libFuzzer starts it anew by its first argument, say to merge."""
    path = folder / "fuzz"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} --here "$0" "$@"\n')
    path.chmod(0o700)
    return path


def _child(program: Path, arguments: list[str]) -> int:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([str(program), *arguments], env=environment, check=False).returncode


def fuzz_by_hypothesis(name: str, seconds: int) -> int:
    """Random and damaged inputs for as long; an input that breaks the target is shrunk and kept."""
    import time

    from hypothesis import HealthCheck, Phase, given, settings
    from test_support.fuzz_strategy import inputs

    target = load_target(name)
    end = time.monotonic() + seconds
    last = b""

    @settings(
        max_examples=2000,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs([path.read_bytes() for path in corpus_of(name)]))
    def attempt(data: bytes) -> None:
        nonlocal last
        last = data
        target(data)

    while time.monotonic() < end:
        try:
            attempt()
        except BaseException:
            print(f"{name}: an input breaks it, kept as {keep(name, last, BROKE)}")
            raise
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", choices=target_names())
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--list", action="store_true", help="name the targets")
    parser.add_argument("--here", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list or options.target is None:
        print("\n".join(target_names()))
        return 0
    if options.here is not None:
        fuzz_here(options.target, options.here)
    with contextlib.suppress(ImportError):
        import atheris  # noqa: F401

        return fuzz_guided(options.target, options.seconds)
    print("atheris is not installed (extra `fuzz`): hypothesis instead, which no coverage guides")
    return fuzz_by_hypothesis(options.target, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
