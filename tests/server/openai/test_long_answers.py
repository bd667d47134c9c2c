"""A model can be made to write anything: reading it back costs each character once.

An answer is read in the server's event loop, so what grows with its square holds up everybody.
"""

import dataclasses

import pytest

from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.server.openai.chat_reply import joined_calls
from zipage_lang.server.openai.sample_reader import SampleReader
from zipage_lang.server.openai.thought_feed import ThoughtFeed
from zipage_lang.server.openai.tool_calls import LOOK_LEN, HermesParser, LlamaParser

NUM = 3000


class Counted(str):
    """A text that counts the characters that are put together or looked through again."""

    __slots__ = ()
    num_handled = 0

    def __add__(self, other):
        return Counted.handled(str(self) + str(other))

    def __radd__(self, other):
        return Counted.handled(str(other) + str(self))

    def __getitem__(self, place):
        return Counted.handled(str(self)[place])

    def strip(self, *what):
        Counted.handled(self)
        return Counted(str(self).strip(*what))

    def rstrip(self, *what):
        Counted.handled(self)
        return Counted(str(self).rstrip(*what))

    @classmethod
    def handled(cls, text):
        cls.num_handled += len(text)
        return cls(text)


TEXTS = {
    "blank": " " * NUM,
    "blank behind a tag": "<|python_tag|>" + "\n" * NUM,
    "parted by nothing": '{"name": "f"}' + " ;" * NUM,
    "a bare text": "a " * NUM,
    "open brackets": '{"name": "f", "arguments": {"x": ' + "[" * NUM,
    "numbers": '{"name": "f", "parameters": {"x": [' + "1," * NUM,
    "escapes": '{"name": "f", "arguments": {"x": "' + "\\n" * NUM,
    "arguments before the name": '{"arguments": {"x": ' + "[" * NUM,
    "a long name": '{"name": "' + "\\n" * NUM,
    "a long key": '{"' + "k" * NUM,
    "a long key behind the name": '{"name": "f", "' + "k" * NUM,
    "a bare value": '{"name": "f", "arguments": ' + "1" * NUM,
    "a quoted value": '{"name": "f", "arguments": "' + "\\n" * NUM,
}


@pytest.mark.parametrize("chunk_len", [1, 16, 10**6])
@pytest.mark.parametrize("lead", ["", "<tool_call>"])
@pytest.mark.parametrize("new_parser", [HermesParser, lambda: LlamaParser(["f"])])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_what_a_model_writes_is_read_once(new_parser, text, lead, chunk_len):
    text, parser = lead + text, new_parser()
    chunks = [Counted(text[at : at + chunk_len]) for at in range(0, len(text), chunk_len)]
    Counted.num_handled = 0
    for chunk in chunks:
        parser.feed(chunk)
    parser.finish()
    assert Counted.num_handled < 100 * len(text)  # it grew with the square


ARGUMENTS = '{"x": [' + "1, " * NUM + "1]}"
CALL = '<tool_call>{"name": "f", "arguments": ' + ARGUMENTS + "}</tool_call>"


@pytest.mark.parametrize(
    "text",
    [CALL, "a " + CALL * 2, CALL + " b " + CALL, '<tool_call>{"name": "f"}' * 2000, CALL[:-20]],
    ids=["lone", "two", "parted", "many", "cut"],
)
def test_a_whole_answer_comes_in_as_few_pieces_as_it_has_parts(text):
    answer = RequestOutput(request_id="a", prompt_token_ids=[1], text=text, finish_reason="stop")
    answer = dataclasses.replace(answer, answer=text)
    told = SampleReader(ThoughtFeed(None), HermesParser(), None).feed(answer).pieces
    whole = HermesParser()
    apart = [*whole.feed(text), *whole.finish()]
    assert joined_calls(told) == joined_calls(apart)
    assert [p for p in told if isinstance(p, str)] == [p for p in apart if isinstance(p, str)]
    assert len(told) <= 2 * text.count("<tool_call>") + 2


def test_a_tag_is_found_wherever_it_stands_in_a_long_text():
    for num_before in range(LOOK_LEN - 13, LOOK_LEN + 3):
        before = "a" * num_before
        parser = HermesParser()
        told = [*parser.feed(before + '<tool_call>{"name": "f"}</tool_call>'), *parser.finish()]
        assert "".join(p for p in told if isinstance(p, str)) == before
        assert joined_calls(told) == [{"name": "f", "arguments": "{}"}]


def test_many_calls_in_one_text_are_each_read_once():
    text = Counted('<tool_call>{"name": "f"}' * NUM)
    Counted.num_handled = 0
    HermesParser().feed(text)
    assert Counted.num_handled < NUM * (2 * LOOK_LEN + 2000)  # and not NUM * len(text) / 2
    assert len(text) > 4 * LOOK_LEN
