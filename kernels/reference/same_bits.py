"""Products cut into sizes that all give the same bits: found by trying, once for each shape.

A BLAS picks its code by the shape of a product. Which number of rows (or of matrices in a batch)
agree is not documented, so it is measured: sizes that give every row, at every place, the bits that
the base size gives. What code runs depends on shapes, never on values, so one try settles it for
the life of the process, provided that the number of threads stays. Knows nothing of layers.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Product = Callable[..., Tensor]  # of tensors with one leading axis; row i of each makes row i

BASES = (16, 8, 4, 2, 1)  # 1 always agrees with itself
CHEAP_ROWS = 16  # up to here a run costs about what one row does
ALIGNMENT = 64  # bytes; torch allocates so


def agreeing_sizes(
    product: Product,
    probes: Sequence[Tensor],
    candidates: Sequence[int],
    bases: Sequence[int] = BASES,
) -> tuple[int, ...]:
    """Sizes of the leading axis with which `product` gives equal rows equal bits, ascending.

    Args:
        product: what is to be cut.
        probes: rows of each argument, [num_probes, ..], tried one by one; see `cancelling`.
        candidates: sizes to try beside the base.
        bases: the first that treats all its places alike is what the others must agree with.
    """
    lone = [[argument[i : i + 1] for argument in probes] for i in range(len(probes[0]))]
    base, agreeing = 1, {1}
    for base in bases:
        found = [product(*_repeated(probe, base)) for probe in lone]
        agreeing = {base}
        if all(_all_equal(rows, rows[0]) for rows in found):
            break
    for size in candidates:
        pairs = zip(lone, found, strict=True)
        if all(_all_equal(product(*_repeated(probe, size)), rows[0]) for probe, rows in pairs):
            agreeing.add(size)
    return tuple(sorted(agreeing))


def in_sizes(product: Product, arguments: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """`product` of any number of rows, run in the given sizes; the last run is padded with zeros.

    Args:
        arguments: [num_rows, ..] each, at least one row.
        sizes: ascending, from `agreeing_sizes`.
    """
    num_rows, done, parts = len(arguments[0]), 0, []
    while done < num_rows:
        left = num_rows - done
        size = max((size for size in sizes if size <= left), default=sizes[0])
        if left > size:
            larger = next((other for other in sizes if other >= left), size)
            size = larger if larger <= max(CHEAP_ROWS, left * 4 // 3) else size
        count = min(size, left)
        part = product(*(_aligned(argument, done, count, size) for argument in arguments))
        parts.append(part[:count])
        done += count
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def cancelling(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The same shapes with values whose products sum to rounding errors alone.

    Each product of a pair of places along the shared axis cancels the other's exactly, far apart in
    the sum, so that what is left is made of every rounding on the way: another order of the same
    sum shows in nearly every element, even of a result that is rounded to bfloat16.

    Args:
        first: [.., num_rows, size].
        second: [.., size, num_columns].
    """
    generator = torch.Generator().manual_seed(first.shape[-1])
    size, half = first.shape[-1], first.shape[-1] // 2
    pairs = torch.randperm(size, generator=generator)[: 2 * half].view(2, half)
    left = _spread(first.shape, generator).to(first.dtype)
    right = _spread(second.shape, generator).to(second.dtype)
    left[..., pairs[1]] = left[..., pairs[0]]
    right[..., pairs[1], :] = -right[..., pairs[0], :]
    is_paired = torch.zeros(size, dtype=torch.bool)
    is_paired[pairs] = True
    left[..., ~is_paired] *= 2.0**-18
    return left.to(first.device), right.to(second.device)


def _spread(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Normal values of very different sizes, so that their sums round."""
    exponents = torch.randint(-6, 7, tuple(shape), generator=generator)
    return torch.randn(tuple(shape), generator=generator).ldexp_(exponents)


def _repeated(probes: Sequence[Tensor], size: int) -> list[Tensor]:
    return [probe.expand(size, *probe.shape[1:]).contiguous() for probe in probes]


def _all_equal(rows: Tensor, row: Tensor) -> bool:
    return bool((rows == row).all())


def _aligned(argument: Tensor, start: int, count: int, size: int) -> Tensor:
    """Rows at an aligned place: where in a larger tensor they lay must not matter either."""
    found = argument[start : start + count]
    if count == size and found.is_contiguous() and found.data_ptr() % ALIGNMENT == 0:
        return found
    rows = argument.new_zeros((size, *argument.shape[1:]))
    rows[:count] = found
    return rows
