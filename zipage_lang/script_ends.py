"""Where a scripted reply ends, and the chat template it is asked through.

Knows nothing of scripts, calls or engines.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.script_tokenizers import BEGIN, END, EOS_TOKEN_ID
from zipage_lang.thoughts import ThoughtMarks

DEFAULT_SYSTEM = "You are a script."


@dataclasses.dataclass(frozen=True)
class Cut:
    """A text up to its first stop string, and that string if there is one."""

    text: str
    stop: str | None


@dataclasses.dataclass(frozen=True)
class End:
    """Why an output ends: "stop" or "length", and the string or token that stopped it."""

    reason: str
    by: str | int | None = None


def cut_at_stop(text: str, sampling: SamplingParams) -> Cut:
    """The text that a caller sees of what was generated."""
    found = [(text.index(stop), stop) for stop in sampling.stop_strings if stop in text]
    if not found:
        return Cut(text, None)
    position, stop = min(found)
    return Cut(text[:position], stop)


def end_of(token_ids: list[int], sampling: SamplingParams, cut: Cut) -> End | None:
    """Why the output ends after these tokens, if it does."""
    if cut.stop is not None:
        return End("stop", cut.stop)
    if token_ids[-1] in {EOS_TOKEN_ID, *sampling.stop_token_ids}:
        return End("stop", token_ids[-1])
    return End("length") if len(token_ids) >= sampling.max_tokens else None


def split_thinking(text: str, sampling: SamplingParams) -> tuple[str, str]:
    """(thinking, answer) as an engine with thinking control tells them apart."""
    think = sampling.think
    if think is None:
        return "", text
    return ThoughtMarks(think.start_text, think.end_text, think.starts_inside).split(text)


def render_chatml(messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
    """ChatML with a default system message, as many small instruct models have it.

    Parameters:
        messages: dicts of "role" and "content".
        add_generation_prompt: whether an assistant message is begun at the end.

    Errors: KeyError for a message without these.

    >>> zipage.testing.render_chatml([{"role": "system", "content": "Be brief."}], False)
    '<|im_start|>system\\nBe brief.<|im_end|>\\n'
    """
    if messages and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": DEFAULT_SYSTEM}, *messages]
    text = "".join(f"{BEGIN}{m['role']}\n{m['content']}{END}\n" for m in messages)
    return text + (f"{BEGIN}assistant\n" if add_generation_prompt else "")
