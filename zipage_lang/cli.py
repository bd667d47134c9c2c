"""The `zipage` command: which commands there are, each loaded when it is called for.

What a user can mend is told in one line on stderr, never as a traceback.
Knows nothing of what the commands do.
"""

import importlib
import re
import sys
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

EXIT_USER_ERROR = 2
RUN, LOOK, MODELS = "Run a model", "Measure and look", "Models and this machine"


class Entry(NamedTuple):
    """A command that is not loaded yet."""

    module: str  # of zipage_lang; has the command as `app`
    about: str
    panel: str


ENTRIES = {
    "serve": Entry("commands.serve", "Serve a model over HTTP, to OpenAI's clients too.", RUN),
    "engine": Entry("commands.engine", "Run an engine by itself, for a client elsewhere.", RUN),
    "chat": Entry("commands.chat", "Talk to a model in the terminal.", RUN),
    "run": Entry("commands.run", "Run a program file of the language.", RUN),
    "generate": Entry("commands.generate", "Generate from one prompt.", RUN),
    "bench": Entry("commands.bench", "Measure throughput on this machine.", LOOK),
    "eval": Entry(
        "commands.evaluate", "Measure a model's answers under full and compressed KV.", LOOK
    ),
    "trace": Entry("commands.trace", "Make an HTML page of a trace file.", LOOK),
    "calibrate": Entry("commands.calibrate", "Make a model's forecast of attention.", MODELS),
    "models": Entry("commands.models", "Get models and see which are here.", MODELS),
    "doctor": Entry("commands.doctor", "Check what this machine has and lacks.", MODELS),
    "version": Entry("commands.version", "Print the installed version.", MODELS),
}


class LazyGroup(TyperGroup):
    """Shows its commands without loading any; loads the one that is called or completed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {
            name: TyperCommand(name, help=entry.about, rich_help_panel=entry.panel)
            for name, entry in ENTRIES.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if name in ENTRIES else command, rest

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        """As typer's, but a mistake is one line."""
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **extra)
        try:
            # A command's own exit code comes back from typer as its result.
            code = super().main(args, standalone_mode=False, **extra)
        except TyperException as mistake:
            if mistake.format_message():  # none where no words were given: that was the help
                typer.echo(f"zipage: {describe(mistake)}", err=True)
            sys.exit(mistake.exit_code)
        except typer.Abort:
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)


def load(name: str) -> Any:
    """A command with all its flags."""
    entry = ENTRIES[name]
    command = typer.main.get_command(importlib.import_module(f"zipage_lang.{entry.module}").app)
    command.name = name
    for part in (command, *getattr(command, "commands", {}).values()):
        part.help = _joined(part.help or "")
    return command


def _joined(text: str) -> str:
    """Paragraphs without the line ends of a docstring."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def describe(mistake: TyperException) -> str:
    """What was wrong, the nearest right word, and where the help is."""
    message = " ".join(mistake.format_message().split()).replace("Value error, ", "")
    # The three ways in which typer names what it took for meant.
    found = re.search(r"[.;]? ?\(?(?:Did you mean|Possible options:) ([^?)]+)[?)]*$", message)
    if found is not None:
        typed = message[: found.start()]
        message = f"{typed}; did you mean {_nearest(typed.split()[-1], found[1])}?"
    context = getattr(mistake, "ctx", None)
    path = "zipage" if context is None else context.command_path
    return f"{message[:1].lower()}{message[1:].rstrip('.')} (see `{path} --help`)"


def _nearest(typed: str, offered: str) -> str:
    """Of the words that typer offers: one that begins so, else the one most like what was typed."""

    def likeness(word: str) -> tuple[bool, float]:
        return word.startswith(typed), SequenceMatcher(None, typed, word).ratio()

    return max(offered.split(", "), key=likeness)


app = typer.Typer(
    name="zipage",
    cls=LazyGroup,
    help="A language for multi-call reasoning programs on an engine whose memory is bounded.",
    epilog="First steps: zipage doctor, zipage models pull smollm2-135m, zipage chat",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from zipage_lang.commands.version import installed_version

        typer.echo(installed_version())
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """A language for multi-call reasoning programs on an engine whose memory is bounded."""


def main() -> None:
    """Entry point of the `zipage` command."""
    app(prog_name="zipage")


if __name__ == "__main__":
    main()
