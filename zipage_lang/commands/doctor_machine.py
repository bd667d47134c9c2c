"""What `zipage doctor` says of the machine: processor, memory, disk, models, packages.

Knows nothing of cards or of how findings are printed.
"""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from zipage_lang.commands.extras import extras, missing, version_of
from zipage_lang.commands.findings import Finding, bad, good, warn
from zipage_lang.commands.machine import machine_name
from zipage_lang.commands.units import binary
from zipage_lang.runtime.model_store import list_models, zipage_home

LEAST_MEMORY = 4 * 2**30
LEAST_DISK = 5 * 2**30
NOT_FOR_USERS = ("test", "docs", "dev")


def machine_findings() -> Iterator[Finding]:
    """Each look at the machine that needs no card."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield good("python", f"{version} on {platform.system()} {platform.machine()}")
    yield good("zipage-lang", f"{version_of('zipage-lang')} in {_package_folder()}")
    yield good("processor", f"{machine_name()}, {_num_cores()} cores for this process")
    yield _memory()
    yield _disk()
    yield _sockets()
    yield _compiler()
    yield from _models()
    yield from _extras()


def _package_folder() -> Path:
    return Path(__file__).resolve().parent.parent


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> Finding:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return good("memory", "unknown on this system")
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    free, total = values.get("MemAvailable", 0), values["MemTotal"]
    value = f"{binary(free)} free of {binary(total)}"
    if free < LEAST_MEMORY:
        return warn("memory", value, "free some, or take a small model and --kv-cache-memory 0.25")
    return good("memory", value)


def _disk() -> Finding:
    home = zipage_home()
    there = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    value = f"{binary(free)} free for models in {home}"
    if not os.access(there, os.W_OK):
        return bad("disk", f"{there} is not writable", "set ZIPAGE_HOME to a folder that is")
    if free < LEAST_DISK:
        return warn("disk", value, "free some, or set ZIPAGE_HOME to a folder on another disk")
    return good("disk", value)


def _sockets() -> Finding:
    """A folder for them is made as the engine's client makes it."""
    from zipage_lang.frontend.engine_sockets import make_folder

    try:
        folder = make_folder()
    except OSError as error:
        advice = "set TMPDIR to a folder that can be written to"
        return bad("sockets", f"no folder for them: {error}", advice)
    folder.rmdir()
    return good("sockets", f"the engine talks through {folder.parent}")


def _compiler() -> Finding:
    for name in ("cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return good("C compiler", found)
    return warn("C compiler", "none", "install gcc: Triton needs it on a card")


def _models() -> Iterator[Finding]:
    for model in list_models():
        if model.path is None:
            yield warn("model", f"{model.name} is not here", f"zipage models pull {model.name}")
        else:
            yield good("model", f"{model.name} in {model.path}")


def _extras() -> Iterator[Finding]:
    for extra, packages in sorted(extras().items()):
        if extra in NOT_FOR_USERS or extra == "gpu":
            continue
        absent = missing(packages)
        if absent:
            advice = f"if you need it: pip install 'zipage-lang[{extra}]'"
            yield warn(f"extra {extra}", f"not installed: {', '.join(absent)}", advice)
        else:
            yield good(f"extra {extra}", ", ".join(f"{p} {version_of(p)}" for p in packages))
