"""Engines that start on one card take turns; who dies or hangs stops nobody for long."""

import logging
import os
import subprocess
import sys
import threading

import pytest
import torch

from zipage_lang.runtime.start_turn import turn, turn_on_card

HOLDER = """
import pathlib, sys, time
from zipage_lang.runtime.start_turn import turn
with turn(pathlib.Path(sys.argv[1]), 60):
    print("mine", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def file(tmp_path):
    return tmp_path / "locks" / "start-card.lock"


def test_turns_do_not_overlap(file):
    inside, most = 0, 0
    guard = threading.Lock()

    def start():
        nonlocal inside, most
        with turn(file, 60):
            with guard:
                inside += 1
                most = max(most, inside)
            for _ in range(1000):
                os.stat(file)
            with guard:
                inside -= 1

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


def test_a_turn_ends_with_an_error_in_it(file):
    with pytest.raises(ValueError, match="no memory"), turn(file, 60):
        raise ValueError("no memory")
    with turn(file, 0):
        pass


def test_who_waits_says_so_and_goes_on_in_the_end(file, caplog):
    caplog.set_level(logging.INFO, logger="zipage.engine")
    with turn(file, 60), turn(file, 0.2):
        pass
    told = [record.message for record in caplog.records]
    assert told == [
        "waiting for another engine that starts on this card",
        "another engine starts for over 0 s: going on beside it",
    ]


def test_a_killed_process_gives_its_turn_back(file, caplog):
    command = [sys.executable, "-c", HOLDER, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "mine\n"
        threading.Timer(0.3, holder.kill).start()
        with turn(file, 60):
            pass
    assert not [record for record in caplog.records if "going on beside it" in record.message]


def test_without_a_place_for_the_lock_an_engine_starts_all_the_same(tmp_path, caplog):
    (tmp_path / "locks").write_text("a file, not a folder")
    with turn(tmp_path / "locks" / "start-card.lock", 60):
        pass
    assert "take no turns" in caplog.text


def test_a_cpu_has_no_turns(tmp_path, monkeypatch):
    monkeypatch.setenv("ZIPAGE_HOME", str(tmp_path))
    with turn_on_card(torch.device("cpu")), turn_on_card(torch.device("cpu")):
        pass
    assert not list(tmp_path.iterdir())
