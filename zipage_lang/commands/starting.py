"""Starts the engine that a command's flags ask for, with its progress shown.

Knows nothing of what the command does with it.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zipage_lang.frontend.llm import Engine
from zipage_lang.frontend.start_bar import start_bar
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.model_shapes import published_shape
from zipage_lang.runtime.model_store import is_hub_id, resolve_model


def checked_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """The settings, with mistakes found before anything is loaded. Raises ValueError."""
    config = EngineConfig.from_options(model=model, **options)
    if config.model.load_format == "dummy":
        if not Path(model).is_dir():
            published_shape(model)
    elif not is_hub_id(model):  # that one may be downloaded, which the engine does
        resolve_model(model)
    return config


@contextlib.contextmanager
def started_engine(model: str, options: Mapping[str, Any]) -> Iterator[Engine]:
    """A running engine, ended behind the block. Raises what `Engine` raises."""
    checked_config(model, options)
    with start_bar(short_name(model)) as report:
        engine = Engine(model, on_progress=report, **options)
    with engine:
        yield engine


def short_name(model: str) -> str:
    """A folder's or file's own name; other names as they are."""
    return Path(model).name if Path(model).exists() else model
