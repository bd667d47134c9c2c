"""Well-formed messages of absurd content: the engine lives, every sample has one final output."""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from zipage_lang.runtime import messages
from zipage_lang.runtime.config import CompressionConfig, EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.engine_process import EngineProcess
from zipage_lang.runtime.intake import LOGPROB_BYTES, TOP_BYTES, Intake
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.limits import Limits
from zipage_lang.runtime.messages import (
    Abort,
    AddRequest,
    FlushCache,
    Fork,
    GetSnapshot,
    GetStats,
    Hello,
    Release,
    Stop,
)
from zipage_lang.runtime.request import RequestRefused
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.think_params import ThinkParams

BOUNDS = [0, 1, -1, 2, 15, 16, 17, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, -(2**63), 2**64 - 1]
MAX_MODEL_LEN = 1024  # what a request that never stops comes to

ids = st.sampled_from(["a", "b", "c", "d", "", "\x00", "é" * 300])
groups = st.sampled_from(["", "g", "\x00"])
whole = st.one_of(st.sampled_from(BOUNDS), st.integers(-5, 300))
tokens = st.one_of(
    st.lists(st.integers(0, 60), min_size=1, max_size=40),
    st.lists(whole, max_size=6),
    st.integers(0, 5000).map(lambda length: [7] * length),
)
reals = st.one_of(
    st.sampled_from([0.0, -0.0, 1e-300, 1e-38, 1e-3, 1.0, 2.0, 100.0, -100.0, float("nan"), 1e308]),
    st.floats(-3, 3),
)
small = st.one_of(st.integers(1, 6), st.integers(1, 6), st.sampled_from([2**31 - 1]))


def as_far_as_legal(make):
    """Field by field: what the class itself refuses can't be decoded, so it can't arrive."""

    def build(fields):
        kept = {}
        for name, value in fields.items():
            try:
                make(**kept, **{name: value})
            except (ValueError, TypeError, OverflowError):
                continue
            kept[name] = value
        return make(**kept)

    return build


samplings = st.fixed_dictionaries(
    {"max_tokens": small},
    optional={
        "min_tokens": st.integers(0, 8),
        "temperature": reals,
        "top_p": reals,
        "top_k": whole,
        "min_p": reals,
        "repetition_penalty": reals,
        "presence_penalty": reals,
        "frequency_penalty": reals,
        "seed": st.one_of(st.none(), whole),
        "stop": st.sampled_from(["", "a", ["a"] * 50]),
        "stop_token_ids": st.lists(whole, max_size=4),
        "ignore_eos": st.booleans(),
        "n": st.one_of(st.integers(1, 4), st.sampled_from([40])),
        "logprobs": st.sampled_from([None, 0, 20]),
        "prompt_logprobs": st.sampled_from([None, 0, 20]),
        "prompt_logprobs_start": whole,
        "logit_bias": st.one_of(st.none(), st.dictionaries(whole, reals, max_size=4)),
        "regex": st.sampled_from([None, None, None, "[0-9]{2}", "(", ""]),
        "think": st.sampled_from([None, None, ThinkParams(), ThinkParams(max_tokens=1)]),
    },
).map(as_far_as_legal(SamplingParams))
kvs = st.fixed_dictionaries(
    {},
    optional={
        "mode": st.sampled_from(["off", "fixed", "adaptive"]),
        "budget": st.one_of(st.integers(1, 40), whole),
        "interval": st.one_of(st.integers(1, 40), whole),
        "policy": st.sampled_from(
            ["zipage", "random", "none such", "rkv:mass_weight=nan", ":", "full"]
        ),
        "protect": st.sampled_from(["prompt", "none"]),
        "protected_len": whole,
        "reuse": st.sampled_from(["compacted", "exact"]),
    },
).map(as_far_as_legal(KVParams))
requests = st.builds(
    AddRequest,
    request_id=ids,
    token_ids=tokens,
    sampling=samplings,
    kv=st.one_of(st.none(), kvs),
    namespace=st.sampled_from(["", "n", "\x00"]),
    priority=st.one_of(st.just(0), whole),
    tenant=groups,
    group_id=groups,
    hold=st.booleans(),
)
sent = st.one_of(
    requests,
    requests,
    st.builds(Fork, parent_id=ids, children=st.lists(requests, max_size=3)),
    st.builds(Stop, request_id=ids, sample_index=whole, num_output_tokens=whole),
    st.builds(Abort, request_ids=st.lists(ids, max_size=3), group_ids=st.lists(groups, max_size=2)),
    st.builds(Release, request_ids=st.lists(ids, max_size=3)),
    st.builds(GetStats, call_id=ids),
    st.builds(GetSnapshot, call_id=ids, max_cells=whole, max_nodes=whole, max_requests=whole),
    st.builds(FlushCache, call_id=ids),
    st.just(Hello()),
)
talks = st.lists(st.tuples(sent, st.integers(0, 4)), min_size=1, max_size=12)


class Lead:
    """A Line of messages given beforehand; keeps what the engine sends."""

    def __init__(self):
        self.waiting, self.replies = [], []

    def wait(self, timeout_ms):
        pass

    def receive(self):
        return self.waiting.pop(0) if self.waiting else None

    def send(self, data):
        self.replies.append(messages.decode_for_client(data))

    def take_departure(self):
        return False

    def close(self):
        pass


class Talk:
    """Messages to an engine and its answers; counts what was opened and what has ended."""

    def __init__(self, engine):
        self.engine, self.line = engine, Lead()
        self.process = EngineProcess(engine, self.line)
        self.open, self.ended = {}, {}

    def say(self, message):
        data = messages.encode(message)
        assert messages.decode_for_engine(data)
        for request in self._requests(message):
            if request.request_id not in self.open:
                self.open[request.request_id] = request.sampling.n
        self.line.waiting.append(data)
        self.process._take_messages()

    def step(self):
        outputs = self.engine.step()
        self.engine.scheduler.check_invariants()
        for output in outputs:
            self._note(output)

    def _note(self, output):
        if not output.is_final:
            assert output.request_id in self.open, output
            return
        key = output.request_id
        assert key in self.open, f"a final output too many: {output}"
        seen = self.ended.setdefault(key, set())
        assert output.sample_index not in seen, f"two final outputs: {output}"
        seen.add(output.sample_index)
        if len(seen) == self.open[key]:
            del self.open[key], self.ended[key]

    @staticmethod
    def _requests(message):
        if isinstance(message, AddRequest):
            return [message]
        return message.children if isinstance(message, Fork) else []

    def finish(self):
        num_steps = MAX_MODEL_LEN * (1 + sum(self.open.values()))  # all, one after the other
        for _ in range(num_steps):
            if not self.engine.has_work:
                break
            self.step()
        self.step()
        assert not self.engine.has_work, f"still busy after {num_steps} steps"
        assert not self.open, f"no end for {self.open}"


@pytest.fixture(scope="module")
def engine():
    options = {"num_blocks": 40, "max_running": 8, "swap_space": 0.01, "num_threads": 1}
    options |= {"model": "zipage-tiny-reasoner", "max_model_len": MAX_MODEL_LEN}
    return Engine(EngineConfig.from_options(**options))


def play(engine, talk_lines):
    talk = Talk(engine)
    for message, num_steps in talk_lines:
        talk.say(message)
        for _ in range(num_steps):
            talk.step()
    talk.finish()
    assert talk.process._num_malformed == 0, "a message broke off, even if it was survived"
    talk.say(Release(request_ids=engine.scheduler.held_ids))
    assert not engine._open.ids


@given(talk_lines=talks)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_content_ends_the_engine_and_every_sample_has_one_end(engine, talk_lines):
    play(engine, talk_lines)


def test_a_request_that_never_stops_ends_where_the_model_does(engine):
    sampling = SamplingParams(max_tokens=2**31 - 1, ignore_eos=True)
    kv = KVParams(mode="fixed", budget=64, interval=32)
    endless = AddRequest(request_id="a", token_ids=[7, 8, 9], sampling=sampling, kv=kv)
    play(engine, [(endless, 0)])


@pytest.mark.slow
@given(talk_lines=talks)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_content_ends_the_engine_and_every_sample_has_one_end_at_length(engine, talk_lines):
    play(engine, talk_lines)


def test_prompt_logprobs_that_fit_no_message_are_refused_and_those_that_fit_do():
    """A client drops what is over the limit, and with it the request's end."""
    limits = Limits(
        num_blocks=10**6,
        num_host_blocks=0,
        num_query_slots=4,
        max_model_len=10**6,
        vocab_size=100,
        eos_token_ids=(),
        window=16,
    )
    intake = Intake(CompressionConfig(), limits, 16, {})

    def request(num_tokens, start=0):
        sampling = SamplingParams(
            max_tokens=1, prompt_logprobs=20, prompt_logprobs_start=start, n=1
        )
        return AddRequest(request_id="r", token_ids=[1] * num_tokens, sampling=sampling)

    with pytest.raises(RequestRefused, match="raise prompt_logprobs_start, or ask for less"):
        intake.make_requests(request(150_000))
    assert intake.make_requests(request(150_000, start=60_000))
    assert intake.make_requests(request(100_000))
    top = [(2**31 - 1, -12.345)] * 20
    entry = messages.LogprobEntry(2**31 - 1, -12.345, 150_000, top)
    output = messages.TokenOutput(request_id="r" * 100, prompt_logprobs=[entry] * 1000)
    size = len(messages.encode(messages.Outputs(items=[output])))
    assert size < 1000 * (LOGPROB_BYTES + 20 * TOP_BYTES) + 1000
