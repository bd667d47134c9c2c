"""A server as a program: ServerConfig fields, an engine command or None, EngineConfig fields.

Knows nothing of tests.
"""

import ast
import sys

from zipage_lang.runtime.config import EngineConfig
from zipage_lang.server.config import ServerConfig
from zipage_lang.server.run import serve

if __name__ == "__main__":
    server, command, engine = map(ast.literal_eval, sys.argv[1:])
    serve(EngineConfig.from_options(**engine), ServerConfig(**server), engine_command=command)
