"""Which node of a search to grow next, and which to give up: beam, best-first, Monte-Carlo.

Each strategy grows the tree until it is over and says which node is the best, and why it ended.
Knows nothing of how nodes are made or scored.
"""

import asyncio
import heapq
import itertools
import math
from collections.abc import Awaitable, Callable

from zipage_lang.search_tree import SearchNode, SearchTree, best_node
from zipage_lang.seeds import derive_seed

Found = tuple[SearchNode | None, str]
Strategy = Callable[[SearchTree], Awaitable[Found]]
EXPLORATION = math.sqrt(2.0)  # of UCT; Kocsis and Szepesvari 2006, for scores from 0 to 1


async def beam(tree: SearchTree) -> Found:
    """Level by level: all of the frontier side by side, of whose children the best `width` stay."""
    frontier, finished = [tree.root], list[SearchNode]()
    for _ in range(tree.limits.depth):
        levels = await asyncio.gather(*(tree.expand(node) for node in frontier))
        ranked = sorted(itertools.chain(*levels), key=lambda node: -(node.score or 0.0))
        for loser in ranked[tree.limits.width :]:
            tree.drop(loser)
        kept = ranked[: tree.limits.width]
        if not kept:
            return best_node([*finished, *_alive(frontier)]), tree.stop_reason or "no children"
        finished += [node for node in kept if node.is_done]
        frontier = [node for node in kept if not node.is_done]
        if tree.stop_reason is not None:
            return best_node(finished + frontier), tree.stop_reason
        if kept[0].is_done or not frontier:
            return best_node(finished), "done"
    return best_node(finished + frontier), "depth"


async def best_first(tree: SearchTree) -> Found:
    """Always the best node that was not expanded yet, until one is done or expansions run out."""
    order = itertools.count()
    queue: list[tuple[float, int, SearchNode]] = [(-math.inf, next(order), tree.root)]
    leaves: list[SearchNode] = []  # that can't be grown
    num_left = tree.limits.num_expansions
    while queue and tree.stop_reason is None:
        node = queue[0][2]
        if node.is_done:
            return node, "done"
        can_grow = node.depth < tree.limits.depth
        if can_grow and num_left == 0:
            break
        heapq.heappop(queue)
        children = await tree.expand(node) if can_grow else []
        num_left -= can_grow
        for child in children:
            heapq.heappush(queue, (-(child.score or 0.0), next(order), child))
        if not children and node.parent is not None:
            leaves.append(node)
    open_nodes = [node for _, _, node in queue if node.parent is not None]
    reason = tree.stop_reason or ("expansions" if queue else "depth")
    return best_node(leaves + open_nodes), reason


async def mcts(tree: SearchTree) -> Found:
    """Rounds of: down by UCT, expand, play out to the end, score that, tell the path.

    `num_expansions` rounds. Scores should lie between 0 and 1. The best end of all rounds wins.
    """
    best: SearchNode | None = None
    for round_index in range(tree.limits.num_expansions):
        node = _descend(tree.root)
        if node.depth < tree.limits.depth and not node.is_done and node.num_visits > 0:
            children = await tree.expand(node, scored=False)
            node = children[0] if children else node
        elif node is tree.root:
            children = await tree.expand(node, scored=False)
            if not children:
                return best, tree.stop_reason or "no children"
            node = children[0]
        end = await _play_out(tree, node, round_index)
        for above in [tree.root, *node.path]:
            above.num_visits += 1
            above.value_sum += end.score or 0.0
        best = _better(tree, node, end, best)
        if tree.stop_reason is not None:
            return best, tree.stop_reason
    return best, "expansions"


STRATEGIES: dict[str, Strategy] = {"beam": beam, "best_first": best_first, "mcts": mcts}


def _alive(nodes: list[SearchNode]) -> list[SearchNode]:
    return [node for node in nodes if node.parent is not None]


def _descend(node: SearchNode) -> SearchNode:
    while any(not child.is_dropped for child in node.children):
        parent_visits = max(1, node.num_visits)
        alive = [child for child in node.children if not child.is_dropped]
        node = max(alive, key=lambda child: _uct(child, parent_visits))
    return node


def _uct(node: SearchNode, parent_visits: int) -> float:
    if node.num_visits == 0:
        return math.inf
    mean = node.value_sum / node.num_visits
    return mean + EXPLORATION * math.sqrt(math.log(parent_visits) / node.num_visits)


async def _play_out(tree: SearchTree, start: SearchNode, round_index: int) -> SearchNode:
    """One line of play from `start` to the end, scored. Its nodes are not part of the tree."""
    node = start
    while node.depth < tree.limits.depth and not node.is_done and node.error is None:
        proposed = await tree.propose(node)
        if not proposed:
            break
        seed = derive_seed(tree.root.core.root_seed, ("mcts", round_index, node.depth))
        chosen = proposed[seed % len(proposed)]
        for other in proposed:
            if other is not chosen:
                tree.drop(other)
        await tree.finish(chosen, scored=False)
        node = chosen
    if node.score is None and node.error is None:
        await tree.finish(node)
    return node


def _better(
    tree: SearchTree, node: SearchNode, end: SearchNode, best: SearchNode | None
) -> SearchNode | None:
    """The better one of two ends; what the other one has beyond the tree is dropped."""
    known = [found for found in (best, end) if found is not None]
    chosen = best_node(known)
    for loser in known:
        if loser is not chosen:
            _drop_play_out(tree, loser)
    return chosen


def _drop_play_out(tree: SearchTree, end: SearchNode) -> None:
    for node in end.path:
        if node.parent is not None and node not in node.parent.children:
            tree.drop(node)  # and all below it
            return
