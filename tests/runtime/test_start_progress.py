"""What a starting engine says of itself: counted lines, from any room, only while it starts."""

import logging
import os
import time

from zipage_lang.kernels import build_progress
from zipage_lang.runtime.messages import Starting, decode_for_client, encode
from zipage_lang.runtime.start_progress import LOGGER, told_progress

LOG = logging.getLogger(LOGGER)


def test_lines_become_messages_with_their_count():
    told = []
    with told_progress(told.append):
        LOG.info("loading the model")
        LOG.info("building %s", "kernels", extra={"count": (1, 9)})
    assert told == [
        Starting(stage="loading the model"),
        Starting(stage="building kernels", done=1, total=9),
    ]
    assert [decode_for_client(encode(message)) for message in told] == told


def test_nothing_is_told_or_kept_behind_the_start(capsys):
    told = []
    with told_progress(told.append):
        pass
    LOG.info("too late")
    assert told == []
    assert not LOG.handlers
    assert LOG.level == logging.NOTSET
    assert LOG.propagate


def test_the_process_s_own_log_stays_silent_unless_it_was_asked_to_tell(caplog):
    with caplog.at_level(logging.WARNING), told_progress(lambda _: None):
        LOG.info("quiet")
    assert "quiet" not in caplog.text
    with caplog.at_level(logging.INFO), told_progress(lambda _: None):
        LOG.info("loud")
    assert "loud" in caplog.text


def test_a_kernel_build_counts_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(build_progress, "COUNT_EVERY_S", 0.01)
    told = []
    with told_progress(told.append), build_progress.shown_build("a thing", "soon", tmp_path, 2):
        made = tmp_path / "one.o"
        made.write_text("")
        os.utime(made, (time.time() + 1, time.time() + 1))  # file clocks may run a tick behind
        deadline = time.monotonic() + 20
        while not any(message.done == 1 for message in told) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert told[-1] == Starting(stage="building a thing", done=1, total=2)


def test_an_engine_counts_its_layers_as_it_loads():
    from zipage_lang.runtime.config import EngineConfig
    from zipage_lang.runtime.engine import Engine

    told = []
    config = EngineConfig.from_options(
        model="zipage-tiny-reasoner", num_blocks=16, num_threads=1, backend="cpu", swap_space=0.0
    )
    with told_progress(told.append):
        Engine(config)
    assert told[0] == Starting(stage="loading the model")
    assert [(m.done, m.total) for m in told if m.stage == "loading weights"] == [
        (layer, 8) for layer in range(8)
    ]
    assert told[-1] == Starting(stage="making the KV pool")
