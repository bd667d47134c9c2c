"""Ends this process when the one that started it is gone, whatever it is at.

Knows nothing of engines or messages.
"""

import os
import select
import shutil
import stat
import sys
import threading

LOOK_S = 0.2


def end_with_parent(folder: str) -> None:
    """Watch from a thread of its own; at the end, the parent's folder of sockets goes as well.

    A parent is gone when this process has another one, or when the pipe that it holds open on our
    stdin is closed: that tells even of one that ended before we first looked. It takes a thread, as
    the main one may be loading, in a long step, or sending to nobody.
    """
    parent = os.getppid()
    thread = threading.Thread(
        target=_watch, args=(parent, folder), name="zipage-orphan", daemon=True
    )
    thread.start()


def _watch(parent: int, folder: str) -> None:
    pipe = _stdin_pipe()
    while os.getppid() == parent:
        if select.select(pipe, [], [], LOOK_S)[0] and not os.read(pipe[0], 4096):
            break
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _stdin_pipe() -> list[int]:
    """The descriptor to watch; none where stdin is something else (a wrapper's, a terminal)."""
    if sys.__stdin__ is None:
        return []
    return [0] if stat.S_ISFIFO(os.fstat(0).st_mode) else []
