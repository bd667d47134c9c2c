"""An engine process with no model that notes when each token left it. For server_overhead.py.

    paced_engine.py STEP_SECONDS MODEL_PATH SOCKET_DIR CONFIG_JSON

It is the tests' scripted engine, which repeats a prompt, with a pace of its own. Its stats tell in
"sent_at" when (`time.perf_counter`, which all processes share) each message of outputs left since
the last request came. Knows nothing of who listens.
"""

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).parents[1] / "tests" / "frontend" / "scripted_engine.py"
LONGEST = 100_000


def load_script() -> ModuleType:
    """The scripted engine's module."""
    spec = importlib.util.spec_from_file_location("scripted_engine", SCRIPT)
    assert spec is not None
    assert spec.loader is not None, SCRIPT
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    script = load_script()

    class PacedEngine(script.ScriptedEngine):  # type: ignore[misc, name-defined]
        """Notes times."""

        def __init__(self, socket_dir: str) -> None:
            super().__init__(socket_dir)
            self.sent_at: list[float] = []

        def add(self, request: object) -> None:
            self.sent_at.clear()
            super().add(request)

        def send(self, message: object) -> None:
            if isinstance(message, script.Outputs):
                self.sent_at.append(time.perf_counter())
            super().send(message)

        def receive(self, data: bytes) -> None:
            if not self.running:
                self.stats["sent_at"] = ",".join(map(repr, self.sent_at))
            super().receive(data)

    script.STEP_S, script.MAX_MODEL_LEN = float(sys.argv[1]), LONGEST
    script.ScriptedEngine = PacedEngine
    del sys.argv[1]
    script.main()


if __name__ == "__main__":
    main()
