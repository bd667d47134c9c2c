"""Regexes and Lark grammars as callers write them: translated, or refused with a reason.

A translated regex must mean under Python what the original means. Knows nothing of xgrammar.
"""

import re

from test_support.fuzz_input import Choices

from zipage_lang.runtime.lark_grammar import lark_to_ebnf
from zipage_lang.runtime.regex_dialect import portable_regex
from zipage_lang.runtime.sampling_params import SamplingParams

PARTS = (
    *("a", "b", "ab", ".", "\\d", "\\w", "\\n", "\\.", "[ab]", "[^a]", "[a-b0-9]", "[]]", "\\x61"),
    *("(", "(?:", "(?P<n>", ")", "|", "*", "+", "?", "{2}", "{0}", "{1,2}", "{,2}", "{1,}", "{"),
    *("}", "^", "$", "*?", "{1,2}?", "\n", "]", "[", "\\", "-", "(?=a)", "\\b", "(?i)", "\\1"),
)
TEXTS = (
    "",
    "a",
    "b",
    "ab",
    "ba",
    "aa",
    "aab",
    "abab",
    "1",
    "{",
    "}",
    "]",
    "\n",
    "a.b",
    "aaaa",
    "n",
)
LARK = (
    *("start", "item", "WORD", "_NAME", ":", "|", '"a"', '"b"i', "/a+/", "/[ab]/i", "(", ")", "["),
    *("]", "*", "+", "?", "~ 2", "~ 1..3", "->", "\n", "%ignore", "%import common.WS", "%declare"),
    *(
        '"a".."z"',
        "!",
        "?start: item\n",
        "start: WORD\n",
        "WORD: /a/\n",
        "item: start\n",
        "{x}",
        ".",
    ),
)


def target(data: bytes) -> None:
    choices = Choices(data)
    if choices.flag():
        check_regex(pattern_of(choices, PARTS))
    else:
        check_lark(pattern_of(choices, LARK, " "))


def pattern_of(choices: Choices, parts: tuple[str, ...], between: str = "") -> str:
    if choices.below(4) == 3:
        return choices.rest().decode("utf-8", "ignore")
    return between.join(choices.pick(parts) for _ in range(choices.below(16)))


def check_regex(pattern: str) -> None:
    try:
        written = portable_regex(pattern)
    except ValueError as error:
        assert str(error)
        return
    try:
        theirs = re.compile(written)
    except re.error:  # what only the other dialect reads
        return
    ours = re.compile(pattern)
    if ours.flags & ~re.UNICODE or len(pattern) > 60:
        return
    for text in TEXTS:
        assert bool(ours.fullmatch(text)) == bool(theirs.fullmatch(text)), (pattern, written, text)


def check_lark(grammar: str) -> None:
    try:
        SamplingParams(lark=grammar)
        written = lark_to_ebnf(
            grammar, lambda pattern, name: f"{name} ::= {portable_regex(pattern)!r}"
        )
    except ValueError as error:
        assert str(error)
        return
    assert written.startswith("root ::= ")
    assert "lark_start ::= " in written
