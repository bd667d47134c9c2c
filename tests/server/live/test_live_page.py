"""The live page in a real browser, before a real engine: it loads, updates and survives.

Where no Chromium is installed these are skipped.
"""

import threading

import httpx2
import psutil
import pytest
from test_support.chromium import find_chromium, open_page

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")

ENGINE = {
    "block_size": 8,
    "num_blocks": 160,
    "max_running": 4,
    "kv_mode": "fixed",
    "kv_budget": 32,
    "evict_interval": 16,
}
HEAD = list(range(20, 60))


def text_of(page, name):
    return page.run(f"document.getElementById('{name}').textContent")


def says(name, text):
    return f"document.getElementById('{name}').textContent.includes({text!r})"


class Load:
    """Requests that share a prompt's beginning, two at a time, until closed."""

    def __init__(self, server):
        self._url, self._is_closed = server.url, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(2)]
        for thread in self._threads:
            thread.start()

    def close(self):
        self._is_closed.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number):
        body = {
            "input_ids": [*HEAD, 70 + number, 71, 72, 73, 74, 75, 76, 77, 78],
            "sampling_params": {"max_tokens": 400, "ignore_eos": True, "n": 2},
            "stream": True,
        }
        while not self._is_closed.wait(0.1):
            try:
                with httpx2.stream(
                    "POST", f"{self._url}/generate", json=body, timeout=60
                ) as response:
                    self._read(response)
            except httpx2.TransportError:
                continue  # the engine died: that is one of the tests

    def _read(self, response):
        for _ in response.iter_lines():
            if self._is_closed.is_set():
                return


@pytest.fixture(scope="module")
def server(start_real_server):
    return start_real_server(ENGINE)


@pytest.fixture(scope="module")
def load(server):
    load = Load(server)
    yield load
    load.close()


@pytest.fixture
def page():
    with open_page(CHROMIUM) as page:
        yield page


def open_live(page, server, **size):
    page.open(f"{server.url}/dashboard", **size)
    page.wait_for("seen.snapshot !== null")


def check_quiet(page, server):
    assert page.console == []
    strangers = [url for url in page.requested if not url.startswith((server.url, "data:"))]
    assert strangers == []


def test_it_draws_what_the_engine_does_and_goes_on(page, server, load):
    open_live(page, server)
    assert text_of(page, "model") == "zipage-tiny-reasoner"
    page.wait_for("document.querySelectorAll('.request').length === 4")
    page.wait_for("seen.flashes.size > 0")  # a compaction, as it happens
    page.wait_for("[...seen.teeth.values()].some(teeth => teeth.length >= 3)")
    assert "compactions" in page.run("document.querySelector('.request .kept').textContent")
    # What stands in the page is what the last answer said.
    assert page.run("seen.cells.length") == 160
    assert page.run("seen.snapshot.grid.num_by_owner.reduce((a, b) => a + b)") == 160
    assert page.run("document.querySelectorAll('#legend li').length") == 7
    page.wait_for("document.querySelectorAll('#tree g[tabindex]').length >= 2")
    step = page.run("seen.snapshot.step")
    page.wait_for(f"seen.snapshot.step > {step + 5}")
    page.wait_for("/^[1-9][0-9]* tokens/.test(document.getElementById('rate').textContent)")
    check_quiet(page, server)


def test_a_tooth_is_drawn_for_every_compaction_and_no_more(page, server, load):
    open_live(page, server)
    page.wait_for("[...seen.teeth.values()].some(teeth => teeth.length >= 4)")
    # One stretch per compaction and one that goes on; each begins where the last one was cut to.
    shapes = page.run(
        """seen.snapshot.requests.filter(hasBlocks).map(r => {
          const teeth = seen.teeth.get(keyOf(r)) || [];
          const parts = stretches(r, teeth);
          const grows = parts.every(p => p.x1 - p.x0 === p.y1 - p.y0);
          const ends = parts.at(-1).x1 === r.logical_len && parts.at(-1).y1 === r.resident_len;
          return [parts.length, teeth.length, r.compactions, grows, ends];
        })"""
    )
    assert shapes
    for num_parts, num_teeth, num_compactions, grows, ends in shapes:
        assert num_teeth == num_compactions
        assert num_parts == num_teeth + 1
        assert grows
        assert ends


def test_a_new_server_behind_an_open_page_is_a_new_beginning(page, server, load):
    """It counts compactions and restarts from the start again, as its engine is its first."""
    open_live(page, server)
    before = "{server: 'the one before', after: 1e9, since: 1e11, history: []}"
    page.run(f"seen.teeth.clear(), Object.assign(seen, {before}), 1")
    page.wait_for("seen.history.length > 0")
    page.wait_for("[...seen.teeth.values()].some(teeth => teeth.length >= 2)")
    assert page.run("seen.after < 1e9")
    assert not page.run("document.getElementById('banner').textContent.includes('back')")


def test_it_says_when_the_engine_dies_and_recovers_by_itself(page, server, load):
    open_live(page, server)
    page.wait_for("document.querySelectorAll('.request').length > 0")
    restarts = page.run("seen.engine")
    (engine,) = psutil.Process(server.pid).children()
    engine.kill()
    page.wait_for(says("banner", "The engine died and is starting again."))
    assert "SIGKILL" in text_of(page, "banner")
    assert page.run("document.body.classList.contains('stale')")
    page.wait_for(says("banner", "The engine is back."))
    page.wait_for(f"seen.engine === {restarts + 1} && seen.snapshot.num_requests > 0")
    page.wait_for("document.querySelectorAll('.request').length > 0")
    assert not page.run("document.body.classList.contains('stale')")
    check_quiet(page, server)


@pytest.mark.parametrize("width", [1280, 768, 390, 320])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off_at_any_width(page, server, width, scheme):
    page.prefer(prefers_color_scheme=scheme)
    open_live(page, server, width=width)
    assert page.run("document.documentElement.dataset.theme") == scheme
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.console == []


def test_keys_switch_the_light_and_stop_the_asking(page, server):
    page.prefer(prefers_color_scheme="light")
    open_live(page, server)
    page.press("t")
    assert page.run("document.documentElement.dataset.theme") == "dark"
    page.press("p")
    page.watch(0.5)
    num_asked = len(page.requested)
    page.watch(1.0)
    assert len(page.requested) == num_asked
    page.press("p")
    page.wait_for("!seen.isPaused")
    page.watch(1.0)
    assert len(page.requested) > num_asked
    open_live(page, server)
    assert page.run("document.documentElement.dataset.theme") == "dark"  # it was remembered


def test_everything_that_acts_is_reached_by_the_tab_key(page, server, load):
    open_live(page, server)
    page.wait_for("document.querySelectorAll('#tree g[tabindex]').length >= 2")
    page.press("p")  # the picture stands still, so that focus can be followed
    reached = set()
    for _ in range(14):
        page.press("Tab")
        reached.add(page.run("document.activeElement.closest('[id]')?.id"))
    assert {"pause", "theme", "legend", "tree"} <= reached
    page.run("document.querySelector('#tree g[tabindex=\"0\"]').focus()")
    first = text_of(page, "detail")
    assert "lookup" in first
    page.press("ArrowRight")
    assert text_of(page, "detail") != first


def test_a_legend_entry_singles_its_blocks_out(page, server):
    open_live(page, server)
    page.run("document.querySelector('#legend button').click()")
    assert page.run("seen.marked") == 1
    assert page.run("document.querySelectorAll('[aria-pressed=true]').length") == 1
    page.run("document.querySelector('#legend button').click()")
    assert page.run("seen.marked") == -1


def test_where_less_motion_is_wanted_nothing_fades(page, server, load):
    page.prefer(prefers_reduced_motion="reduce")
    open_live(page, server)
    page.wait_for("seen.flashes.size > 0")
    step = page.run("seen.snapshot.step")
    page.wait_for(f"seen.snapshot.step > {step + 20}")
    assert page.run("seen.fades.size") == 0


def test_a_page_that_nobody_sees_asks_nothing(page, server):
    open_live(page, server)
    page.run(
        "Object.defineProperty(document, 'hidden', {get: () => window.away, configurable: true}),"
        "window.away = true"
    )
    page.watch(0.8)
    num_asked = len(page.requested)
    page.watch(1.0)
    assert len(page.requested) == num_asked
    page.run("window.away = false, document.dispatchEvent(new Event('visibilitychange'))")
    page.watch(0.8)
    assert len(page.requested) > num_asked


def test_a_key_is_asked_for_and_kept_in_the_tab(page, start_server):
    server = start_server(api_keys=["sesame"]).wait_ready()  # its engine sends no pictures
    page.open(f"{server.url}/dashboard")
    page.wait_for("document.getElementById('ask').open")
    page.run("document.getElementById('apiKey').value = 'wrong'")
    page.run("document.querySelector('#ask .go').click()")
    page.wait_for("!document.getElementById('wrong').hidden")
    page.run("document.getElementById('apiKey').value = 'sesame'")
    page.run("document.querySelector('#ask .go').click()")
    page.wait_for("seen.data !== null")
    page.open(f"{server.url}/dashboard")
    page.wait_for("seen.data !== null")
    assert not page.run("document.getElementById('ask').open")


def test_a_name_that_is_html_is_shown_as_text_and_runs_nothing(page, start_server):
    """By the page, which writes texts, and again by the browser, which runs one script alone."""
    name = "<img/src=x/onerror=window.stolen=1>"
    server = start_server(served_model_name=name).wait_ready()
    page.open(f"{server.url}/dashboard")
    page.wait_for("seen.data !== null")
    page.wait_for("document.querySelector('header').textContent.includes('<img/src=x')")
    assert page.run("document.querySelectorAll('img').length") == 0
    page.run(
        "(() => { document.body.insertAdjacentHTML('beforeend', "
        "'<img src=\\'data:,\\' onerror=\\'window.stolen = 1\\'>');"
        "const script = document.createElement('script'); script.textContent = 'window.stolen = 2';"
        "document.body.append(script); })()"
    )
    page.watch(0.5)
    assert page.run("window.stolen === undefined")
