"""Where one output stands between thinking and answering, and what may be drawn meanwhile.

opening -> thinking -> closing -> answer; steps are left out where they don't apply.
Knows nothing of grammars, logits or steps.
"""

import bisect
import enum
from collections import deque

import numpy as np

from zipage_lang.runtime.think_tags import ThinkTags

MAX_OPENING_BYTES = 16  # whitespace that may stand before a start tag


class Phase(enum.Enum):
    OPENING = "opening"  # the start tag may still come
    THINKING = "thinking"
    CLOSING = "closing"  # the cap is reached: the closing text is being forced
    ANSWER = "answer"


class ThinkState:
    """Follows one output token by token. Deterministic: the same tokens lead to the same state."""

    def __init__(self, tags: ThinkTags) -> None:
        self.tags = tags
        self.num_thinking = 0  # leading output tokens that belong to thinking, tags included
        self.answer_start = b""  # of a tool start: bytes of the answer that are written already
        self._params = tags.params
        self._num_output = 0
        self._num_inside = 0  # tokens behind the start tag
        self._end_state = 0
        self._tool_states = [0] * len(tags.tools)
        self._opened = b""
        self._num_bytes = 0
        self._starts: list[int] = []  # where each token begins, in bytes of the output
        self._forced: deque[int] = deque()
        self.phase = Phase.OPENING
        if self._params.starts_inside:
            self._enter_thinking()
        elif self._params.min_tokens > 0 or self._params.max_tokens == 0:
            self._forced.extend(tags.start_ids)

    @property
    def forced(self) -> int | None:
        """The one token that may come next, where there is only one."""
        return self._forced[0] if self._forced else None

    @property
    def is_floored(self) -> bool:
        """Whether thinking may not end yet."""
        return self.phase is Phase.THINKING and self._num_inside < self._params.min_tokens

    def opening_tokens(self) -> np.ndarray:
        """int32 [num_words], tokens with which the start tag may still come."""
        num_matched = len(self._opened.lstrip())
        may_lead = num_matched == 0 and len(self._opened) < MAX_OPENING_BYTES
        return self.tags.opening(num_matched, may_lead)

    def banned(self) -> np.ndarray:
        """int32 [num_words], tokens that may not come while thinking.

        Before the floor: whatever ends thinking. Later: what would write the end tag and go on in
        the same token, so that each token belongs to thinking or to the answer.
        """
        tags = self.tags
        if not self.is_floored:
            return tags.end.crossing(self._end_state)
        banned = tags.end.completing(self._end_state)
        for tool, state in zip(tags.tools, self._tool_states, strict=True):
            banned = banned | tool.completing(state)
        return banned

    def accept(self, token_id: int) -> None:
        """One more token of the output."""
        piece = self.tags.vocabulary.pieces[token_id]
        self._starts.append(self._num_bytes)
        self._num_output += 1
        self._num_bytes += len(piece)
        if self._forced:
            self._accept_forced(piece)
        elif self.phase is Phase.OPENING:
            self._accept_opening(piece)
        elif self.phase is Phase.THINKING:
            self.num_thinking = self._num_output
            self._num_inside += 1
            self._accept_thinking(piece)

    def _accept_forced(self, piece: bytes) -> None:
        self._forced.popleft()
        if self.phase is Phase.OPENING:
            self._opened += piece
        self.num_thinking = self._num_output
        if self._forced:
            return
        if self.phase is Phase.OPENING:
            self._enter_thinking()
        else:
            self.phase = Phase.ANSWER

    def _accept_opening(self, piece: bytes) -> None:
        self._opened += piece
        opened, start = self._opened.lstrip(), self.tags.start
        if opened.startswith(start):
            self.num_thinking = self._num_output
            self._enter_thinking()
            if self.phase is Phase.THINKING:
                self._accept_thinking(opened[len(start) :])
        elif not start.startswith(opened):
            self.phase = Phase.ANSWER

    def _enter_thinking(self) -> None:
        self.phase = Phase.THINKING
        self._close_at_cap()

    def _accept_thinking(self, data: bytes) -> None:
        self._end_state, ended_at = self.tags.end.read(self._end_state, data)
        if ended_at is not None:
            self.phase = Phase.ANSWER
            self.answer_start = data[ended_at:]
            return
        for index, tool in enumerate(self.tags.tools):
            self._tool_states[index], ended_at = tool.read(self._tool_states[index], data)
            if ended_at is not None:
                self._begin_tool(tool.text, data[ended_at:])
                return
        self._close_at_cap()

    def _begin_tool(self, tag: bytes, behind: bytes) -> None:
        """The answer begins with the token in which the tool's tag begins."""
        tag_start = self._num_bytes - len(behind) - len(tag)
        self.num_thinking = bisect.bisect_right(self._starts, tag_start) - 1
        self.answer_start = tag + behind
        self.phase = Phase.ANSWER

    def _close_at_cap(self) -> None:
        if self._num_inside == self._params.max_tokens:
            self.phase = Phase.CLOSING
            self._forced.extend(self.tags.rest_of_closing(self._end_state))
