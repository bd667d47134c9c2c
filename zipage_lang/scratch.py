"""Frames whose text does not stay, and branches whose text does after all.

Knows nothing of handles, requests or budgets.
"""

import contextlib
from collections.abc import Generator
from typing import Any

from zipage_lang.state_core import StateCore


@contextlib.contextmanager
def scratch_core(core: StateCore) -> Generator[StateCore]:
    """A branch of `core`; its values become those of `core` at the end, done or not."""
    (frame,) = core.fork(1, None, why="scratch")
    try:
        yield frame
    except BaseException as error:
        frame.cancel(f"its scratch frame raised {type(error).__name__}")
        raise
    finally:
        _bring_values(core, frame)
        frame.release()


def core_to_adopt(branch: Any) -> StateCore:
    """The branch's core. Raises ValueError for what is no branch, such as a vote's missing one."""
    core = getattr(branch, "core", None)
    if not isinstance(core, StateCore):
        raise ValueError(
            f"adopt takes a branch, not {branch!r}; where a vote or search has no branch, its "
            "`reason` says why"
        )
    return core


async def adopted(core: StateCore, branch: StateCore) -> None:
    """Append what `branch` said since it was forked from `core`, once it has said it.

    Raises the branch's error. Runs on the loop.
    """
    await branch.drained()
    if not branch.is_branch_of(core):
        raise ValueError("adopt takes a branch of this state, or a branch of one")
    core.splice(branch)
    for name, variable in branch.variables.snapshot().items():
        if core.variables.find(name) is not variable:
            core.variables.add(variable)


def _bring_values(core: StateCore, branch: StateCore) -> None:
    for name in branch.variables.own_names:
        variable = branch.variables.find(name)
        assert variable is not None, f"{name} was written and is not there"
        core.variables.add(variable)
