"""`zipage serve`: flags become settings; what is missing is told before anything starts."""

import importlib.util

import pytest


@pytest.fixture
def served(monkeypatch):
    """The settings that the server was started with."""
    from zipage_lang.server import run

    kept = []
    monkeypatch.setattr(run, "serve", lambda engine, server, **more: kept.append((engine, server)))
    return kept


def test_flags_become_both_settings(zipage, served):
    result = zipage(
        *("serve", "zipage-tiny-reasoner", "--port", 0, "--api-key", "a", "--api-key", "b"),
        *("--max-waiting", 7, "--max-running", 3, "--no-dashboard", "--kv-mode", "adaptive"),
    )
    assert result.exit_code == 0, result.output
    [(engine, server)] = served
    assert (server.port, server.api_keys, server.max_waiting) == (0, ("a", "b"), 7)
    assert not server.dashboard
    assert (engine.model.model, engine.scheduler.max_running) == ("zipage-tiny-reasoner", 3)
    assert engine.compression.kv_mode == "adaptive"
    assert engine.scheduler.max_waiting == 100_000


def test_keys_may_come_from_the_environment(zipage, served):
    result = zipage("serve", "zipage-tiny-reasoner", env={"ZIPAGE_API_KEY": "one two"})
    assert result.exit_code == 0, result.output
    assert served[0][1].api_keys == ("one", "two")


def test_a_missing_extra_is_one_line_that_says_what_to_install(zipage, served, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *more: None if name == "fastapi" else find_spec(name, *more),
    )
    result = zipage("serve", "zipage-tiny-reasoner")
    assert result.exit_code == 2
    assert result.stderr == (
        "zipage: the server needs fastapi; run: pip install 'zipage-lang[serve]'\n"
    )
    assert served == []


def test_a_port_in_use_is_one_line(zipage):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = zipage("serve", "zipage-tiny-reasoner", "--port", port)
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"zipage: can't listen on 127.0.0.1:{port}")
