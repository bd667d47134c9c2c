"""The terminal chat: the loop on a scripted engine, its /words, its view, a server behind it."""

import io
import json
import threading
import types
import typing
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zipage_lang.commands.answer_view import AnswerView, without_controls
from zipage_lang.commands.chat import Tally, _answer
from zipage_lang.commands.chat_lines import Conversation
from zipage_lang.commands.talkers import EngineTalker, Piece, ServerTalker
from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.runtime.messages import KVUsage
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.think_params import ThinkParams


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


# -- the loop ------------------------------------------------------------------------------------


def test_answers_go_to_stdout_and_the_history_goes_along(zipage, asked, tmp_path):
    saved = tmp_path / "talk.json"
    result = zipage("chat", input=f"one\ntwo\n/save {saved}\n/quit\nnever asked\n")
    assert result.exit_code == 0, result.output
    # The scripted engine repeats its prompt: the second answer holds all that was said.
    assert result.stdout.startswith("one\n\none\n")
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[2]["content"] == "two"
    assert "one" in messages[3]["content"]


def test_a_mistake_in_a_command_is_told_and_the_chat_goes_on(zipage, asked):
    result = zipage("chat", input="/sve x\n/save\n/help\nhello\n")
    assert "no such command /sve; did you mean /save?" in result.stdout
    assert "say where to: /save FILE" in result.stdout
    assert "/system TEXT" in result.stdout
    assert result.stdout.endswith("hello\n\n")


def test_a_line_that_ends_in_a_backslash_goes_on(zipage, asked):
    assert zipage("chat", input="one\\\ntwo\n").stdout == "one\ntwo\n\n"


def test_a_question_that_is_refused_is_taken_back(zipage, asked):
    result = zipage("chat", input="x" * 600 + "\nshort\n")
    assert "512" in result.stderr
    assert result.exit_code == 0
    assert result.stdout.strip() == "short"


def test_flags_reach_engine_and_requests(zipage, asked):
    result = zipage(
        "chat", "smollm2-135m", "--kv-mode", "fixed", "--max-tokens", 2, input="abcdef\n"
    )
    assert result.stdout == "a\n"  # the first token is the BOS
    assert asked == [{"model": "smollm2-135m", "kv_mode": "fixed"}]


# -- the conversation ----------------------------------------------------------------------------


def test_system_starts_over_and_reset_keeps_it():
    talk = Conversation("be brief")
    talk.ask("hi")
    talk.answered("ho")
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
    assert talk.command("/system") == "be brief"
    talk.command("/reset")
    assert talk.messages == [{"role": "system", "content": "be brief"}]
    talk.ask("hi")
    talk.command("/system be long")
    assert talk.messages == [{"role": "system", "content": "be long"}]


def test_save_writes_markdown_or_json(tmp_path):
    talk = Conversation()
    talk.ask("größe?")
    talk.answered("5 µm")
    talk.command(f"/save {tmp_path / 'talk.md'}")
    assert (tmp_path / "talk.md").read_text() == "## user\n\ngröße?\n\n## assistant\n\n5 µm\n"
    talk.command(f"/save {tmp_path / 'talk.json'}")
    assert json.loads((tmp_path / "talk.json").read_text())["messages"] == talk.messages


def test_quit_and_exit_end_the_chat():
    for word in ("/quit", "/exit"):
        talk = Conversation()
        assert talk.command(word) == ""
        assert talk.is_over


# -- the view ------------------------------------------------------------------------------------


def test_thinking_is_dimmed_and_parted_from_the_answer():
    screen = Screen()
    view = AnswerView(screen)
    view.think("hmm")
    view.answer("\n\nfour")
    view.end("1 token")
    text = screen.getvalue()
    assert "\x1b[2mhmm\x1b[0m" in text
    assert text.index("hmm") < text.index("\n\n") < text.index("four")
    assert "\x1b[2mfour" not in text
    assert text.endswith("\x1b[2m1 token\x1b[0m\n\n")


def test_the_status_line_stands_below_and_is_cleared_by_the_next_text():
    screen = Screen()
    view = AnswerView(screen)
    view.answer("a")
    view.status("5 tok/s")
    view.status("6 tok/s")  # too soon
    view.answer("b")
    text = screen.getvalue()
    assert "6 tok/s" not in text
    place = text.index("5 tok/s")
    assert text.rindex("\x1b7", 0, place) > text.index("a")  # saved, drawn below, restored
    assert text.index("\x1b8", place) < text.index("\x1b[Jb")


def test_without_a_terminal_only_the_answer_is_written():
    stream = io.StringIO()
    view = AnswerView(stream)
    view.think("hmm")
    view.status("5 tok/s")
    view.answer("four")
    view.end("1 token")
    assert stream.getvalue() == "four\n"


@given(st.text())
def test_a_model_s_text_can_t_steer_the_terminal(text):
    shown = without_controls(text)
    assert len(shown) == len(text)
    assert not {c for c in shown if c not in "\n\t" and (c < " " or "\x7f" <= c <= "\x9f")}
    assert [c for c in shown if c.isprintable() and c != "\ufffd"] == [
        c for c in text if c.isprintable() and c != "\ufffd"
    ]


def test_the_tally_tells_tokens_and_what_the_kv_cache_keeps():
    tally = Tally()
    tally.count(Piece(answer="a", num_tokens=1, kv=KVUsage(logical_len=30, resident_len=30)))
    assert tally.line.startswith("1 token, first after ")
    kv = KVUsage(logical_len=300, resident_len=80, compactions=3, dropped=220)
    tally.count(Piece(answer="b", num_tokens=9, kv=kv, finish_reason="length"))
    assert tally.text == "ab"
    assert tally.line.startswith("9 tokens, ")
    assert " tok/s" in tally.line
    assert tally.line.endswith(
        "; KV 80 of 300 slots, 3 compactions, 220 dropped; cut at --max-tokens"
    )


# -- an engine ------------------------------------------------------------------------------------


class Tokenizer:
    """Knows the tag or not, and a template that opens it or not."""

    def __init__(self, *, has_tag, ends_with=""):
        self.has_tag, self.ends_with = has_tag, ends_with

    def render_chat(self, messages):
        return messages[-1]["content"] + self.ends_with

    def encode(self, text, add_special_tokens):
        return [len(text)]

    def token_id(self, token):
        return 7 if self.has_tag and token == "<think>" else None


class Engine:
    """Streams what it is given, and keeps the sampling it was asked with."""

    def __init__(self, tokenizer, outputs=()):
        self.async_llm = types.SimpleNamespace(tokenizer=tokenizer)
        self.outputs = outputs

    def stream(self, token_ids, sampling):
        self.sampling = sampling
        yield from self.outputs


@pytest.mark.parametrize(
    ("tokenizer", "think"),
    [
        (Tokenizer(has_tag=False), None),
        (Tokenizer(has_tag=True), ThinkParams(max_tokens=9)),
        (
            Tokenizer(has_tag=True, ends_with="<think>\n"),
            ThinkParams(max_tokens=9, starts_inside=True),
        ),
    ],
)
def test_thinking_is_watched_where_the_model_has_a_tag_for_it(tokenizer, think):
    engine = Engine(tokenizer)
    talker = EngineTalker(engine, "tiny", SamplingParams(max_tokens=50), think_len=9)
    list(talker.reply([{"role": "user", "content": "well?"}]))
    assert engine.sampling == SamplingParams(max_tokens=50, think=think)


def test_thinking_and_answer_come_apart_as_they_grow():
    def output(thinking, answer, num_tokens, finish=None):
        return RequestOutput(
            request_id="r",
            prompt_token_ids=[1],
            thinking=thinking,
            answer=answer,
            token_ids=[0] * num_tokens,
            finish_reason=finish,
        )

    outputs = [
        output("h", "", 1),
        output("hm </th", "", 2),
        output("hm ", "", 3),  # the tag is whole, and no thought
        output("hm ", "fo", 4),
        output("hm ", "four", 5, "stop"),
    ]
    talker = EngineTalker(
        Engine(Tokenizer(has_tag=True), outputs), "tiny", SamplingParams(), think_len=None
    )
    pieces = list(talker.reply([{"role": "user", "content": "2+2?"}]))
    assert [piece.answer for piece in pieces] == ["", "", "", "fo", "ur"]
    assert "".join(piece.thinking for piece in pieces) == "hm </th"
    assert (pieces[-1].num_tokens, pieces[-1].finish_reason) == (5, "stop")


def test_a_stopped_answer_stays_in_the_history_unless_it_is_empty(monkeypatch, capsys):
    class Stopped:
        name = "tiny"

        def __init__(self, *pieces):
            self.pieces = pieces

        def reply(self, messages):
            yield from self.pieces
            raise KeyboardInterrupt

    for pieces, turns in (((), 0), ((Piece(answer="fo"),), 2)):
        talk = Conversation()
        _answer(Stopped(*pieces), talk, "2+2?")
        assert len(talk.turns) == turns


# -- a server ------------------------------------------------------------------------------------


@pytest.fixture
def server():
    """Answers as OpenAI's chat does; `asked` keeps the bodies."""

    class Handler(BaseHTTPRequestHandler):
        asked: typing.ClassVar[list] = []

        def do_GET(self):
            self._send(json.dumps({"data": [{"id": "served"}]}).encode(), "application/json")

        def do_POST(self):
            length = int(self.headers["Content-Length"])
            self.asked.append(json.loads(self.rfile.read(length)))
            deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}]
            chunks = [{"choices": [{"delta": delta}]} for delta in [*deltas, {"content": "yes"}]]
            chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
            chunks.append({"choices": [], "usage": {"completion_tokens": 7}})
            lines = [json.dumps(chunk) for chunk in chunks]
            body = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
            self._send(body.encode(), "text/event-stream")

        def _send(self, body, kind):
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    Handler.url = f"http://127.0.0.1:{http.server_port}"
    yield Handler
    http.shutdown()
    http.server_close()


def test_a_server_s_chunks_become_pieces(server):
    talker = ServerTalker(
        server.url + "/v1", api_key="k", model=None, sampling=SamplingParams(), think_len=5
    )
    assert talker.name == "served"
    pieces = list(talker.reply([{"role": "user", "content": "well?"}]))
    assert "".join(piece.thinking for piece in pieces) == "hm"
    assert "".join(piece.answer for piece in pieces) == "yes"
    assert pieces[-1].num_tokens == 7
    assert server.asked[-1]["thinking_token_budget"] == 5
    assert server.asked[-1]["messages"] == [{"role": "user", "content": "well?"}]


def test_chat_talks_to_a_server(server, zipage):
    result = zipage("chat", "--url", server.url, "--temperature", "0", input="well?\n")
    assert result.stdout == "yes\n"
    assert server.asked[-1]["temperature"] == 0


def test_a_model_that_the_server_lacks_is_named(server, zipage):
    result = zipage("chat", "other", "--url", server.url, input="well?\n")
    assert result.exit_code == 2
    assert "serves served, not 'other'" in result.stderr
