"""A server as a program: ServerConfig fields, an engine command or None, EngineConfig fields.

Knows nothing of tests.
"""

import ast
import importlib.util
import os
import sys

from zipage_lang.runtime.config import EngineConfig
from zipage_lang.server.config import ServerConfig
from zipage_lang.server.run import serve


def hide_torch() -> None:
    """From transformers, which imports it where it is: half of such a server's start.

    A folder's tokenizer needs none, and the engine is a process of its own.
    """
    find_spec = importlib.util.find_spec

    def find_others(name: str, package: str | None = None) -> object:
        return None if name == "torch" else find_spec(name, package)

    importlib.util.find_spec = find_others
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that there is none


if __name__ == "__main__":
    server, command, engine = map(ast.literal_eval, sys.argv[1:])
    hide_torch()
    serve(EngineConfig.from_options(**engine), ServerConfig(**server), engine_command=command)
