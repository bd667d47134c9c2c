"""Messages come back as they were sent; anything else raises MessageError and nothing but it."""

import dataclasses
import inspect

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zipage_lang.runtime import messages
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import (
    Abort,
    AddRequest,
    Failed,
    FlushCache,
    Fork,
    GetSnapshot,
    GetStats,
    Hello,
    KVUsage,
    LogprobEntry,
    MessageError,
    Outputs,
    Ready,
    Release,
    Shutdown,
    SnapshotReply,
    Starting,
    StatsReply,
    Stop,
    TokenOutput,
    Usage,
    decode_for_client,
    decode_for_engine,
    encode,
)
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.snapshot import (
    BlockGrid,
    CompactionView,
    NodeView,
    RequestView,
    Snapshot,
)

names = st.text(max_size=6)
counts = st.integers(0, 2**31 - 1)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)
reals = st.floats(allow_nan=False)
entries = st.builds(
    LogprobEntry,
    token_id=counts,
    logprob=reals,
    rank=counts,
    top=st.lists(st.tuples(counts, reals), max_size=2),
)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(10, 10**6),
    min_tokens=st.integers(0, 10),
    temperature=st.floats(0, 100),
    top_p=st.floats(0.001, 1),
    top_k=st.integers(-1, 10**6),
    seed=st.one_of(st.none(), st.integers(-(2**63), 2**64 - 1)),
    stop=st.one_of(names, st.lists(st.text(min_size=1, max_size=4), max_size=2)),
    stop_token_ids=ids,
    ignore_eos=st.booleans(),
    n=st.integers(1, 1024),
    logprobs=st.one_of(st.none(), st.integers(0, 20)),
    logit_bias=st.one_of(st.none(), st.dictionaries(counts, st.floats(-100, 100), max_size=3)),
)
kv_params = st.builds(
    KVParams,
    mode=st.sampled_from([None, "off", "fixed", "adaptive"]),
    budget=st.one_of(st.none(), st.integers(1, 10**6)),
    policy=st.one_of(st.none(), st.text(min_size=1, max_size=5)),
    protected_len=st.one_of(st.none(), counts),
)
requests = st.builds(
    AddRequest,
    request_id=names,
    token_ids=ids,
    sampling=sampling,
    kv=st.one_of(st.none(), kv_params),
    namespace=names,
    priority=st.integers(-(2**31), 2**31),
    group_id=names,
    hold=st.booleans(),
)
to_engine = {
    AddRequest: requests,
    Fork: st.builds(Fork, parent_id=names, children=st.lists(requests, max_size=3)),
    Stop: st.builds(Stop, request_id=names, sample_index=counts, num_output_tokens=counts),
    Abort: st.builds(Abort, request_ids=st.lists(names), group_ids=st.lists(names)),
    Release: st.builds(Release, request_ids=st.lists(names)),
    GetStats: st.builds(GetStats, call_id=names),
    GetSnapshot: st.builds(
        GetSnapshot, call_id=names, max_cells=counts, max_nodes=counts, max_requests=counts
    ),
    FlushCache: st.builds(FlushCache, call_id=names),
    Shutdown: st.just(Shutdown()),
    Hello: st.just(Hello()),
}
outputs = st.builds(
    TokenOutput,
    request_id=names,
    sample_index=counts,
    token_ids=ids,
    logprobs=st.one_of(st.none(), st.lists(entries, max_size=2)),
    prompt_logprobs=st.one_of(st.none(), st.lists(st.one_of(st.none(), entries), max_size=2)),
    finish_reason=st.sampled_from([None, "stop", "length", "abort"]),
    stop_token_id=st.one_of(st.none(), counts),
    error=st.one_of(st.none(), names),
    usage=st.builds(Usage, prompt_tokens=counts, completion_tokens=counts, cached_tokens=counts),
    kv=st.builds(KVUsage, logical_len=counts, resident_len=counts, compactions=counts),
)
grids = st.builds(
    BlockGrid,
    block_size=counts,
    num_blocks=counts,
    num_by_owner=ids,
    stride=counts,
    cells=st.binary(max_size=9),
)
snapshots = st.builds(
    Snapshot,
    step=counts,
    taken_s=reals,
    stats=st.dictionaries(names, st.one_of(counts, reals, names), max_size=3),
    grid=grids,
    nodes=st.lists(st.builds(NodeView, *[counts] * 2, st.booleans(), *[counts] * 5), max_size=2),
    num_nodes=counts,
    requests=st.lists(
        st.builds(RequestView, *[counts] * 2, names, *[counts] * 7, *[names] * 2, *[counts] * 5),
        max_size=2,
    ),
    num_requests=counts,
    logical_len=counts,
    resident_len=counts,
    compactions=st.lists(st.builds(CompactionView, *[counts] * 6), max_size=2),
)
to_client = {
    Outputs: st.builds(Outputs, items=st.lists(outputs, max_size=3)),
    StatsReply: st.builds(
        StatsReply,
        call_id=names,
        stats=st.dictionaries(names, st.one_of(counts, reals, names), max_size=3),
    ),
    Ready: st.builds(
        Ready,
        model=names,
        model_path=names,
        architecture=names,
        backend=names,
        max_model_len=counts,
        vocab_size=counts,
        eos_token_ids=ids,
        num_blocks=counts,
        block_size=counts,
    ),
    Failed: st.builds(Failed, error=names),
    Starting: st.builds(Starting, stage=names, done=counts, total=counts),
    SnapshotReply: st.builds(SnapshotReply, call_id=names, snapshot=snapshots),
}
PLAIN = AddRequest(request_id="a", token_ids=[1, 2], sampling=SamplingParams())


def as_sent(**changes):
    """The wire form of PLAIN with fields replaced by anything at all."""
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(encode(PLAIN)), **changes})


@pytest.mark.parametrize("kind", to_engine)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_message_to_the_engine_comes_back_as_sent(kind, data):
    message = data.draw(to_engine[kind])
    assert decode_for_engine(encode(message)) == message


@pytest.mark.parametrize("kind", to_client)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_message_to_the_client_comes_back_as_sent(kind, data):
    message = data.draw(to_client[kind])
    assert decode_for_client(encode(message)) == message


def test_every_tagged_message_has_a_round_trip_test():
    tagged = {
        kind
        for _, kind in inspect.getmembers(messages, inspect.isclass)
        if issubclass(kind, msgspec.Struct) and kind.__struct_config__.tag is not None
    }
    assert tagged - {TokenOutput} == set(to_engine) | set(to_client)


@given(data=st.data())
def test_each_side_refuses_the_other_sides_messages(data):
    upward = data.draw(st.one_of(*to_client.values()))
    downward = data.draw(st.one_of(*to_engine.values()))
    with pytest.raises(MessageError):
        decode_for_engine(encode(upward))
    with pytest.raises(MessageError):
        decode_for_client(encode(downward))


@given(st.one_of(*to_engine.values()), st.data())
def test_truncated_message_raises_message_error(message, data):
    sent = encode(message)
    with pytest.raises(MessageError):
        decode_for_engine(sent[: data.draw(st.integers(0, len(sent) - 1))])


@given(st.one_of(*to_engine.values()), st.binary(min_size=1, max_size=4))
def test_trailing_bytes_raise_message_error(message, tail):
    with pytest.raises(MessageError):
        decode_for_engine(encode(message) + tail)


def raises_nothing_but_message_error(decode, data):
    try:
        decode(data)
    except MessageError as error:
        assert str(error)  # noqa: PT017, a mutated message may still be a good one


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_message_error(data):
    raises_nothing_but_message_error(decode_for_engine, data)
    raises_nothing_but_message_error(decode_for_client, data)


@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.one_of(*to_engine.values()), st.data())
def test_mutated_messages_raise_nothing_but_message_error(message, data):
    sent = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(sent) - 1))
        sent[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        if not sent:
            break
    raises_nothing_but_message_error(decode_for_engine, bytes(sent))


anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), names),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=5,
)


@settings(max_examples=300)
@given(st.sampled_from([field.name for field in msgspec.structs.fields(AddRequest)]), anything)
def test_any_value_in_any_field_raises_nothing_but_message_error(name, value):
    raises_nothing_but_message_error(decode_for_engine, as_sent(**{name: value}))


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "nothing"},
        {"type": 3},
        {"request_id": 7},
        {"request_id": None},
        {"token_ids": "abc"},
        {"token_ids": [1.5]},
        {"token_ids": [True]},
        {"token_ids": [[1]]},
        {"sampling": None},
        {"sampling": [1]},
        {"priority": "high"},
        {"hold": 1},
        {"kv": 3},
    ],
)
def test_wrongly_typed_field_raises_message_error(changes):
    with pytest.raises(MessageError):
        decode_for_engine(as_sent(**changes))


@pytest.mark.parametrize("name", ["type", "request_id", "token_ids", "sampling"])
def test_missing_field_raises_message_error(name):
    sent = msgspec.msgpack.decode(encode(PLAIN))
    del sent[name]
    with pytest.raises(MessageError):
        decode_for_engine(msgspec.msgpack.encode(sent))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("temperature", float("nan"), "temperature=nan"),
        ("temperature", -1.0, "temperature=-1"),
        ("top_p", 0.0, "top_p=0"),
        ("n", 0, "n=0"),
        ("n", 10**9, "n=1000000000"),
        ("min_tokens", 10**6, "min_tokens=1000000"),
        ("stop", ["a", ""], "empty string"),
        ("stop_token_ids", [-1], "stop_token_ids=-1"),
        ("logprobs", 21, "logprobs=21"),
        ("logit_bias", {3: 1e9}, "logit_bias"),
        ("logit_bias", {"3": 1.0}, "logit_bias"),
        ("seed", "x", "seed"),
    ],
)
def test_sampling_is_validated_when_decoded(field, value, reason):
    with pytest.raises(MessageError, match=reason):
        decode_for_engine(as_sent(sampling={field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [("mode", "on"), ("budget", 0), ("interval", -4), ("policy", ""), ("protected_len", -1)],
)
def test_kv_params_are_validated_when_decoded(field, value):
    with pytest.raises(MessageError, match=r"\$\.kv"):
        decode_for_engine(as_sent(kv={field: value}))


def test_children_of_a_fork_are_validated_when_decoded():
    child = msgspec.msgpack.decode(encode(PLAIN))
    child["sampling"]["n"] = 0
    sent = msgspec.msgpack.encode({"type": "fork", "parent_id": "p", "children": [child]})
    with pytest.raises(MessageError, match="n=0"):
        decode_for_engine(sent)


@pytest.mark.parametrize("decode", [decode_for_engine, decode_for_client])
def test_oversized_message_is_refused_before_it_is_read(decode, monkeypatch):
    sent = {decode_for_engine: encode(PLAIN), decode_for_client: encode(Failed(error="x"))}[decode]
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", len(sent))
    decode(sent)
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", len(sent) - 1)
    with pytest.raises(MessageError, match=f"{len(sent)} bytes is over {len(sent) - 1}"):
        decode(sent)


@pytest.mark.parametrize(
    "nested",
    [
        pytest.param(b"\x91" * 100_000 + b"\x01", id="arrays"),
        pytest.param(b"\x81\xa1k" * 100_000 + b"\x01", id="maps"),
    ],
)
def test_deep_nesting_raises_message_error(nested):
    sent = encode(PLAIN)
    with_unknown_field = bytes([sent[0] + 1]) + sent[1:] + b"\xa7unknown" + nested
    with pytest.raises(MessageError):
        decode_for_engine(with_unknown_field)


@pytest.mark.parametrize("header", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff"])
def test_promised_length_that_is_not_there_raises_message_error(header):
    sent = encode(PLAIN)
    for data in (header, sent.replace(b"\x92\x01\x02", header + b"\x01\x02")):
        with pytest.raises(MessageError):
            decode_for_engine(data)


def test_message_error_is_a_value_error():
    assert issubclass(MessageError, ValueError)


@pytest.mark.parametrize(
    ("fields", "is_final"),
    [
        ({}, False),
        ({"token_ids": [1]}, False),
        ({"finish_reason": "stop"}, True),
        ({"error": "no memory"}, True),
        ({"error": ""}, True),
    ],
)
def test_output_is_final_with_a_reason_or_an_error(fields, is_final):
    assert TokenOutput(request_id="a", **fields).is_final is is_final


def test_default_output_lists_are_not_shared():
    one, other = (TokenOutput(request_id=name) for name in "ab")
    one.token_ids.append(3)
    assert other.token_ids == []


def test_equal_messages_encode_to_equal_bytes():
    again = AddRequest(request_id="a", token_ids=[1, 2], sampling=SamplingParams())
    assert encode(again) == encode(PLAIN)
    other = dataclasses.replace(PLAIN.sampling, seed=1)
    assert encode(msgspec.structs.replace(PLAIN, sampling=other)) != encode(PLAIN)
