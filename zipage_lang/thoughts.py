"""Thinking told apart from the answer in text that holds both between a model's own marks.

Knows nothing of tokens, requests or states.
"""

import dataclasses

THINKING_SUFFIX = "_reasoning_content"  # SGLang's name for what separate_reasoning took out
MARKS_BY_MODEL = {
    "deepseek-r1": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>"),
    "qwen3-thinking": ("<think>", "</think>"),
    "glm45": ("<think>", "</think>"),
    "kimi": ("◁think▷", "◁/think▷"),
}


@dataclasses.dataclass(frozen=True)
class ThoughtMarks:
    """What opens and closes a thought."""

    begin: str = "<think>"
    end: str = "</think>"
    starts_inside: bool = False  # the prompt has opened the thought already

    def split(self, text: str) -> tuple[str, str]:
        """(thinking, answer). Text that never closes its thought has no answer.

        Without either mark it is all answer, unless it started inside. The opening mark may be
        missing: many templates write it into the prompt.
        """
        thinking, end, answer = text.partition(self.end)
        if not end and self.begin not in text and not self.starts_inside:
            return "", text
        return thinking.replace(self.begin, "", 1).strip(), answer.lstrip("\n") if end else ""


def marks_of(model_type: str) -> ThoughtMarks:
    """The marks of a family of models. Raises ValueError for one that is not known."""
    key = model_type.lower()
    if key not in MARKS_BY_MODEL:
        raise ValueError(
            f"model_type={model_type!r} must be one of {', '.join(MARKS_BY_MODEL)}; "
            "or give begin= and end="
        )
    return ThoughtMarks(*MARKS_BY_MODEL[key])
