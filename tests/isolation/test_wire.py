"""What crosses between the processes: typed records in MessagePack, over a socket of one's own."""

import asyncio
import os
import pickle
import stat

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zipage_lang.frontend.engine_sockets import EngineSockets
from zipage_lang.runtime.messages import (
    AddRequest,
    MessageError,
    Outputs,
    TokenOutput,
    decode_for_client,
    decode_for_engine,
    encode,
)
from zipage_lang.runtime.sampling_params import SamplingParams

REQUEST = AddRequest(
    request_id="r", token_ids=[1, 2], sampling=SamplingParams(), tenant="t", namespace="n"
)


class Marker:
    """Would leave a mark when unpickled."""

    marked = False

    def __reduce__(self):
        return (setattr, (Marker, "marked", True))


@pytest.mark.parametrize("decode", [decode_for_engine, decode_for_client])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_no_message(decode, protocol):
    with pytest.raises(MessageError):
        decode(pickle.dumps(Marker(), protocol))
    assert not Marker.marked


def test_a_message_is_plain_messagepack_that_any_reader_understands():
    """Maps, lists, texts and numbers: no type of Python's is named in it."""
    told = msgspec.msgpack.decode(encode(REQUEST))
    assert told["type"] == "add"
    assert (told["tenant"], told["namespace"], told["token_ids"]) == ("t", "n", [1, 2])
    assert b"zipage" not in encode(REQUEST)
    assert b"SamplingParams" not in encode(REQUEST)
    outputs = msgspec.msgpack.decode(encode(Outputs(items=[TokenOutput(request_id="r")])))
    assert set(outputs) == {"type", "items"}


@given(code=st.integers(-128, 127), data=st.binary(max_size=40))
def test_an_extension_of_messagepack_becomes_no_object(code, data):
    """Extensions are how other libraries send pickles in MessagePack."""
    raw = msgspec.msgpack.encode(
        {"type": "add", "request_id": msgspec.msgpack.Ext(code, data), "token_ids": [1]}
    )
    with pytest.raises(MessageError):
        decode_for_engine(raw)


def test_the_sockets_lie_in_a_folder_that_only_their_owner_may_enter():
    async def work():
        before = os.umask(0)  # whoever starts us may have any
        try:
            sockets = EngineSockets()
        finally:
            os.umask(before)
        try:
            folder = os.stat(sockets.folder)
            return stat.S_IMODE(folder.st_mode), folder.st_uid
        finally:
            sockets.close()

    assert asyncio.run(work()) == (0o700, os.getuid())
