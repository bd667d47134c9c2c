"""Nothing that runs code of its input: not in the packages, not on the wire."""

import ast
import base64
import pickle
import zlib
from pathlib import Path

import pytest

from zipage_lang.evaluation import code_tests
from zipage_lang.frontend.child_link import ChildLink
from zipage_lang.frontend.engine_sockets import EngineSockets
from zipage_lang.runtime import messages
from zipage_lang.runtime.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("zipage_lang", "frontend", "runtime", "radix_cache", "kernels", "server")
FORBIDDEN_MODULES = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal",
    "multiprocessing", "concurrent.futures.process", "yaml",
}  # fmt: skip
FORBIDDEN_NAMES = {
    "recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized", "ProcessPoolExecutor",
    "unsafe_load",
}  # fmt: skip
FORBIDDEN_CALLS = {"torch.load", "torch.jit.load", "torch.hub.load", "eval", "exec", "compile"}

# What may, and why. Of `compile` only the builtin counts, not that of regular expressions.
ALLOWED = {
    # An answer that is Python is run in a process without rights, with limits on all it may use.
    ("zipage_lang/evaluation/checkers/sandbox_child.py", "exec"),
    ("zipage_lang/evaluation/checkers/sandbox_child.py", "compile"),
    # The user's own program file, which `zipage run` is there to run.
    ("zipage_lang/commands/program_file.py", "exec"),
    ("zipage_lang/commands/program_file.py", "compile"),
    # A data set publishes its tests so. The reader refuses whatever names a class or a function:
    # `test_the_one_reader_of_pickles_runs_nothing` below.
    ("zipage_lang/evaluation/code_tests.py", "pickle"),
}


def found_in(tree):
    """What of the forbidden a module uses: names as they stand in its code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_forbidden(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield from (name for name in names if is_forbidden(name))
            yield from (alias.name for alias in node.names if alias.name in FORBIDDEN_NAMES)
        elif isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_NAMES:
            yield node.attr
        elif isinstance(node, ast.Name) and node.id in FORBIDDEN_NAMES:
            yield node.id
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in FORBIDDEN_CALLS or name.endswith(".load_module"):
                yield name
            if any(word.arg == "allow_pickle" for word in node.keywords):
                yield "allow_pickle"
            if any(
                word.arg == "trust_remote_code" and not is_false(word) for word in node.keywords
            ):
                yield "trust_remote_code"


def is_false(word):
    return isinstance(word.value, ast.Constant) and word.value.value is False


def is_forbidden(module):
    return any(module == name or module.startswith(f"{name}.") for name in FORBIDDEN_MODULES)


def files():
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def test_no_file_of_the_packages_unpickles_or_evaluates_its_input():
    assert len(files()) > 250
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in files()
        for name in found_in(ast.parse(path.read_text()))
    }
    assert found <= ALLOWED, sorted(found - ALLOWED)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from multiprocessing import Queue",
        "import torch\ntorch.load('x')",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
        "socket.recv_pyobj()",
        "eval('1')",
        "import yaml",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "from concurrent.futures import ProcessPoolExecutor",
    ],
)
def test_the_search_finds_what_it_is_for(code):
    assert list(found_in(ast.parse(code)))


class Runs:
    """Unpickled by Python's own reader, this makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_the_one_reader_of_pickles_runs_nothing(tmp_path):
    mark = tmp_path / "mark"
    packed = base64.b64encode(zlib.compress(pickle.dumps(Runs(str(mark))))).decode()
    with pytest.raises(ValueError, match=r"name io\.open; not read"):
        code_tests._unpacked(packed)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Runs(str(mark))))
    assert mark.exists(), "what was refused would have run"


def test_every_frame_of_a_run_is_messagepack_of_a_known_message(
    with_llm, reasoner_options, monkeypatch
):
    """Both ways, from the first progress line to the goodbye, as bytes at the sockets."""
    frames = {"out": [], "in": []}
    send, receive = EngineSockets.send, EngineSockets.receive

    def noting_send(self, message):
        plain = self._sender

        class Noting:
            def send(self, data):
                frames["out"].append(data)
                return plain.send(data)

        self._sender = Noting()
        try:
            send(self, message)
        finally:
            self._sender = plain

    async def noting_receive(self):
        message = await receive(self)
        frames["in"].append(messages.encode(message))
        return message

    monkeypatch.setattr(EngineSockets, "send", noting_send)
    monkeypatch.setattr(EngineSockets, "receive", noting_receive)
    assert ChildLink.send is not EngineSockets.send

    async def use(llm):
        await llm.complete("Q: 1+1=?\n", SamplingParams(max_tokens=4, n=2, logprobs=2), hold=False)
        await llm.complete("Q: 1+1=?\n", SamplingParams(max_tokens=4), hold=True, request_id="kept")
        await llm.complete(
            "Q: 1+1=?\nA", SamplingParams(max_tokens=2), parent_id="kept", request_id="child"
        )
        llm.abort(["nobody's"])
        llm.release(["kept"])
        await llm.stats()
        await llm.snapshot()
        await llm.flush_cache()
        return llm.client.num_malformed

    assert with_llm(use, reasoner_options) == 0
    kinds_out = {type(messages.decode_for_engine(frame)).__name__ for frame in frames["out"]}
    kinds_in = {type(messages.decode_for_client(frame)).__name__ for frame in frames["in"]}
    assert kinds_out >= {"AddRequest", "Fork", "Abort", "Release", "GetStats", "GetSnapshot"}
    assert kinds_out >= {"FlushCache", "Shutdown"}
    assert kinds_in >= {"Ready", "Outputs", "StatsReply", "SnapshotReply"}
