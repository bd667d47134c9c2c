"""One sample's outputs as what a chat client is told: thought, text, calls, log-probabilities.

Knows nothing of chunks, choices or JSON.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from zipage_lang.frontend.outputs import FINISH_LENGTH, RequestOutput
from zipage_lang.server.openai.call_reader import CallPiece
from zipage_lang.server.openai.chat_logprobs import ChatLogprobs
from zipage_lang.server.openai.thought_feed import ThoughtFeed
from zipage_lang.server.openai.tool_calls import Piece, ToolParser

FINISH_TOOL_CALLS = "tool_calls"


@dataclasses.dataclass(slots=True)
class Told:
    """What is new of a sample."""

    thought: str = ""
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    logprobs: list[dict[str, Any]] | None = None  # None: not asked for


class SampleReader:
    """One sample, from its first output to its last; also reads a last output alone."""

    def __init__(
        self, thoughts: ThoughtFeed, parser: ToolParser | None, logprobs: ChatLogprobs | None
    ) -> None:
        """parser: None where no tool can be called."""
        self._thoughts = thoughts
        self._parser = parser
        self._logprobs = logprobs

    def feed(self, output: RequestOutput) -> Told:
        """What this output brings."""
        thought, answer = self._thoughts.feed(output)
        told = Told(thought, self._read(answer, output.is_final))
        if self._logprobs is not None:
            told.logprobs = self._logprobs.feed(output, self._thoughts)
        return told

    def finish_reason(self, output: RequestOutput) -> str:
        """Why the sample ended, in OpenAI's words; a cut call is no call."""
        reason = output.finish_reason
        assert reason is not None, "asked of a sample that still runs"
        if reason != FINISH_LENGTH and self._parser is not None and self._parser.num_calls:
            return FINISH_TOOL_CALLS
        return reason

    def _read(self, answer: str, is_final: bool) -> list[Piece]:
        if self._parser is None:
            return [answer] if answer else []
        pieces = self._parser.feed(answer)
        return _joined(pieces + self._parser.finish() if is_final else pieces)


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same in few: a parser tells arguments character by character, and they can be long."""
    joined: list[Piece] = []
    for kind, run in itertools.groupby(pieces, _kind):
        if kind is None:
            joined.append("".join(piece for piece in run if isinstance(piece, str)))
        else:
            calls = [piece for piece in run if isinstance(piece, CallPiece)]
            arguments = "".join(call.arguments for call in calls)
            joined.append(dataclasses.replace(calls[0], arguments=arguments))
    return joined


def _kind(piece: Piece) -> tuple[int, str | None] | None:
    """What a piece is joined with its neighbours by; a call's name stays alone."""
    return None if isinstance(piece, str) else (piece.index, piece.name)
