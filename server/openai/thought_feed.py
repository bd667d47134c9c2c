"""Thinking and answer as texts that only grow, from outputs whose parting line may still move.

Knows nothing of tool calls, of tokens or of how either is told.
"""

from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.runtime.think_params import ThinkParams
from zipage_lang.server.openai.tool_calls import held_len


class ThoughtFeed:
    """One sample's. Newlines around a thought are the tags', not the thought's or the answer's."""

    def __init__(self, think: ThinkParams | None) -> None:
        """think: as the request was sampled with; None where all is answer."""
        self.is_answering = think is None
        self.answer_start = 0  # character of the whole text, once it is answering
        self._think = think
        self._num_thought_told = 0
        self._num_answer_told = 0

    def feed(self, output: RequestOutput) -> tuple[str, str]:
        """(more of the thought, more of the answer)."""
        self.is_answering = self.is_answering or self._is_answer(output)
        thought = self._thought(output)
        answer = self._answer(output) if self.is_answering else ""
        more = thought[self._num_thought_told :], answer[self._num_answer_told :]
        self._num_thought_told = max(self._num_thought_told, len(thought))
        self._num_answer_told = max(self._num_answer_told, len(answer))
        return more

    def _is_answer(self, output: RequestOutput) -> bool:
        """Whether thinking is over, or never came."""
        if output.is_final:
            return True
        if output.num_thinking_tokens or self._starts_inside:
            return len(output.token_ids) > output.num_thinking_tokens
        return not self._may_open(output.answer)

    @property
    def _starts_inside(self) -> bool:
        return self._think is not None and self._think.starts_inside

    def _may_open(self, text: str) -> bool:
        """Whether `text` may still become the start tag."""
        assert self._think is not None
        return self._think.start_text.startswith(text.lstrip())

    def _thought(self, output: RequestOutput) -> str:
        text = output.thinking
        if not text or self._think is None:
            return ""
        if self.is_answering:
            return text.strip("\n")
        if self._may_open(text):
            return ""
        ends = (self._think.end_text, *self._think.tool_starts)
        return text[: len(text) - held_len(text, ends)].strip("\n")

    def _answer(self, output: RequestOutput) -> str:
        answer = output.answer
        if output.num_thinking_tokens:
            answer = answer.lstrip("\n")
        self.answer_start = len(output.text) - len(answer)
        return answer
