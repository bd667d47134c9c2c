"""Lark grammars as EBNF: rules, terminals, %ignore and the common imports; no templates.

The result is one grammar over characters, without a lexer: a text belongs to it if it can be read
rule by rule with any split into terminals, so priorities of terminals decide nothing, and what
%ignore names may stand behind each terminal and at the start.
Knows nothing of tokens or of how grammars are compiled; regexes are turned into rules elsewhere.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

COMMON = {  # the terminals of Lark's library `common`, as regexes
    "DIGIT": r"[0-9]",
    "HEXDIGIT": r"[0-9a-fA-F]",
    "INT": r"[0-9]+",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_FLOAT": r"[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "NUMBER": r"([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "LCASE_LETTER": r"[a-z]",
    "UCASE_LETTER": r"[A-Z]",
    "LETTER": r"[a-zA-Z]",
    "WORD": r"[a-zA-Z]+",
    "CNAME": r"[a-zA-Z_][a-zA-Z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
}
_TOKEN = re.compile(
    r"""(?P<space>[ \t\f\r]+|//[^\n]*|\#[^\n]*)|(?P<newline>\n)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
    |(?P<name>[?!]?_*[A-Za-z][A-Za-z0-9_]*)|(?P<directive>%[a-z]+)|(?P<number>[0-9]+)
    |(?P<sign>->|\.\.|[:|()\[\]*+?~.,{}])""",
    re.VERBOSE,
)
_ENDS = ("newline", "|", ")", "]", "->")
IGNORED = "ignored"


class Token(NamedTuple):
    """kind: of _TOKEN, a sign its own; line: from 1."""

    kind: str
    text: str
    line: int


def lark_to_ebnf(text: str, regex_rules: Callable[[str, str], str]) -> str:
    """The grammar as EBNF with the rule `root`, for Lark's rule `start`.

    Args:
        regex_rules: (pattern, name) -> EBNF rules, of which `name` stands for the pattern.
    Raises ValueError with the line for what is wrong or not supported.
    """
    return _Converter(text, regex_rules).convert()


class _Converter:
    def __init__(self, text: str, regex_rules: Callable[[str, str], str]) -> None:
        self._tokens = list(_joined(_tokens(text)))
        self._at = 0
        self._regex_rules = regex_rules
        self._rules: dict[str, str] = {}
        self._extra: list[str] = []  # rules of regexes
        self._used: dict[str, int] = {}  # name -> the first line that uses it
        self._ignored: list[str] = []
        self._is_in_terminal = False
        self._has_ignored = any(token.text == "%ignore" for token in self._tokens)

    def convert(self) -> str:
        while self._peek().kind != "end":
            token = self._next()
            if token.kind == "directive":
                self._read_directive(token)
            elif token.kind == "name":
                self._read_definition(token)
            elif token.kind != "newline":
                raise _error(token, f"a rule or terminal begins here, not with {token.text!r}")
        for name, line in self._used.items():
            if name not in self._rules:
                raise ValueError(f"line {line}: {name!r} is not defined")
        if "start" not in self._rules:
            raise ValueError("line 1: there is no rule named 'start'")
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        lead = f"{IGNORED} " if self._has_ignored else ""
        yield f"root ::= {lead}{_ebnf_name('start')}"
        for name, body in self._rules.items():
            yield f"{_ebnf_name(name)} ::= {body}"
        if self._has_ignored:
            yield f"{IGNORED} ::= ({' | '.join(self._ignored)})*"
        yield from self._extra

    def _read_definition(self, token: Token) -> None:
        name = token.text.lstrip("?!")
        self._is_in_terminal = name.lstrip("_")[0].isupper()
        if self._accept("."):
            self._expect("number")
        if self._peek().kind == "{":
            raise _error(token, "templates are not supported; write the rule out")
        self._expect(":")
        if name in self._rules:
            raise _error(token, f"{name!r} is defined twice")
        self._rules[name] = self._alternatives()
        self._end_line()

    def _read_directive(self, token: Token) -> None:
        if token.text == "%ignore":
            self._is_in_terminal = True
            self._ignored.append(self._alternatives())
        elif token.text == "%import":
            self._read_import(token)
        else:
            raise _error(token, f"{token.text} is not supported")
        self._end_line()

    def _read_import(self, token: Token) -> None:
        if self._expect("name").text != "common":
            raise _error(token, "only terminals of 'common' can be imported")
        if self._accept("("):
            names = [self._expect("name")]
            while self._accept(","):
                names.append(self._expect("name"))
            self._expect(")")
            for name in names:
                self._import(name, name.text)
            return
        self._expect(".")
        name = self._expect("name")
        alias = self._expect("name").text if self._accept("->") else name.text
        self._import(name, alias)

    def _import(self, name: Token, alias: str) -> None:
        if name.text not in COMMON:
            raise _error(name, f"{name.text!r} is none of {', '.join(COMMON)}")
        self._rules.setdefault(alias, self._regex(COMMON[name.text]))

    def _alternatives(self) -> str:
        parts = [self._sequence()]
        while self._accept("|"):
            parts.append(self._sequence())
        return " | ".join(parts)

    def _sequence(self) -> str:
        items = []
        while self._peek().kind not in (*_ENDS, "end"):
            items.append(self._item())
        if self._accept("->"):
            self._expect("name")
        return " ".join(items) or '""'

    def _item(self) -> str:
        atom = self._atom(self._next())
        if self._peek().kind in ("*", "+", "?"):
            return f"({atom}){self._next().text}"
        if not self._accept("~"):
            return atom
        low = self._expect("number").text
        high = self._expect("number").text if self._accept("..") else low
        return _counted(atom, int(low), int(high))

    def _atom(self, token: Token) -> str:
        if token.kind in ("(", "["):
            inner = self._alternatives()
            self._expect(")" if token.kind == "(" else "]")
            return f"({inner})" if token.kind == "(" else f"({inner})?"
        if token.kind == "name":
            name = token.text
            self._used.setdefault(name, token.line)
            is_terminal = name.lstrip("_")[0].isupper()
            return self._spaced(_ebnf_name(name)) if is_terminal else _ebnf_name(name)
        if token.kind == "string":
            if self._accept(".."):
                return self._spaced(_range(token, self._expect("string")))
            return self._spaced(_literal(token))
        if token.kind == "regex":
            return self._spaced(self._regex(_pattern(token)))
        raise _error(token, f"{token.text!r} does not belong here")

    def _spaced(self, terminal: str) -> str:
        """A terminal, and what may be ignored behind it."""
        if self._is_in_terminal or not self._has_ignored:
            return terminal
        return f"({terminal} {IGNORED})"

    def _regex(self, pattern: str) -> str:
        name = f"regex{len(self._extra)}"
        self._extra.append(self._regex_rules(pattern, name))
        return name

    def _peek(self) -> Token:
        return self._tokens[self._at]

    def _next(self) -> Token:
        token = self._tokens[self._at]
        self._at += token.kind != "end"
        return token

    def _accept(self, kind: str) -> bool:
        is_there = self._peek().kind == kind
        self._at += is_there
        return is_there

    def _expect(self, kind: str) -> Token:
        token = self._next()
        if token.kind != kind:
            raise _error(token, f"{kind!r} is wanted, not {token.text!r}")
        return token

    def _end_line(self) -> None:
        if self._peek().kind != "end":
            self._expect("newline")


def _tokens(text: str) -> Iterator[Token]:
    at, line = 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"line {line}: {text[at : at + 10]!r} is no part of a Lark grammar")
        kind = str(match.lastgroup)
        if kind != "space":
            yield Token(match.group() if kind == "sign" else kind, match.group(), line)
        line += kind == "newline"
        at = match.end()
    yield Token("end", "the end", line)


def _joined(tokens: Iterator[Token]) -> Iterator[Token]:
    """Without the line ends inside brackets and before a `|`."""
    depth, newline = 0, None
    for token in tokens:
        depth += (token.kind in "([") - (token.kind in ")]")
        if token.kind == "newline":
            newline = token if depth == 0 else None
            continue
        if newline is not None and token.kind != "|":
            yield newline
        newline = None
        yield token


def _ebnf_name(name: str) -> str:
    return f"lark_{name}"


def _literal(token: Token) -> str:
    """A string, as EBNF writes it; with `i` each letter in both cases."""
    body = token.text.rstrip("i")[1:-1]
    if not token.text.endswith("i"):
        return f'"{body}"'
    parts = re.findall(r"\\.|.", body)
    both = [f"[{p.lower()}{p.upper()}]" if p.isalpha() else f'"{p}"' for p in parts]
    return f"({' '.join(both)})" if both else '""'


def _counted(atom: str, low: int, high: int) -> str:
    """With the first turn apart, for the reason that `regex_dialect` names."""
    if high == 0:
        return '""'
    first = f"(({atom}) ({atom}){{{max(0, low - 1)},{high - 1}}})" if high > 1 else f"({atom})"
    return first if low else f"{first}?"


def _range(low: Token, high: Token) -> str:
    ends = [token.text[1:-1] for token in (low, high)]
    if any(len(end) != 1 for end in ends):
        raise _error(low, f"a range is of single characters, not {low.text}..{high.text}")
    quoted = [f"\\{end}" if end in r"\]^-" else end for end in ends]
    return f"[{quoted[0]}-{quoted[1]}]"


def _pattern(token: Token) -> str:
    pattern, _, flags = token.text[1:].rpartition("/")
    if flags:
        raise _error(token, f"regex flags {flags!r} are not supported; write the pattern out")
    return pattern.replace("\\/", "/")


def _error(token: Token, what: str) -> ValueError:
    return ValueError(f"line {token.line}: {what}")
