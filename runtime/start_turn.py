"""One engine at a time is started on a card: its pool is what the whole card has left, measured.

Two that start together would each take the other's weights, graphs and scratch for their own needs.
Knows nothing of what is measured.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from zipage_lang.runtime.model_store import zipage_home

log = logging.getLogger("zipage.engine")

MAX_WAIT_S = 300.0  # a start takes less than a minute; one that hangs must not stop all others
_PAUSE_S = 0.05


@contextlib.contextmanager
def turn_on_card(device: torch.device) -> Iterator[None]:
    """Held by one process of this user at a time, for each card; a CPU has no turns.

    Whoever waits says so, and after MAX_WAIT_S goes on without. The kernel lets go of the turn of a
    process that died.
    """
    if device.type != "cuda":
        yield
        return
    name = str(torch.cuda.get_device_properties(device).uuid)
    with turn(zipage_home() / "locks" / f"start-{name}.lock", MAX_WAIT_S):
        yield


@contextlib.contextmanager
def turn(file: Path, max_wait_s: float) -> Iterator[None]:
    """The turn that `file` stands for; where the file can't be made there are no turns."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        log.warning("engines that start on this card take no turns, no lock at %s: %s", file, error)
        yield
        return
    try:
        _wait(handle, max_wait_s)
        yield
    finally:
        os.close(handle)  # and with it the lock


def _wait(handle: int, max_wait_s: float) -> None:
    deadline = time.monotonic() + max_wait_s
    is_told = False
    while not _taken(handle):
        if not is_told:
            log.info("waiting for another engine that starts on this card")
            is_told = True
        if time.monotonic() > deadline:
            log.warning("another engine starts for over %.0f s: going on beside it", max_wait_s)
            return
        time.sleep(_PAUSE_S)


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
