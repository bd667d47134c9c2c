"""The outputs of one request on their way from the client's receiver to one reader.

Knows nothing of sockets, text or how outputs are made.
"""

import asyncio
from collections.abc import Callable

from zipage_lang.frontend.errors import ZipageError
from zipage_lang.runtime.messages import TokenOutput


class TokenStream:
    """Async iterator over one request's TokenOutputs, for one reader.

    Ends after the last sample's final output. Raises the client's error when the engine is gone.
    `close()` before the end calls `on_leave(request_id, num_running)`, which tells the engine.
    """

    def __init__(
        self, request_id: str, num_samples: int, on_leave: Callable[[str, int], None]
    ) -> None:
        self.request_id = request_id
        self._running_samples = set(range(num_samples))
        self._on_leave = on_leave
        self._queue: asyncio.Queue[TokenOutput | ZipageError] = asyncio.Queue()

    @property
    def has_ended(self) -> bool:
        """True when nothing more will arrive."""
        return not self._running_samples

    def put(self, output: TokenOutput) -> bool:
        """Hand over what the engine sent; False where it fits no running sample."""
        if output.sample_index not in self._running_samples:
            return False
        if output.is_final:
            self._running_samples.discard(output.sample_index)
        self._queue.put_nowait(output)
        return True

    def fail(self, error: ZipageError) -> None:
        """End the stream with an error, after what has arrived."""
        self._running_samples.clear()
        self._queue.put_nowait(error)

    def close(self) -> None:
        """The reader leaves; does nothing after the end."""
        if not self.has_ended:
            num_running = len(self._running_samples)
            self._running_samples.clear()
            self._on_leave(self.request_id, num_running)

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> TokenOutput:
        if self.has_ended and self._queue.empty():
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, ZipageError):
            raise item
        return item
