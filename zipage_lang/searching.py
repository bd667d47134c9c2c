"""`search`: propose steps, evaluate states, keep the promising ones alive, give up the rest.

Knows nothing of how a strategy chooses, or how nodes are made.
"""

import dataclasses
from typing import Any

from zipage_lang.bodies import Body, check_body, wait_for
from zipage_lang.budgets import Budget
from zipage_lang.search_strategies import STRATEGIES
from zipage_lang.search_tree import SearchLimits, SearchNode, SearchTree
from zipage_lang.state import StateHandle


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What a search came to.

    Parameters:
        best: the best node; None where none was scored. `best.path` are the steps to it.
        branch: its branch, alive; `s.adopt(branch)` takes over all its text since `s`.
        score: its score.
        root: the tree, with every node's score, parent and children.
        num_nodes: nodes below the root.
        reason: "done", "depth", "expansions", "no children", or "budget: ..." and what ran out.

    Errors: none of its own.

    >>> zipage.SearchResult(None, None, None, None, 0, "no children").reason
    'no children'
    """

    best: SearchNode | None
    branch: Any
    score: float | None
    root: Any
    num_nodes: int
    reason: str


def search(
    s: StateHandle,
    *,
    propose: Body,
    evaluate: Body,
    select: str = "beam",
    width: int = 5,
    depth: int = 3,
    expansions: int | None = None,
    budget: Budget | None = None,
    is_done: Body = None,
) -> Any:
    """Search for a chain of steps whose state scores high. Nodes are branches that stay alive.

    A node that may still be grown keeps its KV in the engine; one that is dropped is cancelled, and
    its blocks are free at the next step.

    Parameters:
        s: where to start; in an `async def` program await the result.
        propose: the next steps of a branch: a gen (`width` samples of it), or a function of the
            branch that returns a list of texts and gens, one for each child.
        evaluate: the score of a branch: a function of it, or a gen or program that judges and
            leaves no text (its value, or the first number in it).
        select: "beam" (the best `width` of each level), "best_first" (the best node anywhere) or
            "mcts" (UCT with rollouts; scores from 0 to 1).
        width, depth: children of a gen and breadth of the beam; steps at most.
        expansions: nodes expanded (best_first) or rounds (mcts); None: width * depth.
        budget: of all that the search runs; where it runs out the search ends with what it has.
        is_done: a function of the branch: it needs no further step. The first one that is best
            ends a beam or best-first search.

    Returns a SearchResult. Errors: ValueError for a bad argument; what `propose` raises. A branch
    that fails, or whose evaluation raises, is left out; the first such error is raised where no
    node was scored at all.

    >>> def program(s):
    ...     def num_bs(branch): return branch.text().count("b")
    ...     return zipage.search(s, propose=lambda b: ["a", "b"], evaluate=num_bs).branch.text()
    >>> zipage.function(program).run(backend=zipage.testing.ScriptedBackend()).ret_value
    'bbb'
    """
    if select not in STRATEGIES:
        raise ValueError(f"select={select!r} must be one of {', '.join(STRATEGIES)}")
    check_body(propose, "propose")
    check_body(evaluate, "evaluate")
    limits = SearchLimits(width, depth, width * depth if expansions is None else expansions)
    return wait_for(s, _run(s, propose, evaluate, select, limits, budget, is_done))


async def _run(
    s: StateHandle,
    propose: Body,
    evaluate: Body,
    select: str,
    limits: SearchLimits,
    budget: Budget | None,
    is_done: Body,
) -> SearchResult:
    account = None if budget is None else s.core.enter(budget)
    tree = SearchTree(s, propose, evaluate, is_done, limits)
    best: SearchNode | None = None
    try:
        best, reason = await STRATEGIES[select](tree)
        if best is None and tree.stop_reason is None:
            _raise_first_error(tree)
    finally:
        kept = [] if best is None else best.path
        for node in tree.nodes():
            if node not in kept and not node.is_dropped:
                tree.drop(node)
        tree.bodies.close()
        if account is not None:
            s.core.leave(account)
    return SearchResult(
        best=best,
        branch=None if best is None else best.branch,
        score=None if best is None else best.score,
        root=tree.root,
        num_nodes=len(tree.nodes()),
        reason=reason,
    )


def _raise_first_error(tree: SearchTree) -> None:
    """Nothing was scored: if that is because every node failed, say with what."""
    errors = [node.error for node in tree.nodes() if node.error is not None]
    if errors:
        raise errors[0]
