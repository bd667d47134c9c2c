"""A client that is refused can not keep the place of one that has vanished."""

import pytest

from zipage_lang.runtime.curve_keys import make_keys
from zipage_lang.runtime.messages import GetStats, Hello, encode
from zipage_lang.runtime.remote_line import RemoteLine

HELLO = encode(Hello())


class Flood:
    """A socket on which one client says hello, and another never stops asking."""

    def __init__(self):
        self.num_refused = 0
        self._has_greeted = False

    def recv_multipart(self, flags):
        if not self._has_greeted:
            self._has_greeted = True
            return [b"first", HELLO]
        return [b"second", encode(GetStats(call_id=""))]

    def send_multipart(self, frames, flags):
        assert frames[0] == b"second"
        self.num_refused += 1


@pytest.mark.parametrize(("lease_s", "has_left"), [(0.0, True), (1000.0, False)])
def test_a_flood_of_another_neither_keeps_nor_ends_a_clients_lease(
    tmp_path, monkeypatch, lease_s, has_left
):
    line = RemoteLine("tcp://127.0.0.1:0", str(make_keys(tmp_path)[0]), lease_s=lease_s)
    flood = Flood()
    with monkeypatch.context() as patch:
        patch.setattr(line, "_socket", flood)
        received = [line.receive(), line.receive()]
    line.close()
    assert received == [HELLO, None]
    assert flood.num_refused > 0
    assert line.take_departure() == has_left
