"""All that a training needs to go on where it stopped, in one file.

Knows nothing of how steps are made.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch

FILE_NAME = "checkpoint.pt"


@dataclasses.dataclass
class Standing:
    """How far a training has come."""

    num_steps: int = 0
    num_tokens: int = 0
    progress: float = 0.0  # from 0 to 1 over the whole training
    trained_s: float = 0.0  # time spent in steps, over all pieces
    rate_scale: float = 1.0  # halved each time the loss had to be taken back


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write the file in one act, so that there is always a whole one."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f"{FILE_NAME}.new"
    torch.save(state, scratch)
    scratch.replace(folder / FILE_NAME)


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """What was saved there, on the host. Raises ValueError where nothing was.

    The file is our own and is trusted: it may hold pickled objects.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise ValueError(f"resume={str(folder)!r}: there is no {FILE_NAME} in that folder")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    return state
