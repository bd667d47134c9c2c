"""What a request asks of the model's thinking, as ThinkParams.

Knows nothing of templates' inner workings or of how thinking is told to clients.
"""

from zipage_lang.runtime.think_params import ThinkParams
from zipage_lang.server.openai.chat_request import ChatRequest
from zipage_lang.server.openai.conversation import text_of
from zipage_lang.server.openai.model_traits import DEFAULT_TAGS, ModelTraits
from zipage_lang.server.openai.sampling import bad_field
from zipage_lang.server.openai.tool_use import ToolUse


def think_params(
    body: ChatRequest, traits: ModelTraits, tools: ToolUse, prompt: str
) -> ThinkParams | None:
    """How thinking is watched and bounded; None where there is none to expect.

    A model with think tags is always watched; another one where the request bounds its thinking.
    Raises ApiError 400 for bounds that don't go together.
    """
    cap, floor = thinking_cap(body), body.min_thinking_tokens
    is_off = body.reasoning_effort == "none"
    if traits.think_tags is None and (is_off or (cap is None and not floor)):
        return None
    start, end = traits.think_tags or DEFAULT_TAGS
    starts_inside = _starts_inside(body, prompt, start, end)
    is_closed = prompt.rstrip().endswith(end)  # the template has written an empty thought
    if is_off:
        cap, floor = 0, None
    if is_closed:
        cap, floor = None, None
    syntax = traits.tool_syntax
    with bad_field("thinking_token_budget"):
        return ThinkParams(
            max_tokens=cap,
            min_tokens=floor or 0,
            start_text=start,
            end_text=end,
            starts_inside=starts_inside,
            tool_starts=(syntax.trigger,) if tools.callable_ and syntax.trigger else (),
        )


def thinking_cap(body: ChatRequest) -> int | None:
    """Tokens of thinking at most, under whichever name."""
    if body.thinking_token_budget is not None:
        return body.thinking_token_budget
    return body.max_thinking_tokens


def _starts_inside(body: ChatRequest, prompt: str, start: str, end: str) -> bool:
    """Whether the prompt leaves a thought open."""
    if prompt.rstrip().endswith(start):
        return True
    if not body.continue_final_message:
        return False
    begun = text_of(body.messages[-1].content)
    return begun.rfind(start) > begun.rfind(end)
