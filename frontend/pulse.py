"""Whether an engine gives signs of life.

Any message of it is one, and once a beat it is asked for one. An engine between two steps answers
at once; one in a step that takes long, or that hangs, does not.
Knows nothing of processes or of what messages say.
"""

import asyncio
from collections.abc import Callable

BEAT_S = 2.0
BEATS_PER_TIMEOUT = 8  # at least


class Pulse:
    """Counts beats without a sign of life.

    Beats, not seconds: where this process itself was stopped for a while, that is one beat.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._beat_s = min(BEAT_S, timeout_s / BEATS_PER_TIMEOUT)
        self._num_silent = 0
        self._has_heard = False

    @property
    def silent_s(self) -> float:
        """How long there has been no sign of life, in whole beats."""
        return self._num_silent * self._beat_s

    def note(self) -> None:
        """A sign of life."""
        self._num_silent = 0
        self._has_heard = True

    async def wait_for_silence(self, ask: Callable[[], None]) -> None:
        """Call `ask` once a beat, until nothing was heard for the whole timeout."""
        while self.silent_s < self._timeout_s:
            ask()
            self._has_heard = False
            await asyncio.sleep(self._beat_s)
            if not self._has_heard:
                self._num_silent += 1
