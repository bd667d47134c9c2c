"""Characters as tokens, for backends that take and give text only.

What a program's state holds is then text, cut exactly where texts were cut. Chat messages stand
between two characters of Unicode's private area, which no ordinary text has.
Knows nothing of servers or states.
"""

from collections.abc import Mapping, Sequence

BEGIN, END = "\ue000", "\ue001"  # of a message: BEGIN role newline content END newline

Message = dict[str, str]


def encode_text(text: str) -> list[int]:
    """One token for each character."""
    return [ord(character) for character in text]


def decode_text(token_ids: Sequence[int]) -> str:
    """The text of tokens."""
    return "".join(map(chr, token_ids))


def render_marked(messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
    """Messages between marks, which `messages_of` takes apart again."""
    text = "".join(f"{BEGIN}{m['role']}\n{m['content']}{END}\n" for m in messages)
    return text + (f"{BEGIN}assistant\n" if add_generation_prompt else "")


def messages_of(text: str) -> tuple[list[Message], Message | None]:
    """The closed messages, and the open one if there is one.

    Raises ValueError for text outside of messages: a chat server has no place for it.
    """
    before, *pieces = text.split(BEGIN)
    closed: list[Message] = []
    opened: Message | None = None
    outside = [before]
    for piece in pieces:
        body, end, after = piece.partition(END)
        role, _, content = body.partition("\n")
        outside.append(after)
        opened = {"role": role, "content": content}
        if end:
            closed.append(opened)
            opened = None
    stray = "".join(outside).strip("\n")
    if stray:
        raise ValueError(
            f"{stray[:40]!r} stands outside of messages, which a chat server can't take; "
            "put it into a role"
        )
    return closed, opened
