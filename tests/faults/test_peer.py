"""A peer at the engine's sockets that floods, babbles, repeats itself or reads nothing.

The engine runs in a thread of this process, behind the real sockets; the test is its client.
"""

import resource
import subprocess
import sys
import threading

import psutil
import pytest
import zmq

from zipage_lang.runtime import messages
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.engine_process import EngineProcess
from zipage_lang.runtime.line import LineBrokenError
from zipage_lang.runtime.messages import Abort, AddRequest, Fork, GetStats, encode
from zipage_lang.runtime.parent_line import ParentLine
from zipage_lang.runtime.sampling_params import SamplingParams

LIMIT_MS = 90_000
PROBE = [5, 9, 12, 7]
SHORT = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


class Peer:
    """An engine behind its line, and this end of the line."""

    def __init__(self, engine, folder):
        self.engine = engine
        self._context = zmq.Context()
        self.sender, self.receiver = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket, name in ((self.sender, "to_engine"), (self.receiver, "to_client")):
            socket.set_hwm(0)
            socket.bind(f"ipc://{folder}/{name}")
        self._line = ParentLine(str(folder))
        self._process = EngineProcess(engine, self._line)
        self._thread = threading.Thread(target=self._process.run, daemon=True)
        self._thread.start()

    def send(self, *sent):
        for message in sent:
            self.sender.send(encode(message))

    def next(self):
        """The engine's next message."""
        assert self.receiver.poll(LIMIT_MS), "the engine is silent"
        return messages.decode_for_client(self.receiver.recv())

    def outputs(self, *request_ids):
        """The outputs up to the final ones of these requests of one sample; id -> outputs."""
        found = {request_id: [] for request_id in request_ids}
        waiting = set(request_ids)
        while waiting:
            message = self.next()
            for output in getattr(message, "items", []):
                assert output.request_id in waiting, f"unwanted: {output}"
                found[output.request_id].append(output)
                if output.is_final:
                    waiting.discard(output.request_id)
        return found

    def tokens(self, request_id="probe", prompt=PROBE):
        """What a request yields, sent now."""
        self.send(AddRequest(request_id=request_id, token_ids=prompt, sampling=SHORT))
        return tokens_of(self.outputs(request_id)[request_id])

    def stats(self):
        self.send(GetStats(call_id="s"))
        message = self.next()
        assert isinstance(message, messages.StatsReply), message
        return message.stats

    def close(self):
        self._process.stop()
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.engine.scheduler.check_invariants()
        self._line.close()
        self._context.destroy(0)


def tokens_of(outputs):
    assert all(output.error is None for output in outputs), outputs
    return [token for output in outputs for token in output.token_ids]


@pytest.fixture(scope="module")
def engine():
    options = {"num_blocks": 60, "max_running": 8, "swap_space": 0.01, "num_threads": 1}
    return Engine(EngineConfig.from_options(model="zipage-tiny-reasoner", **options))


@pytest.fixture
def peer(engine, tmp_path_factory):
    peer = Peer(engine, tmp_path_factory.mktemp("s"))
    yield peer
    peer.close()


@pytest.fixture
def right(peer):
    """The probe's tokens on an engine that nobody molests."""
    return peer.tokens("before")


GARBAGE = [
    b"",
    b"\xc1",
    b"not a message",
    bytes(64),
    encode(AddRequest(request_id="x", token_ids=[1, 2, 3], sampling=SHORT))[:-3],
    encode(messages.Failed(error="I am the engine")),
    b"\x81\xa4type\xa4nope",
]


def test_a_flood_of_garbage_is_counted_and_hinders_nobody(peer, right):
    before = peer.stats()["num_malformed_messages"]
    for index in range(100_000):
        peer.sender.send(GARBAGE[index % len(GARBAGE)])
        if index == 50_000:
            peer.send(AddRequest(request_id="amid", token_ids=PROBE, sampling=SHORT))
    assert tokens_of(peer.outputs("amid")["amid"]) == right
    assert peer.tokens() == right
    assert peer.stats()["num_malformed_messages"] - before == 100_000


def test_a_flood_is_logged_in_a_few_lines(peer, caplog):
    for _ in range(1000):
        peer.sender.send(b"")
    assert peer.stats()["num_malformed_messages"] == 1000
    lines = [record for record in caplog.records if "malformed" in record.getMessage()]
    assert len(lines) == 10  # the first, the second, the fourth, ..


def test_those_who_run_go_on_during_a_flood_of_requests(peer, right):
    """Messages are taken for a bounded time, then there is a step."""
    peer.send(AddRequest(request_id="runs", token_ids=PROBE, sampling=SHORT))
    for _ in range(5_000):
        peer.send(GetStats(call_id=""), Abort(request_ids=["nobody's"]))
    replies_before_the_end = 0
    outputs = []
    while not (outputs and outputs[-1].is_final):
        message = peer.next()
        replies_before_the_end += isinstance(message, messages.StatsReply)
        outputs += getattr(message, "items", [])
    assert tokens_of(outputs) == right
    assert replies_before_the_end < 5_000, "the request waited for the whole flood"
    for _ in range(5_000 - replies_before_the_end):
        assert isinstance(peer.next(), messages.StatsReply)


def test_a_message_of_several_frames_is_one_malformed_message(peer, right):
    before = peer.stats()["num_malformed_messages"]
    one = encode(AddRequest(request_id="framed", token_ids=PROBE, sampling=SHORT))
    peer.sender.send_multipart([one, one])
    peer.sender.send_multipart([b"", one])
    peer.sender.send_multipart([one[:5], one[5:]])
    assert peer.tokens() == right
    assert peer.stats()["num_malformed_messages"] - before == 3


def test_every_truncation_of_a_request_is_malformed(peer, right):
    before = peer.stats()["num_malformed_messages"]
    whole = encode(AddRequest(request_id="cut", token_ids=PROBE, sampling=SHORT))
    for length in range(len(whole)):
        peer.sender.send(whole[:length])
    assert peer.tokens() == right
    assert peer.stats()["num_malformed_messages"] - before == len(whole)


def test_a_request_that_comes_twice_does_not_touch_the_first(peer, right):
    request = AddRequest(request_id="twice", token_ids=PROBE, sampling=SHORT)
    before = peer.stats()["num_replayed"]
    peer.send(*[request] * 50)
    peer.send(Fork(parent_id="twice", children=[request, request]))
    outputs = peer.outputs("twice")["twice"]
    assert tokens_of(outputs) == right
    assert sum(output.is_final for output in outputs) == 1
    stats = peer.stats()
    assert stats["num_replayed"] - before == 51
    assert peer.tokens("twice") == right, "once it has ended the id may be used again"


def test_a_request_that_comes_again_while_the_first_runs_is_dropped(peer, right):
    long = SHORT.replace(max_tokens=60)
    request = AddRequest(request_id="runs", token_ids=PROBE, sampling=long)
    peer.send(request)
    first = peer.next()
    assert not first.items[-1].is_final
    peer.send(request)
    tokens = tokens_of([*first.items, *peer.outputs("runs")["runs"]])
    assert tokens[: len(right)] == right
    assert len(tokens) == 60


GIGABYTE = """
import sys, zmq
context = zmq.Context()
pull = context.socket(zmq.PULL)
sender = context.socket(zmq.PUSH)
sender.bind(f"ipc://{sys.argv[1]}/to_engine")
pull.bind(f"ipc://{sys.argv[1]}/to_client")
print("bound", flush=True)
sender.send(b"small")
sys.stdin.readline()
sender.send(bytes(2**30), copy=False)
print("sent", flush=True)
sys.stdin.readline()
"""


def test_a_gigabyte_is_refused_before_it_is_read_and_ends_the_line(tmp_path, until):
    """An engine that could hear nobody any more would keep its client waiting for ever."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", GIGABYTE, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as sender:
        assert sender.stdout.readline() == "bound\n"
        line = ParentLine(str(tmp_path))
        line.wait(LIMIT_MS)
        assert line.receive() == b"small"
        before = psutil.Process().memory_info().rss
        sender.stdin.write("go\n")
        sender.stdin.flush()
        until(lambda: line._cuts.poll(0), "the cut")
        with pytest.raises(LineBrokenError, match="over 67108864 bytes"):
            line.receive()
        assert psutil.Process().memory_info().rss - before < 100 * 2**20
        sender.kill()
    line.close()


def test_a_peer_that_reads_nothing_holds_up_its_engine_but_not_memory(peer, right):
    """The queue has a bound: then the engine waits in `send`, and goes on when somebody reads."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_calls = 6_000
    for _ in range(num_calls):
        peer.send(GetStats(call_id="x" * 5000))
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 400 * 1024, "of which most is this end's queue"
    for _ in range(num_calls):
        assert isinstance(peer.next(), messages.StatsReply)
    assert peer.tokens() == right


def test_large_outputs_go_in_as_many_messages_as_needed(peer, monkeypatch):
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 2000)
    items = [messages.TokenOutput(request_id=f"r{i}", token_ids=[1] * 300) for i in range(9)]
    peer._process._send_outputs(items)
    got = []
    while len(got) < len(items):
        data = peer.receiver.recv()
        assert len(data) <= 2000
        got += messages.decode_for_client(data).items
    assert got == items
