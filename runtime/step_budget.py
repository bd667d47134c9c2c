"""How many tokens a step may take: what is configured, and less for a while after memory was short.

Knows nothing of who takes them.
"""

STEPS_TO_DOUBLE = 16  # quick enough that one bad moment costs little, slow enough to stay below


class StepBudget:
    """Halved when memory was refused; then it grows back to its bound."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens = float(max_tokens)

    @property
    def num_tokens(self) -> int:
        """At least 1."""
        return int(self._tokens)

    def halve(self, num_used: int) -> None:
        """A step of `num_used` tokens was too large."""
        self._tokens = max(1.0, min(self._tokens, num_used) / 2)

    def grow(self) -> None:
        """A step went well."""
        grown = self._tokens * 2 ** (1 / STEPS_TO_DOUBLE)
        self._tokens = min(float(self._max_tokens), grown)
