"""A tiny HTTP server for tests of backends that speak HTTP.

Knows nothing of what its routes answer.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class TinyServer:
    """`routes` maps paths to functions of the request's JSON body.

    A dict answers as JSON, (status, dict) as an error, any other iterable as a stream of events; an
    exception in mid-stream breaks the connection. `requests` keeps (path, body, headers).
    """

    def __init__(self):
        self.routes = {}
        self.requests = []
        handler = type("Handler", (_Handler,), {"tiny": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def bodies(self, path):
        return [body for asked, body, _ in self.requests if asked == path]

    def close(self):
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    tiny = None

    def do_GET(self):
        self._answer(None)

    def do_POST(self):
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def log_message(self, *arguments):
        pass

    def _answer(self, body):
        self.tiny.requests.append((self.path, body, dict(self.headers)))
        route = self.tiny.routes.get(self.path)
        answer = (404, {"error": {"message": "no such route"}}) if route is None else route(body)
        if isinstance(answer, tuple):
            self._send_json(*answer)
        elif isinstance(answer, dict):
            self._send_json(200, answer)
        else:
            self._send_events(answer)

    def _send_json(self, status, answer):
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_events(self, events):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for event in events:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")
        except ConnectionError:
            return  # the client left, or the test breaks the line


@pytest.fixture
def tiny_server():
    server = TinyServer()
    yield server
    server.close()
