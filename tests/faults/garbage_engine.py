"""An engine whose every message is one of garbage, between the outputs of an echo. No model.

    garbage_engine.py NUM_MESSAGES KIND MODEL_PATH SOCKET_DIR CONFIG_JSON

It is the scripted engine of the frontend's tests; before it answers a request it sends NUM_MESSAGES
of a KIND. Knows nothing of who listens.
"""

import importlib.util
import sys
from pathlib import Path

import zmq

SCRIPT = Path(__file__).parents[1] / "frontend" / "scripted_engine.py"


def load_script():
    """The scripted engine's module."""
    spec = importlib.util.spec_from_file_location("scripted_engine", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    script = load_script()
    num_messages, kind = int(sys.argv[1]), sys.argv[2]
    del sys.argv[1:3]

    class GarbageEngine(script.ScriptedEngine):
        def add(self, request):
            for index in range(num_messages):
                self.send_garbage(request, index)
            super().add(request)

        def send_garbage(self, request, index):
            right = script.TokenOutput(request_id=request.request_id, token_ids=[7])
            message = script.encode(script.Outputs(items=[right]))
            if kind == "bytes":
                self.outbox.send(index.to_bytes(8, "big"))
            elif kind == "truncated":
                self.outbox.send(message[: 1 + index % (len(message) - 1)])
            elif kind == "empty":
                self.outbox.send(b"")
            elif kind == "frames":
                self.outbox.send(message, zmq.SNDMORE)
                self.outbox.send(message)
            elif kind == "strangers":
                self.send(script.Outputs(items=[script.TokenOutput(request_id="nobody's")]))
            elif kind == "gigabyte":
                self.outbox.send(bytes(2**30), copy=False)

    script.ScriptedEngine = GarbageEngine
    script.main()


if __name__ == "__main__":
    main()
