"""Which requests have an end still to come, so that no id is open twice at a time.

A second request under an open id could not be answered: its error would end the first one's stream.
It can only be a message that came twice. Knows nothing of how requests run.
"""

from collections.abc import Iterable

from zipage_lang.runtime.messages import AddRequest, Fork, TokenOutput


class OpenRequests:
    """Each request from its message to the final outputs of all its samples."""

    def __init__(self) -> None:
        self.num_replayed = 0
        self._num_samples: dict[str, int] = {}  # request id -> samples without a final output

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._num_samples

    @property
    def ids(self) -> list[str]:
        return list(self._num_samples)

    def take(self, message: AddRequest | Fork) -> AddRequest | Fork | None:
        """The message without what is open already; None where nothing is left of it."""
        if isinstance(message, AddRequest):
            return message if self._opens(message) else None
        children = [child for child in message.children if self._opens(child)]
        if len(children) == len(message.children):
            return message
        return Fork(parent_id=message.parent_id, children=children) if children else None

    def note(self, outputs: Iterable[TokenOutput]) -> None:
        """Samples with a final output have ended."""
        for output in outputs:
            if output.is_final:
                left = self._num_samples.get(output.request_id, 0) - 1
                if left > 0:
                    self._num_samples[output.request_id] = left
                else:
                    self._num_samples.pop(output.request_id, None)

    def _opens(self, request: AddRequest) -> bool:
        is_new = request.request_id not in self._num_samples
        if is_new:
            self._num_samples[request.request_id] = request.sampling.n
        else:
            self.num_replayed += 1
        return is_new
