"""What one state has said: its tokens, its chat messages, and where it was forked off.

Knows nothing of queues, variables or how a request is made.
"""

import dataclasses
import weakref

from zipage_lang.backend import Limited
from zipage_lang.calls import settle_answer, settle_output
from zipage_lang.chat import ChatCursor
from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.ir import Role
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.session import RunSettings, merge_kv
from zipage_lang.thoughts import ThoughtMarks
from zipage_lang.transcript import ForkPoint, Transcript


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """Where a branch's text left that of a state above it."""

    parent: "weakref.ref[StateText]"
    point: ForkPoint
    chat: ChatCursor


class StateText:
    """The text of one state, as the author, the template and the model wrote it."""

    def __init__(self, settings: RunSettings) -> None:
        self._backend = settings.backend
        self._transcript = Transcript(settings.backend)
        self._chat = ChatCursor(settings.template)
        self._forked_at = ForkPoint(0, 0)
        self._origins: tuple[Origin, ...] = ()  # where it was forked, the root's fork first
        self._scopes: dict[str, int] = {}  # open var_scopes: where their text begins

    @property
    def text(self) -> str:
        self._chat.before_reply(self._transcript)
        return self._transcript.text

    @property
    def text_since_fork(self) -> str:
        return self.text[self._forked_at.num_characters :]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The closed ones."""
        return [dict(message) for message in self._chat.messages]

    @property
    def token_ids(self) -> list[int]:
        """Raises UnsupportedError where the backend's tokens are not the model's."""
        if isinstance(self._backend, Limited):
            self._backend.check_token_ids()
        return self.prompt()

    @property
    def turn_end(self) -> str:
        """What the template will write behind the open message."""
        return self._chat.turn_end

    def prompt(self) -> list[int]:
        """The token ids of the next request."""
        self._chat.before_reply(self._transcript)
        return self._transcript.settle()

    def protecting(self, kv: KVParams) -> KVParams:
        """`kv` with what the author wrote before the first generated token protected.

        What is kept is protected whatever `kv` says, and that includes all before it.
        """
        merged = merge_kv(KVParams(protected_len=self._transcript.authored_len), kv)
        kept_len = self._transcript.kept_len
        if not kept_len:
            return merged
        wanted_len = 0 if merged.protect == "none" else merged.protected_len or 0
        return merge_kv(merged, KVParams(protect="prompt", protected_len=max(wanted_len, kept_len)))

    def write(self, text: str) -> None:
        self._chat.write(text, self._transcript)

    def keep(self, text: str) -> None:
        """Write what must never be compacted."""
        self._chat.before_reply(self._transcript)
        self._chat.write(text, self._transcript)
        self._transcript.keep()

    def begin_role(self, role: Role) -> None:
        self._chat.begin(role, self._transcript)

    def end_role(self) -> None:
        self._chat.end(self._transcript)

    def open_scope(self, name: str) -> None:
        self._scopes[name] = len(self.text)

    def close_scope(self, name: str) -> str:
        """All that was said since `open_scope`."""
        return self.text[self._scopes.pop(name) :]

    def add_generated(
        self,
        output: RequestOutput,
        sampling: SamplingParams,
        text: str,
        thoughts: ThoughtMarks | None,
    ) -> None:
        """Append `text`, which is what stays of the output where `thoughts` were taken out."""
        if thoughts is not None and text != output.text:
            self._transcript.cut_end(thoughts.begin, self._forked_at.num_tokens)
            kept, unfinished = settle_answer(self._backend, output, sampling, text)
        else:
            kept, unfinished = settle_output(self._backend, output, sampling, text)
        self._transcript.add_generated(kept, text, unfinished)
        self._chat.note(text)

    def add_chosen(self, token_ids: list[int], text: str) -> None:
        """Append one of the author's choices by the tokens it was scored with."""
        self._transcript.add_chosen(token_ids, text)
        self._chat.note(text)

    def begin_at(self, parent: "StateText") -> None:
        """This is a branch's, with nothing in it yet: go on from where `parent` is."""
        parent._chat.before_reply(parent._transcript)
        self._transcript = parent._transcript.copy()
        self._forked_at = self._transcript.fork_point()
        self._chat = parent._chat.copy()
        here = Origin(weakref.ref(parent), self._forked_at, parent._chat.copy())
        self._origins = (*parent._origins, here)

    def is_branch_of(self, other: "StateText") -> bool:
        """Whether it went on from `other`, or from a branch of it."""
        return any(origin.parent() is other for origin in self._origins)

    def append_branch(self, branch: "StateText") -> bool:
        """Append what `branch` said since its fork; whether nothing stands between the two."""
        self._chat.before_reply(self._transcript)
        branch._chat.before_reply(branch._transcript)
        found = [origin for origin in branch._origins if origin.parent() is self]
        assert found, "only a branch of this state can be appended to it"
        origin = found[-1]
        is_unchanged = len(self._transcript.settle()) == origin.point.num_tokens
        self._transcript.append_from(branch._transcript, origin.point)
        self._chat.append_from(branch._chat, origin.chat)
        return is_unchanged
