"""Memory that is refused: torch operations that would allocate raise, by number or by size.

Every operation that makes a new tensor counts, whoever calls it. Knows nothing of engines.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclasses.dataclass(slots=True)
class Refusals:
    """Which allocations are refused. `numbers` counts from when it was made."""

    numbers: Callable[[int], bool] = lambda _: False
    max_elements: int | None = None  # a tensor of more is refused; None: none is
    num_asked: int = 0
    num_refused: int = 0

    def ask(self, num_elements: int) -> None:
        """Raises as torch's CPU allocator does."""
        number, self.num_asked = self.num_asked, self.num_asked + 1
        is_large = self.max_elements is not None and num_elements > self.max_elements
        if is_large or self.numbers(number):
            self.num_refused += 1
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate "
                f"memory: you tried to allocate {num_elements} elements. Error code 12"
            )


class RefusedMemory(TorchDispatchMode):
    """While entered, allocations ask `refusals`. Small ones (up to `free_elements`) do not."""

    def __init__(self, refusals: Refusals, free_elements: int = 0) -> None:
        super().__init__()
        self._refusals, self._free = refusals, free_elements

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _allocates(func):
            # Refused when it is done: what it made is lost, and nothing else has changed.
            size = _num_elements(result)
            if size > self._free:
                self._refusals.ask(size)
        return result


def _allocates(func: Any) -> bool:
    """Neither a view nor an operation in place."""
    schema = func._schema
    return not schema.is_mutable and not any(
        returned.alias_info is not None for returned in schema.returns
    )


def _num_elements(result: Any) -> int:
    if isinstance(result, torch.Tensor):
        return result.numel()
    if isinstance(result, (tuple, list)):
        return sum(map(_num_elements, result))
    return 0
