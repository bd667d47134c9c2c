"""Calls and text come apart the same way however the text is cut, and nothing is lost."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zipage_lang.server.openai.call_reader import CallPiece
from zipage_lang.server.openai.tool_calls import HermesParser, LlamaParser

NAMES = ("f", "g")
PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool", "_call>", "{", "}", "[", "]", ",", ": ", ";"),
        *('"name"', '"f"', '"arguments"', '"parameters"', '"', "\\", "\n", " ", "a", "<", "1"),
        *("null", "<|python_tag|>", '{"name": "f", "arguments": {"a": "}"}}', '"type"', "ä"),
    ]
)
TEXTS = st.lists(PIECES, max_size=16).map("".join)


def read(parser, parts):
    """(text, [(name, arguments)]) of an answer that comes in parts."""
    pieces = [piece for part in parts for piece in parser.feed(part)] + parser.finish()
    calls = {}
    for piece in pieces:
        if isinstance(piece, CallPiece):
            call = calls.setdefault(piece.index, [piece.name, ""])
            assert (piece.name is None) == (call[1] != "" or piece.name is None)
            call[1] += piece.arguments
    assert list(calls) == list(range(len(calls)))
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    return text, [tuple(call) for call in calls.values()]


def hermes(text, **options):
    return read(HermesParser(**options), [text])


def llama(text, **options):
    return read(LlamaParser(NAMES, **options), [text])


@settings(max_examples=400, deadline=None)
@given(text=TEXTS, cut=st.integers(0, 200), max_calls=st.sampled_from([None, 1]))
def test_however_a_text_is_cut_the_same_calls_come_out(text, cut, max_calls):
    def parsers():
        return HermesParser(max_calls), LlamaParser(NAMES, max_calls)

    whole = [read(parser, [text]) for parser in parsers()]
    assert [read(parser, list(text)) for parser in parsers()] == whole
    assert [read(parser, [text[:cut], "", text[cut:]]) for parser in parsers()] == whole
    for told, calls in whole:
        assert calls or told == text


ARGUMENTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=6,
    ),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3),
    cut=st.integers(0, 300),
)
def test_calls_with_any_arguments_are_read_back_wherever_they_are_cut(calls, cut):
    written = [(name, json.dumps(arguments)) for name, arguments in calls]
    objects = [f'{{"name": "{name}", "arguments": {text}}}' for name, text in written]
    tagged = "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    plain = "; ".join(one.replace('"arguments"', '"parameters"', 1) for one in objects)
    for parser_of, text in ((HermesParser, tagged), (lambda: LlamaParser(NAMES), plain)):
        for parts in ([text], list(text), [text[:cut], text[cut:]]):
            assert read(parser_of(), parts) == ("", written)


def test_a_call_is_read_back_at_every_cut():
    text = 'So: <tool_call>\n{"name": "f", "arguments": {"a": ["}", "\\""]}}\n</tool_call>'
    for cut in range(len(text) + 1):
        told = read(HermesParser(), [text[:cut], text[cut:]])
        assert told == ("So:", [("f", '{"a": ["}", "\\""]}')])


@pytest.mark.parametrize("parser", [HermesParser(), LlamaParser(NAMES)])
def test_a_long_text_in_a_call_is_not_told_character_by_character(parser):
    call = json.dumps({"name": "f", "arguments": {"a": "b" * 10_000}})
    opened = "<tool_call>" if isinstance(parser, HermesParser) else ""
    assert len(parser.feed(opened + call)) < 20


def test_text_around_calls_is_kept_without_the_whitespace_at_its_end():
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert hermes(f"Let me see.\n\n{call}\n") == ("Let me see.", [("f", '{"a": 1}')])
    assert hermes(f"A{call} B")[0] == "A B"
    assert hermes("no call at all \n") == ("no call at all \n", [])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "f"}', [("f", "{}")]),
        ('{"name": "f", "arguments": null}', [("f", "{}")]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", '{"a": 1}')]),
        ('{"arguments": {"a": 1}, "name": "f"}', [("f", '{"a": 1}')]),
        ('{"name": "f", "arguments": {"a": "}</tool_call>"}}', [("f", '{"a": "}</tool_call>"}')]),
        (
            '{"name": "f", "parameters": {"a": [1, {"b": "\\""}]}}',
            [("f", '{"a": [1, {"b": "\\""}]}')],
        ),
        ('{"name": "unknown", "arguments": {}}', [("unknown", "{}")]),
    ],
)
def test_arguments_are_read_as_models_write_them(text, calls):
    assert hermes(f"<tool_call>{text}</tool_call>") == ("", calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\nnot JSON\n</tool_call>",
        '<tool_call>{"city": "Rome"}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f',
        "a < b <tool_cal",
    ],
)
def test_what_is_no_call_stays_text(text):
    assert hermes(text) == (text, [])


def test_a_call_that_is_cut_off_is_told_as_far_as_it_went():
    assert hermes('<tool_call>{"name": "f", "arguments": {"a": [1') == ("", [("f", '{"a": [1')])


def test_only_so_many_calls_are_told():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert hermes(call * 3, max_calls=1) == ("", [("f", "{}")])
    assert llama('{"name": "f"}; {"name": "g"}', max_calls=1) == ("", [("f", "{}")])


@pytest.mark.parametrize(
    "text",
    ['{"answer": 42}', '{"name": "nobody", "parameters": {}}', "{", "Rome.", '[{"name": "f"}]'],
)
def test_llama_answers_in_json_are_no_calls_unless_they_name_a_tool(text):
    assert llama(text) == (text, [])


def test_llama_calls_may_follow_a_tag_and_each_other():
    text = '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}; {"name": "g"}'
    assert llama(text) == ("", [("f", '{"a": 1}'), ("g", "{}")])
