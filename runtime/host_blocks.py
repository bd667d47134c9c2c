"""Free list of host memory blocks, where swapped requests wait.

Knows nothing of what is in them.
"""


class HostBlocks:
    """Bounded: `allocate` says None when too few are left."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        if count > len(self._free):
            return None
        return tuple(self._free.pop() for _ in range(count))

    def free(self, host_ids: tuple[int, ...]) -> None:
        self._free.extend(host_ids)
        assert len(self._free) <= self.num_blocks, f"{len(self._free)} of {self.num_blocks} free"
