"""A headless Chromium, driven over its debugging pipe with nothing but the standard library.

Knows nothing of the pages it opens.
"""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WAIT_S = 30.0
# The browser reads from descriptor 3 and writes to 4, so whatever came as those makes way first.
LAUNCHER = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]
for end, wanted in zip(ends, (3, 4)):
    os.dup2(end, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    """Path of a Chromium or Chrome; None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for path in map(shutil.which, names) if path), None)


class Page:
    """One tab. Collects what the console said, which requests were made and what failed."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.console: list[str] = []
        self.requested: list[str] = []
        self._out, self._in = to_browser, from_browser
        self._buffer = b""
        self._ids = itertools.count(1)
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result. Raises RuntimeError on an error."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive(WAIT_S)
            assert reply is not None, f"no answer to {method} in {WAIT_S} s"
            if reply.get("id") == number:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]

    def open(self, url: str, *, width: int = 1280, height: int = 900) -> None:
        """Go there and wait until it has loaded."""
        self.resize(width, height)
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        is_phone = width < 600
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if is_phone else 1,
            mobile=is_phone,
        )

    def prefer(self, **features: str) -> None:
        """Media features, say prefers_color_scheme="dark"."""
        named = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.send("Emulation.setEmulatedMedia", features=named)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait_for(self, script: str, seconds: float = WAIT_S) -> Any:
        """Wait until the expression is true, and return it. AssertionError when it never is."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"never true: {script}; console: {self.console}"
            self.watch(0.05)
        return value

    def watch(self, seconds: float) -> None:
        """Let time pass, and take in what the page does meanwhile."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._receive(left)

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def shoot(self, path: Path) -> None:
        """Save a picture of the whole page."""
        picture = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message, events noted; None when there is none in time."""
        deadline = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            data = os.read(self._in, 2**20)
            assert data, "the browser has ended"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled":
            said = [str(each.get("value", each.get("description"))) for each in params["args"]]
            self.console.append(f"{params['type']}: {' '.join(said)}")
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            thrown = details.get("exception", {}).get("description")
            self.console.append(f"exception: {thrown or details['text']}")
        elif method == "Log.entryAdded":
            entry = params["entry"]
            self.console.append(f"{entry['level']}: {entry['text']} {entry.get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])


@contextlib.contextmanager
def open_page(program: str) -> Iterator[Page]:
    """A fresh browser with one empty tab, ended on the way out."""
    read_here, write_there = os.pipe()
    read_there, write_here = os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", LAUNCHER, str(read_there), str(write_there)),
                *(program, *_flags(profile), "about:blank"),
            ],
            pass_fds=(read_there, write_there),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        try:
            yield Page(write_here, read_here)
        finally:
            process.terminate()
            process.wait(10)
            os.close(write_here)
            os.close(read_here)


def _flags(profile: str) -> list[str]:
    return [
        "--headless=new",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--hide-scrollbars",
    ]
