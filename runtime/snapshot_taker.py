"""Takes a Snapshot of the scheduler's state: reads everything, changes nothing.

Knows nothing of tensors, sockets or how the picture is drawn.
"""

import dataclasses
import heapq
from collections.abc import Iterator

from zipage_lang.radix_cache.block_table import BlockTable
from zipage_lang.radix_cache.census import Owner
from zipage_lang.radix_cache.radix_tree import AtomicNode, Node, PlainNode
from zipage_lang.runtime.request import Request, Status
from zipage_lang.runtime.scheduler_state import SchedulerState
from zipage_lang.runtime.snapshot import BlockGrid, NodeView, RequestView


@dataclasses.dataclass(frozen=True, slots=True)
class Requests:
    """Those that are shown, and how much there is of all."""

    views: list[RequestView]
    num_requests: int
    logical_len: int
    resident_len: int


def take_grid(state: SchedulerState, max_cells: int) -> BlockGrid:
    """Counts of all blocks, and at most `max_cells` of them one by one."""
    running: list[BlockTable] = []
    held: list[BlockTable] = []
    for request in state.requests():
        if request.table is not None:
            (held if request.status is Status.HELD else running).append(request.table)
    owners = state.cache.owners(running, held)[1:]  # the dummy block is no part of the picture
    num_blocks = len(owners)
    stride = max(1, -(-num_blocks // max_cells)) if max_cells else num_blocks
    return BlockGrid(
        block_size=state.block_size,
        num_blocks=num_blocks,
        num_by_owner=[owners.count(owner) for owner in Owner],
        stride=stride,
        cells=bytes(owners[::stride]) if max_cells else b"",
    )


def take_nodes(state: SchedulerState, max_nodes: int) -> list[NodeView]:
    """The tree from its roots on, at most `max_nodes` of it: what is used most comes first."""
    queue = [_ranked(root, 0) for root in state.cache.roots()]
    heapq.heapify(queue)
    taken: list[tuple[Node, int]] = []
    while queue and len(taken) < max_nodes:
        *_, parent, node = heapq.heappop(queue)
        taken.append((node, parent))
        for child in _children(node):
            heapq.heappush(queue, _ranked(child, node.serial))
    serials = {node.serial for node, _ in taken}
    return [_node_view(node, parent, serials) for node, parent in taken]


def take_requests(state: SchedulerState, max_requests: int) -> Requests:
    """The first `max_requests` in order of precedence, running ones first; and sums of all."""
    alive = [request for request in state.requests() if request.status is not Status.ENDED]
    return Requests(
        views=[_request_view(request) for request in alive[:max_requests]],
        num_requests=len(alive),
        logical_len=sum(request.logical_len for request in alive),
        resident_len=sum(request.resident_len for request in alive),
    )


def _ranked(node: Node, parent: int) -> tuple[int, int, int, int, Node]:
    """Orders by hits, then by what is held; serials are unique, so nodes are never compared."""
    return (-node.num_hits, -len(node.block_ids), node.serial, parent, node)


def _children(node: Node) -> Iterator[Node]:
    if isinstance(node, PlainNode):
        yield from node.children.values()
        yield from node.atomic_nodes


def _node_view(node: Node, parent: int, serials: set[int]) -> NodeView:
    is_atomic = isinstance(node, AtomicNode)
    return NodeView(
        serial=node.serial,
        parent=parent,
        is_atomic=is_atomic,
        num_tokens=len(node.state.span) if isinstance(node, AtomicNode) else len(node.tokens),
        num_blocks=len(node.block_ids),
        num_hits=node.num_hits,
        num_locks=node.lock_count,
        num_left_out=sum(child.serial not in serials for child in _children(node)),
    )


def _request_view(request: Request) -> RequestView:
    swapped = None if request.swapped is None else request.swapped.table
    where = swapped or request.table
    return RequestView(
        arrival=request.arrival,
        sample_index=request.sample_index,
        status="swapped" if swapped is not None else request.status.value,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_cached_tokens=min(request.num_cached_tokens, request.num_prompt_tokens),
        end_len=request.end_len,
        logical_len=0 if where is None else where.logical_len,
        resident_len=0 if where is None else where.resident_len,
        protected_len=request.kv.protected_len,
        mode=request.kv.mode,
        policy=request.kv.policy,
        budget=request.kv.budget,
        interval=request.kv.interval,
        compactions=request.compactions,
        dropped=request.dropped,
        last_compaction_at=request.last_compaction_at,
    )
