"""Lark grammars become grammars over characters that accept what Lark's own parser would."""

import pytest

from zipage_lang.runtime.grammar import GrammarCompiler, GrammarError, new_matcher
from zipage_lang.runtime.grammar_source import GrammarSource
from zipage_lang.runtime.vocabulary import Vocabulary

BYTES = Vocabulary((*(bytes([byte]) for byte in range(256)), b"</s>"), frozenset({256}))
SUMS = r"""
// sums of products
?start: expression
?expression: product | expression "+" product -> add
    | expression "-" product -> sub
?product.2: atom (("*" | "/") atom)*
atom: NUMBER | "-" atom | "(" expression ")"
%import common.NUMBER
%import common.WS_INLINE
%ignore WS_INLINE
"""
CALL = r"""
start: _name "(" [arguments] ")"
_name: CNAME
arguments: argument ("," argument)*
argument: ESCAPED_STRING | WORD "=" VALUE~1..2 | "nil"i | /[x-z]{2}\/root/ | COLOR
VALUE: "a".."f" DIGITS
DIGITS: ("0".."9")+
COLOR.5: "red" | "blue" "ish"?
%import common (CNAME, WORD, ESCAPED_STRING)
%ignore /[ \n]/  # between terminals
"""


@pytest.fixture(scope="module")
def accepts():
    compiler = GrammarCompiler(BYTES.texts, [256])

    def check(grammar, text):
        matcher = new_matcher(compiler.compile(GrammarSource("lark", grammar)))
        return matcher.accept_string(text) and matcher.is_completed()

    return check


@pytest.mark.parametrize(
    ("grammar", "text", "belongs"),
    [
        (SUMS, "1", True),
        (SUMS, " 1 + 2*(3.5 - -4)  ", True),
        (SUMS, "1+", False),
        (SUMS, "1 2", False),
        (SUMS, "1\n+2", False),
        (CALL, "f()", True),
        (CALL, 'go_2 ( "a b\\"", NiL,\nred , blueish )', True),
        (CALL, "f(k=a12b3)", True),
        (CALL, "f(k=a12b3c4)", False),
        (CALL, "f(k=a 1)", False),
        (CALL, "f(xz/root)", True),
        (CALL, "f(xz/regex0)", False),
        (CALL, "f(,)", False),
        (CALL, "f(blue ish)", False),
        ('start: "a" | ', "a", True),
        ('start: "\\"" /\\[/ /./', '"[x', True),
        ('start: "\\"" /\\[/ /./', '"[\n', False),
    ],
)
def test_texts_belong_to_a_lark_grammar(accepts, grammar, text, belongs):
    assert accepts(grammar, text) is belongs


def test_a_grammar_may_be_empty_at_an_alternative(accepts):
    assert accepts('start: "a" b\nb: "c" |', "a")


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        ('begin: "a"', "bad lark: line 1: there is no rule named 'start'"),
        ('start: "a"\n  b', "bad lark: line 2: ':' is wanted"),
        ('start: "a" other', "bad lark: line 1: 'other' is not defined"),
        ('start: ("a"\n', r"bad lark: line 2: '\)' is wanted"),
        ('start: "a"\nstart: "b"', "bad lark: line 2: 'start' is defined twice"),
        ('start: pair{"a"}', "bad lark: line 1: '{' does not belong here"),
        ('pair{x}: x x\nstart: "a"', "bad lark: line 1: templates are not supported"),
        ("start: A\n%declare A", "bad lark: line 2: %declare is not supported"),
        ("start: A\n%import other.A", "bad lark: line 2: only terminals of 'common'"),
        ("start: A\n%import common.A", "bad lark: line 2: 'A' is none of DIGIT"),
        ("start: /a/i", "bad lark: line 1: regex flags 'i' are not supported"),
        ("start: /(?=a)/", r"bad regex /\(\?=a\)/: .*Lookahead"),
        ('start: "ab".."c"', "bad lark: line 1: a range is of single characters"),
        ("start; a", "bad lark: line 1: '; a' is no part of a Lark grammar"),
    ],
)
def test_a_bad_lark_grammar_is_told_with_its_line(accepts, grammar, told):
    with pytest.raises(GrammarError, match=told):
        accepts(grammar, "a")
