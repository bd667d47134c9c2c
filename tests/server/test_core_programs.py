"""Programs on the real server with the real client: as on an engine of one's own, states held too.

Knows nothing of the wire.
"""

import functools
import subprocess
import sys
import time

import httpx2
import pytest

import zipage_lang as zipage

ENDLESS = """
import sys
import zipage_lang as zipage

@zipage.function
def endless(s):
    s += "1+2=" + zipage.gen("a", max_tokens=3000, ignore_eos=True)

endless.run(backend=zipage.ServerBackend(sys.argv[1]))["a"]
"""


@pytest.fixture(scope="module")
def here():
    with zipage.Engine("zipage-tiny-reasoner", num_threads=1, kv_cache_memory=0.05) as engine:
        yield engine


@pytest.fixture
def there(real_server):
    return zipage.ServerBackend(real_server.url)


@zipage.function
def talk(s, question):
    s += zipage.user(question) + zipage.assistant(zipage.gen("a", max_tokens=24, temperature=0.7))
    branches = s.fork(3)
    branches += lambda index: f"{index}" + zipage.gen("b", max_tokens=8, regex="[0-9]+", n=2)
    branches.join()
    s += zipage.select("c", ["1", "22"]) + zipage.gen("d", max_tokens=8, stop="1", logprobs=2)


def test_a_program_says_the_same_on_a_server_and_on_an_engine(here, there):
    seen = [talk.run("12+34", backend=backend, seed=5) for backend in (here, there)]
    own, remote = seen
    assert remote.token_ids() == own.token_ids()
    assert [remote[name] for name in "abcd"] == [own[name] for name in "abcd"]
    near = functools.partial(pytest.approx, rel=1e-4)  # other batches add in other orders
    assert remote.meta("c").distribution == near(own.meta("c").distribution)
    assert remote.meta("a").usage == own.meta("a").usage
    entries = [result.meta("d").logprobs for result in seen]
    there_said, here_said = ([entry.logprob for entry in said] for said in reversed(entries))
    assert there_said == near(here_said)


def test_held_states_are_released_when_the_program_ends(there, real_server):
    talk.run("5*6", backend=there, seed=1).text()
    _wait(lambda: not _stats(real_server)["num_held_requests"])
    assert _stats(real_server)["num_running"] == 0


def test_thinking_is_bounded_and_parted_over_the_wire_too(here, there):
    think = zipage.ThinkParams(max_tokens=5, starts_inside=True)
    program = zipage.function(
        lambda s: s.append(zipage.user("7+8") + zipage.gen("a", think=think, max_tokens=30))
    )
    own, remote = (program.run(backend=backend, seed=2) for backend in (here, there))
    assert (remote["a"], remote.meta("a").thinking) == (own["a"], own.meta("a").thinking)
    assert remote.meta("a").usage.thinking_tokens > 5
    assert remote.meta("a").thinking


def test_the_kv_bound_travels(there):
    kv = zipage.KV(mode="fixed", budget=16, interval=16)
    program = zipage.function(
        lambda s: s.append("1" + zipage.gen("a", max_tokens=100, ignore_eos=True, kv=kv))
    )
    state = program.run(backend=there, seed=2)
    state["a"]
    assert state.meta("a").kv.compactions > 0


def test_a_bad_request_is_a_value_error_with_the_engines_words(there):
    program = zipage.function(lambda s: s.append("1" + zipage.gen("a", regex="(")))
    with pytest.raises(ValueError, match="regex"):
        program.run(backend=there)["a"]


def test_who_leaves_in_mid_stream_gives_its_blocks_back(real_server):
    sampling = {"max_tokens": 2000, "n": 2, "ignore_eos": True}
    body = {"input_ids": [1] * 200, "stream": True, "sampling_params": sampling}
    with httpx2.stream("POST", f"{real_server.url}/generate", json=body) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        assert _stats(real_server)["num_held"] > 0
    _wait_until_free(real_server)


def test_a_client_that_is_killed_gives_its_blocks_back(real_server):
    """A program in a process of its own, which can't release or abort anything."""
    client = subprocess.Popen([sys.executable, "-P", "-c", ENDLESS, real_server.url])
    try:
        _wait(lambda: _stats(real_server)["num_running"] == 1)
    finally:
        client.kill()
        client.wait()
    _wait(lambda: _stats(real_server)["num_running"] == 0)
    _wait_until_free(real_server)


def _wait(condition):
    given_up_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < given_up_at, "it did not happen in time"
        time.sleep(0.05)


def _wait_until_free(server):
    """No block is in use but by the tree, and what that has can be flushed."""
    _wait(lambda: _stats(server)["num_held"] == 0)
    stats = httpx2.post(f"{server.url}/flush_cache").json()
    assert stats["num_free"] == stats["num_blocks"]


def _stats(server):
    return httpx2.get(f"{server.url}/server_info").json()
