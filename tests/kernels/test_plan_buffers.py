"""Room for attention plans where memory may be refused. Needs no card."""

import types

import pytest
import torch

from zipage_lang.kernels import plan_buffers
from zipage_lang.kernels.plan_buffers import HostCopy, PlanBuffers, workspace_bytes


class Memory:
    """Stands in for pinned memory, which is refused `num_refusals` times from the `first` on."""

    def __init__(self, first, num_refusals):
        self._refused, self._num_asked = range(first, first + num_refusals), 0

    def host_copy(self, num_bytes, num_entries):
        self._num_asked += 1
        if self._num_asked - 1 in self._refused:
            raise MemoryError("refused")
        return HostCopy(
            workspace=torch.zeros(num_bytes, dtype=torch.uint8),
            entries=torch.zeros(num_entries, dtype=torch.int32),
            sent=types.SimpleNamespace(synchronize=lambda: None, record=lambda: None),
        )


@pytest.mark.parametrize("first", [0, 1, 2, 3])
@pytest.mark.parametrize("num_refusals", [1, 2])
def test_a_refusal_leaves_no_copy_smaller_than_its_target(monkeypatch, first, num_refusals):
    memory = Memory(first, num_refusals)
    monkeypatch.setattr(plan_buffers, "_host_copy", memory.host_copy)
    buffers, num_given = PlanBuffers(torch.device("cpu")), 0
    for num_entries, num_tiles in [(10, 5), (10, 5), (4000, 90_000), (4000, 90_000), (9000, 9)] * 3:
        try:
            host = buffers.next_host(num_entries, num_tiles, 7)
        except MemoryError:
            continue
        num_given += 1
        assert host.workspace.numel() == buffers.workspace.numel()
        assert host.workspace.numel() >= workspace_bytes(num_tiles, 7)
        assert host.entries.numel() == buffers.entries.numel() >= num_entries
    assert num_given >= 15 - num_refusals
