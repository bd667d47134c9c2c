"""`zipage chat`: a conversation in the terminal.

Knows nothing of who answers or how an answer is drawn.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from zipage_lang.commands.chat_lines import Conversation
from zipage_lang.commands.completions import model_names
from zipage_lang.commands.flag_groups import ENGINE_GROUPS, sampling_groups
from zipage_lang.commands.talkers import EngineTalker, Piece, ServerTalker, Talker
from zipage_lang.flags import takes_flags
from zipage_lang.frontend.errors import ZipageError
from zipage_lang.one_line_errors import one_line_errors
from zipage_lang.runtime.sampling_params import SamplingParams

DEFAULT_MODEL = "smollm2-135m"

app = typer.Typer(add_completion=False)


@app.command()
@takes_flags(sampling=sampling_groups(temperature=0.7, max_tokens=1024), engine=ENGINE_GROUPS)
def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            help=f"known name, folder, GGUF file or hub id; else {DEFAULT_MODEL}, or what the "
            "server has",
            autocompletion=model_names,
            show_default=False,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="the system message")] = None,
    think_budget: Annotated[
        int | None, typer.Option(help="tokens of thinking at most, then it must answer", min=0)
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="talk to this server instead of starting an engine")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="for the server", envvar="ZIPAGE_API_KEY")
    ] = None,
    *,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Talk to a model in the terminal.

    Thinking is dimmed; below an answer stand its tokens a second and what the KV cache keeps. /help
    lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.
    """
    with one_line_errors():
        params = SamplingParams(**sampling)
        if url is not None and engine:
            flags = ", ".join("--" + name.replace("_", "-") for name in engine)
            raise ValueError(f"{flags}: the server has its engine already; leave out with --url")
        with contextlib.ExitStack() as stack:
            if url is not None:
                talker: Talker = ServerTalker(
                    url, api_key=api_key, model=model, sampling=params, think_len=think_budget
                )
            else:
                talker = stack.enter_context(
                    _engine_talker(model or DEFAULT_MODEL, engine, params, think_budget)
                )
            _talk(talker, Conversation(system))


@contextlib.contextmanager
def _engine_talker(
    model: str, options: dict[str, Any], sampling: SamplingParams, think_len: int | None
) -> Iterator[Talker]:
    from zipage_lang.commands.starting import short_name, started_engine

    with started_engine(model, options) as engine:
        if not engine.async_llm.tokenizer.has_chat_template:
            raise ValueError(
                f"model {model!r} has no chat template; take an instruct or chat version of it, or "
                "continue texts with `zipage generate --raw`"
            )
        yield EngineTalker(engine, short_name(model), sampling, think_len)


def _talk(talker: Talker, conversation: Conversation) -> None:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - line editing and history for input()

        typer.secho(f"{talker.name}; /help lists the commands", dim=True)
    while not conversation.is_over:
        try:
            line = _read(is_terminal)
        except EOFError:
            break
        except KeyboardInterrupt:
            typer.secho("\nCtrl-D or /quit leaves", dim=True)
            continue
        if line.startswith("/"):
            _obey(conversation, line)
        elif line.strip():
            _answer(talker, conversation, line)


def _read(is_terminal: bool) -> str:
    """One question; a line that ends in a backslash goes on in the next one."""
    lines = [input("> " if is_terminal else "")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(". " if is_terminal else ""))
    return "\n".join(lines)


def _obey(conversation: Conversation, line: str) -> None:
    try:
        told = conversation.command(line)
    except (ValueError, OSError) as error:
        told = f"zipage: {error}"
    if told:
        typer.secho(told, dim=True)


def _answer(talker: Talker, conversation: Conversation, question: str) -> None:
    """Ask and show what comes. Without any answer the question is taken back."""
    from zipage_lang.commands.answer_view import AnswerView

    conversation.ask(question)
    view, tally = AnswerView(), Tally()
    view.status("waiting for the first token")
    try:
        with contextlib.closing(talker.reply(conversation.messages)) as pieces:
            for piece in pieces:
                tally.count(piece)
                view.think(piece.thinking)
                view.answer(piece.answer)
                view.status(tally.line)
    except KeyboardInterrupt:
        tally.end = "stopped"
        if not tally.text:
            view.end(tally.line)
            conversation.take_back()
            return
    except (ValueError, ZipageError) as error:
        view.end("")
        typer.echo(f"zipage: {error}", err=True)
        conversation.take_back()
        return
    view.end(tally.line)
    conversation.answered(tally.text)


class Tally:
    """What an answer came to."""

    def __init__(self) -> None:
        self.text = ""
        self.end = ""
        self._started = time.monotonic()
        self._first_at: float | None = None
        self._num_pieces = 0
        self._last = Piece()

    def count(self, piece: Piece) -> None:
        self.text += piece.answer
        if piece.thinking or piece.answer:
            self._num_pieces += 1
            self._first_at = self._first_at or time.monotonic()
        if piece.num_tokens or piece.kv:
            self._last = piece
        if piece.finish_reason == "length":
            self.end = "cut at --max-tokens"

    @property
    def line(self) -> str:
        """`128 tokens, 23.4 tok/s, first after 0.21 s; KV 180 of 310 slots, 2 compactions`."""
        # Where a server does not count, each piece is taken for a token.
        num_tokens = self._last.num_tokens or self._num_pieces
        parts = ["1 token" if num_tokens == 1 else f"{num_tokens} tokens"]
        if self._first_at is not None:
            seconds = time.monotonic() - self._first_at
            if num_tokens > 1 and seconds > 0:
                parts.append(f"{(num_tokens - 1) / seconds:.1f} tok/s")
            parts.append(f"first after {self._first_at - self._started:.2f} s")
        kv = self._last.kv
        held = f"; KV {kv.resident_len} of {kv.logical_len} slots" if kv else ""
        if kv and kv.compactions:
            held += f", {kv.compactions} compactions, {kv.dropped} dropped"
        return ", ".join(parts) + held + (f"; {self.end}" if self.end else "")
