"""Which prefixes somebody keeps warm in an engine, and who of them a prompt begins with.

Knows nothing of engines, clocks or text.
"""

from collections.abc import Callable, Sequence

LOOSE_END = 2  # tokens at a prefix's end that may be spelled differently when text follows


class PinBoard:
    """Pinned prefixes by the id of the request whose held state they are."""

    def __init__(self) -> None:
        self._pins: dict[str, tuple[list[int], Callable[[], None]]] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, request_id: str, token_ids: Sequence[int], on_use: Callable[[], None]) -> None:
        """`on_use` is called whenever `find` answers with this pin."""
        self._pins[request_id] = (list(token_ids), on_use)

    def remove(self, request_id: str) -> None:
        """Ids that are not there are no error."""
        self._pins.pop(request_id, None)

    def find(self, token_ids: Sequence[int]) -> str | None:
        """The longest pinned prefix of these tokens, by its request's id."""
        found = [
            (len(pinned), request_id)
            for request_id, (pinned, _) in self._pins.items()
            if _begins_with(token_ids, pinned)
        ]
        if not found:
            return None
        _, request_id = max(found)
        self._pins[request_id][1]()
        return request_id


def _begins_with(token_ids: Sequence[int], pinned: list[int]) -> bool:
    num_sure = max(1, len(pinned) - LOOSE_END)
    return list(token_ids[:num_sure]) == pinned[:num_sure]
