"""The tree that a search grows: nodes are live branches, made by `propose`, scored by `evaluate`.

Knows nothing of strategies, requests or tokens.
"""

import asyncio
import dataclasses
from typing import Any

from zipage_lang.bodies import Bodies, Body
from zipage_lang.errors import RunCancelledError
from zipage_lang.ir import Expr
from zipage_lang.state import StateHandle
from zipage_lang.state_core import StateCore


@dataclasses.dataclass(eq=False)
class SearchNode:
    """One state of a search. `branch` is live while the search may go on from it.

    Parameters:
        core: the branch itself; `branch` is its handle.
        parent: None for the root, which is the state that was searched from.
        depth: steps from the root.
        step: the text that this node added; there still when it was dropped.
        score: what `evaluate` said; None where it was not asked or raised `error`.
        is_done: what `is_done` said.
        num_visits, value_sum: of the rollouts through it (mcts).
        is_dropped: it was cancelled, since the search will not go on from it.

    Errors: none of its own; `error` is what its branch or its evaluation raised.

    >>> def program(s):
    ...     found = zipage.search(s, propose=lambda b: ["a"], evaluate=lambda b: 1.0, depth=1)
    ...     return [(node.step, node.score) for node in found.root.children]
    >>> zipage.function(program).run().ret_value
    [('a', 1.0)]
    """

    branch: Any
    core: StateCore
    parent: "SearchNode | None" = None
    depth: int = 0
    step: str = ""
    score: float | None = None
    is_done: bool = False
    error: BaseException | None = None
    children: "list[SearchNode]" = dataclasses.field(default_factory=list)
    num_visits: int = 0
    value_sum: float = 0.0
    is_dropped: bool = False

    @property
    def path(self) -> "list[SearchNode]":
        """From the root's child down to this node."""
        above = [] if self.parent is None else self.parent.path
        return above if self.parent is None else [*above, self]


@dataclasses.dataclass(frozen=True)
class SearchLimits:
    """How wide and deep to search, and how many nodes may be expanded."""

    width: int
    depth: int
    num_expansions: int

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"search {name}={value!r} must be a whole number, at least 1")


class SearchTree:
    """Grows and prunes. Used on the loop."""

    def __init__(
        self, s: StateHandle, propose: Body, evaluate: Body, is_done: Body, limits: SearchLimits
    ) -> None:
        self.limits = limits
        self.root = SearchNode(s, s.core)
        self.bodies = Bodies(s, 64)
        self._propose, self._evaluate, self._is_done = propose, evaluate, is_done

    @property
    def stop_reason(self) -> str | None:
        """Which limit of a budget around the search has run out."""
        account = self.root.core.account
        return None if account is None or account.reason is None else f"budget: {account.reason}"

    async def expand(self, node: SearchNode, *, scored: bool = True) -> list[SearchNode]:
        """The children of `node`, all made and scored side by side; those that failed left out."""
        children = await self.propose(node)
        node.children = children
        await asyncio.gather(*(self.finish(child, scored=scored) for child in children))
        for child in children:
            if child.error is not None:
                self.drop(child)
        if node.parent is not None:
            node.core.release()  # only its children go on
        return [child for child in children if child.error is None]

    async def propose(self, node: SearchNode) -> list[SearchNode]:
        """The children of `node`, begun. Raises ValueError for a proposal that is no text."""
        parts = self._propose
        if not isinstance(parts, str | Expr):
            parts = await self.bodies.run(parts, node.core)
        if parts is None or (isinstance(parts, list | tuple) and not parts):
            return []
        if not isinstance(parts, list | tuple):
            parts = [parts] * self.limits.width
        cores = node.core.fork(len(parts), None, why="search")
        for core, part in zip(cores, parts, strict=True):
            core.append(part)
        return [SearchNode(self.bodies.handle(core), core, node, node.depth + 1) for core in cores]

    async def finish(self, node: SearchNode, *, scored: bool = True) -> None:
        """Wait for the node's text; ask whether it is done and, with `scored`, how good it is."""
        try:
            await node.core.drained()
            if node.core.door.stop_reason is not None:
                raise RunCancelledError(f"budget: {node.core.door.stop_reason}")
            node.step = node.core.text_since_fork
            if self._is_done is not None:
                node.is_done = bool(await self.bodies.run(self._is_done, node.core))
            if scored:
                node.score = await self.bodies.score(self._evaluate, node.core)
        except Exception as error:  # any: it is kept in the node, and the search goes on without it
            node.error = error

    def drop(self, node: SearchNode) -> None:
        """The search will not go on from here: abort it and free its memory."""
        node.is_dropped = True
        node.core.cancel("dropped by the search")

    def nodes(self) -> list[SearchNode]:
        """All below the root, parents first."""
        found, todo = [], list(self.root.children)
        while todo:
            node = todo.pop(0)
            found.append(node)
            todo += node.children
        return found


def best_node(nodes: list[SearchNode]) -> SearchNode | None:
    """The one with the highest score; those that are done come first, and so do earlier ones."""
    known = [node for node in nodes if node.score is not None]
    done = [node for node in known if node.is_done]
    return max(done or known, key=lambda node: node.score or 0.0, default=None)
