"""Chat messages through the model's own template, written piece by piece as a program runs.

A template only renders whole conversations, so its pieces are found by rendering marks as contents
and cutting there. Contents are never rendered: some templates rewrite older turns, and that would
break the shared prefix.
Knows nothing of tokens, requests or loops.
"""

from collections.abc import Callable, Sequence

from zipage_lang.ir import Role
from zipage_lang.transcript import Transcript

Message = dict[str, str]
Render = Callable[[Sequence[Message], bool], str]  # messages, add_generation_prompt


class ChatTemplate:
    """The text a model's template puts before and after a message, given the roles before it."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._rendered: dict[tuple[tuple[Role, ...], bool], str] = {}

    def prefix(self, roles: tuple[Role, ...], role: Role) -> str:
        """What stands before the content of a `role` message that follows messages of `roles`."""
        head = _before(self._marked((*roles, role)), len(roles))
        if not roles:
            return head
        return _without_common_start(_after(head, len(roles) - 1), self.suffix(roles))

    def reply_prefix(self, roles: tuple[Role, ...]) -> str:
        """What asks the model for its reply: the template's generation prompt where it has one."""
        if roles:
            asked = self._marked(roles, add_generation_prompt=True)
            told = self._marked(roles)
            if asked.startswith(told) and asked != told:
                return asked[len(told) :]
        return self.prefix(roles, "assistant")

    def suffix(self, roles: tuple[Role, ...]) -> str:
        """What stands after the content of the last of `roles`."""
        return _after(self._marked(roles), len(roles) - 1)

    def _marked(self, roles: tuple[Role, ...], add_generation_prompt: bool = False) -> str:
        key = (roles, add_generation_prompt)
        if key not in self._rendered:
            messages = [{"role": role, "content": _mark(i)} for i, role in enumerate(roles)]
            self._rendered[key] = self._render(messages, add_generation_prompt)
        return self._rendered[key]


def _mark(index: int) -> str:
    return f"zipagecontent{index}z"


def _before(text: str, index: int) -> str:
    _check_mark(text, index)
    return text.partition(_mark(index))[0]


def _after(text: str, index: int) -> str:
    _check_mark(text, index)
    return text.partition(_mark(index))[2]


def _check_mark(text: str, index: int) -> None:
    if text.count(_mark(index)) != 1:
        raise ValueError(
            f"the model's chat template does not write the content of message {index} once; "
            "its roles can't be used in a program"
        )


def _without_common_start(text: str, start: str) -> str:
    common = 0
    while common < min(len(text), len(start)) and text[common] == start[common]:
        common += 1
    return text[common:]


class ChatCursor:
    """Where in a conversation a state stands: closed messages, and the open one if there is one."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._roles: tuple[Role, ...] = ()
        self._open: Role | None = None
        self._content: list[str] = []
        self._held: list[str] | None = (
            None  # text of an assistant message whose opening is undecided
        )
        self.messages: list[Message] = []

    def begin(self, role: Role, transcript: Transcript) -> None:
        assert self._open is None, f"{role} begins inside {self._open}"
        self._open, self._content = role, []
        if role == "assistant":
            self._held = []
        else:
            transcript.write_template(self._template.prefix(self._roles, role))

    def write(self, text: str, transcript: Transcript) -> None:
        """The author's text, inside or outside of a message."""
        self.note(text)
        if self._held is None:
            transcript.write(text)
        else:
            self._held.append(text)

    def note(self, text: str) -> None:
        """Generated text, which is in the transcript already."""
        if self._open is not None:
            self._content.append(text)

    def before_reply(self, transcript: Transcript) -> None:
        """The model goes on from here: an open assistant message opens as the template asks for
        one.
        """
        if self._held is not None:
            self._release_held(self._template.reply_prefix(self._roles), transcript)

    @property
    def turn_end(self) -> str:
        """What the template will write behind the open message; nothing outside of messages."""
        if self._open is None:
            return ""
        return self._template.suffix((*self._roles, self._open))

    def end(self, transcript: Transcript) -> None:
        assert self._open is not None, "no message is open"
        if self._held is not None:  # the author wrote it all
            self._release_held(self._template.prefix(self._roles, "assistant"), transcript)
        self._roles = (*self._roles, self._open)
        transcript.write_template(self._template.suffix(self._roles))
        content = "".join(self._content).lstrip()
        self.messages.append({"role": self._open, "content": content})
        self._open = None

    def copy(self) -> "ChatCursor":
        twin = ChatCursor(self._template)
        twin._roles, twin._open = self._roles, self._open
        twin._content = list(self._content)
        twin._held = None if self._held is None else list(self._held)
        twin.messages = [dict(message) for message in self.messages]
        return twin

    def append_from(self, other: "ChatCursor", start: "ChatCursor") -> None:
        """Take over what `other` did since it was copied at `start`."""
        assert self._held is None, "the open message must be decided before others are appended"
        num_roles, num_pieces = len(start._roles), len(start._content)
        if len(other._roles) == num_roles:
            self._content += other._content[num_pieces:]
        else:
            self._content = list(other._content)
        self._roles += other._roles[num_roles:]
        self.messages += [dict(message) for message in other.messages[num_roles:]]
        self._open = other._open

    def _release_held(self, prefix: str, transcript: Transcript) -> None:
        assert self._held is not None, "the message has been opened already"
        transcript.write_template(prefix)
        for text in self._held:
            transcript.write(text)
        self._held = None
