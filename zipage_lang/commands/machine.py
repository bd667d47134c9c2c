"""The processor's name, for reports. Knows nothing of what is reported."""

import platform
from pathlib import Path


def machine_name() -> str:
    """The processor, as the system names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
