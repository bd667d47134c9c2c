"""Tool calls in an answer: however it is cut, the same calls and text come out, and none is lost.

Knows nothing of templates.
"""

import json

from test_support.fuzz_input import Choices

from zipage_lang.server.openai.call_reader import CallPiece
from zipage_lang.server.openai.tool_formats import HERMES, LLAMA

NAMES = ("f", "get_weather")
PARTS = (
    *("<tool_call>", "</tool_call>", "<tool_", "\n", " ", "; ", "<|python_tag|>", "text", "{", "}"),
    *('{"name": "f", "arguments": {"x": 1}}', '{"name": "f", "parameters": {"a": "}"}}'),
    *(
        '{"name": ',
        '"f"',
        ', "arguments": ',
        "{}",
        "null",
        '"{}"',
        '"\\ud800"',
        "[1, 2]",
        '"a\\"b"',
    ),
    *(
        '{"arguments": {"y": [1]}, "name": "get_weather"}',
        '{"name": "other"}',
        "tru",
        "\\",
        '"',
        ":",
    ),
)


def target(data: bytes) -> None:
    choices = Choices(data)
    syntax = choices.pick((HERMES, LLAMA))
    most = choices.pick((None, 1))
    if choices.below(4) == 3:
        text = choices.take(200).decode("utf-8", "ignore")
    else:
        text = "".join(choices.pick(PARTS) for _ in range(choices.below(12)))
    whole = told(syntax.new_parser(NAMES, most), [text])
    assert told(syntax.new_parser(NAMES, most), choices.pieces(text, 8)) == whole
    assert told(syntax.new_parser(NAMES, most), list(text)) == whole
    shown, calls = whole
    assert most is None or len(calls) <= most
    for name, arguments in calls:
        assert name
        json.dumps({"name": name, "arguments": arguments}).encode()
    if "{" not in text and syntax is LLAMA:
        assert (shown, calls) == (text, [])


def told(parser, pieces) -> tuple[str, list[tuple[str, str]]]:
    """(text around calls, (name, arguments) of each call)."""
    shown: list[str] = []
    calls: list[list[str]] = []
    found = [piece for text in pieces for piece in parser.feed(text)] + parser.finish()
    for piece in found:
        if isinstance(piece, CallPiece):
            if piece.name is not None:
                assert piece.index == len(calls)
                calls.append([piece.name, ""])
            assert piece.index == len(calls) - 1
            calls[-1][1] += piece.arguments
        else:
            shown.append(piece)
    return "".join(shown), [(name, arguments) for name, arguments in calls]
