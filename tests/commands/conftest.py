"""What the commands' tests share: the command line on the scripted engine, with no model.

Knows nothing of what commands print.
"""

import functools
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zipage_lang.cli import app

SCRIPT = Path(__file__).parent.parent / "frontend" / "scripted_engine.py"


@pytest.fixture(scope="session")
def reasoner():
    """The bundled model's folder; its tokenizer writes a character a token."""
    import zipage_lang

    return Path(zipage_lang.__file__).parent / "data" / "zipage-tiny-reasoner"


@pytest.fixture
def asked(monkeypatch, reasoner):
    """The commands start the scripted engine; what they asked of `Engine` is kept here."""
    from zipage_lang.commands import starting
    from zipage_lang.frontend.llm import Engine

    kept = []
    command = [sys.executable, str(SCRIPT), str(reasoner)]
    make = functools.partial(Engine, engine_command=command)

    def start(model, *, on_progress, **options):
        kept.append({"model": model, **options})
        return make(model, on_progress=on_progress, **options)

    monkeypatch.setattr(starting, "Engine", start)
    return kept


@pytest.fixture
def zipage():
    """Runs the command line in this process, as it is."""
    return lambda *arguments, **more: CliRunner().invoke(app, list(map(str, arguments)), **more)
