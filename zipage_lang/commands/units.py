"""Counts and bytes as people read them. Knows nothing of what is counted."""

import math


def binary(num_bytes: float) -> str:
    """`94 MiB`, `1.9 GiB`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    step = min(len(units) - 1, int(math.log(max(num_bytes, 1), 1024)))
    value = num_bytes / 1024**step
    return f"{value:.3g} {units[step]}" if value < 1000 else f"{value:.0f} {units[step]}"


def decimal(count: int) -> str:
    """`135 M`, `8.19 G`."""
    step = min(3, int(math.log10(max(count, 1))) // 3)
    return f"{count / 1000**step:.3g} {('', 'k', 'M', 'G')[step]}".strip()
