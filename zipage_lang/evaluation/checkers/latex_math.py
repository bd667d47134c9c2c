r"""A small reader of the LaTeX that answers are written in, and exact comparison by sympy.

Recursive descent over a fixed set of commands; nothing is evaluated as Python. What it does not
know is a ValueError. No limit of time: whoever calls it runs it where it can be ended.
Knows nothing of boxes or outputs.

    answer   := item ("," item)* | "{" items "}"        "x = ..." names are dropped
    item     := ("(" | "[") items (")" | "]") | sum
    sum      := term (("+" | "-") term)*
    term     := power (("*" | "/")? power)*              side by side is a product
    power    := atom ("^" atom)? "!"*
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import sympy

MAX_LEN = 400
MAX_DEPTH = 40
MAX_EXPONENT = 10_000  # a plain power above it would be computed digit by digit

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\.\d+|\S")
_SPACES = re.compile(
    r"\\(?:left|right|quad|qquad|displaystyle|big|Big)(?![A-Za-z])|\\[!,;: $]|~|\$"
)
_UNITS = re.compile(r"\\(?:text|mbox|mathrm|textbf)\s*\{([^{}]*)\}")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})")
_NAMED = re.compile(r"^\s*[A-Za-z](?:\([a-z]\))?\s*(?:=|\\in(?![A-Za-z]))\s*")
_MATRIX = re.compile(r"\\(?:begin|end)\{[pbv]?matrix\}")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))")

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sin": sympy.sin,
    "cos": sympy.cos,
    "tan": sympy.tan,
    "cot": sympy.cot,
    "sec": sympy.sec,
    "csc": sympy.csc,
    "arcsin": sympy.asin,
    "arccos": sympy.acos,
    "arctan": sympy.atan,
    "ln": sympy.log,
    "exp": sympy.exp,
}
_NAMES = {
    "pi": sympy.pi,
    "infty": sympy.oo,
    **{
        name: sympy.Symbol(name)
        for name in ("alpha", "beta", "gamma", "delta", "theta", "lambda", "phi", "omega", "mu")
    },
}
_FRACTIONS = ("\\frac", "\\dfrac", "\\tfrac")
_OPENINGS = ("(", "{", *_FRACTIONS, "\\sqrt", "\\binom", "\\log", "\\lg")
_PRODUCTS = ("*", "\\cdot", "\\times")
_QUOTIENTS = ("/", "\\div")


class Group(NamedTuple):
    """Several values in a row: a point, an interval, a set, a list or a matrix by rows."""

    opening: str  # "" for a bare list
    closing: str
    items: tuple[Any, ...]


def same_value(left: str, right: str) -> bool:
    """Whether two answers are exactly equal. Raises ValueError for what can't be read."""
    return _are_equal(read_answer(left), read_answer(right))


def read_answer(text: str) -> Any:
    """A sympy expression or a Group. Raises ValueError."""
    if len(text) > MAX_LEN:
        raise ValueError(f"an answer of {len(text)} characters is not read; at most {MAX_LEN}")
    return _Reader(_tokens(text)).read()


def _tokens(text: str) -> list[str]:
    text = _SPACES.sub(" ", text.replace("\\\\", "\\newrow "))
    text = _DEGREES.sub("", _UNITS.sub(_word_in_text, text))
    text = _THOUSANDS.sub("", text).replace("\\%", "").replace("%", "")
    text = _MATRIX.sub(lambda match: "\\matrix " if "begin" in match[0] else "\\endmatrix ", text)
    return _TOKEN.findall(_NAMED.sub("", text.strip().rstrip(".")))


def _word_in_text(match: re.Match[str]) -> str:
    """`\\text{ cm}` is a unit and goes; `\\text{A}` is the answer; `\\text{ or }` is a comma."""
    word = match[1].strip()
    if word in ("or", "and"):
        return ","
    return word if len(word) == 1 else " "


class _Reader:
    """One answer's tokens, read from the left."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def read(self) -> Any:
        items = self._items(())
        if self._at < len(self._tokens):
            raise ValueError(f"{self._tokens[self._at]!r} is not expected here")
        return items[0] if len(items) == 1 else Group("", "", tuple(items))

    def _items(self, stops: tuple[str, ...]) -> list[Any]:
        items = [self._item()]
        while self._take(",") or self._take(";"):
            items.append(self._item())
        if stops and self._peek() not in stops:
            raise ValueError(f"one of {stops} is missing")
        return items

    def _item(self) -> Any:
        """A sum; what opens like a group and is one stays one."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        start = self._at
        group = self._group()
        if group is not None and self._peek() in ("", ",", ";", ")", "]", "\\}"):
            self._depth -= 1
            return group
        self._at = start
        value = self._sum()
        self._depth -= 1
        return value

    def _group(self) -> Group | None:
        """A bracket with several items in it, a set or a matrix; None for anything else."""
        opening = self._peek()
        if opening == "\\matrix":
            return self._matrix()
        closings = {"(": (")", "]"), "[": (")", "]"), "\\{": ("\\}",)}.get(opening)
        if closings is None:
            return None
        self._at += 1
        items = self._items(closings)
        closing = self._next()
        if len(items) == 1 and opening == "(":
            return None
        return Group(opening, closing, tuple(items))

    def _matrix(self) -> Group:
        self._at += 1
        rows, row = [], [self._sum()]
        while not self._take("\\endmatrix"):
            if self._take("\\newrow"):
                rows.append(tuple(row))
                row = [self._sum()]
            elif self._take("&"):
                row.append(self._sum())
            else:
                raise ValueError(f"{self._peek()!r} is not expected in a matrix")
        rows.append(tuple(row))
        return Group("matrix", "matrix", tuple(Group("row", "row", items) for items in rows))

    def _sum(self) -> Any:
        value = self._signed_term()
        while self._peek() in ("+", "-"):
            sign = 1 if self._next() == "+" else -1
            value = value + sign * self._term()
        return value

    def _signed_term(self) -> Any:
        if self._take("-"):
            return -self._term()
        self._take("+")
        return self._term()

    def _term(self) -> Any:
        value = self._power()
        while True:
            if self._peek() in _PRODUCTS:
                self._at += 1
                value = value * self._factor()
            elif self._peek() in _QUOTIENTS:
                self._at += 1
                value = value / self._factor()
            elif self._starts_atom():
                value = value * self._power()
            else:
                return value

    def _factor(self) -> Any:
        return -self._power() if self._take("-") else self._power()

    def _power(self) -> Any:
        value = self._atom()
        if self._take("^"):
            value = _raised(value, self._script())
        while self._take("!"):
            value = sympy.factorial(value)
        return value

    def _script(self) -> Any:
        if self._take("{"):
            return self._closed("}")
        return self._factor()

    def _closed(self, closing: str) -> Any:
        """A sum and the bracket behind it."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        value = self._sum()
        self._expect(closing)
        self._depth -= 1
        return value

    def _starts_atom(self) -> bool:
        token = self._peek()
        if token in _OPENINGS:
            return True
        is_named = token[1:] in _NAMES or token[1:] in _FUNCTIONS
        return token[:1].isalnum() or (token[:1] == "\\" and is_named)

    def _atom(self) -> Any:
        token = self._next()
        if token[0].isdigit() or token[0] == ".":
            return self._mixed(sympy.Rational(token))
        if token in ("(", "{", "["):
            return self._closed({"(": ")", "{": "}", "[": "]"}[token])
        if token == "|":
            return sympy.Abs(self._closed("|"))
        if len(token) == 1 and token.isalpha():
            return self._letter(token)
        if token.startswith("\\"):
            return self._command(token[1:])
        raise ValueError(f"{token!r} is not expected here")

    def _mixed(self, whole: Any) -> Any:
        """2\\frac{1}{3} is two and a third, not a product."""
        start = self._at
        if whole.is_Integer and self._peek() in _FRACTIONS:
            fraction = self._power()
            if fraction.is_Rational and 0 < fraction < 1:
                return whole + fraction
            self._at = start
        return whole

    def _letter(self, letter: str) -> Any:
        value = {"e": sympy.E, "i": sympy.I}.get(letter, sympy.Symbol(letter))
        if self._take("_"):
            return sympy.Symbol(f"{letter}_{self._script()}")
        return value

    def _command(self, name: str) -> Any:
        if name in _NAMES:
            return _NAMES[name]
        if name in ("frac", "dfrac", "tfrac"):
            above = self._argument()
            return above / self._argument()
        if name == "binom":
            above = self._argument()
            return sympy.binomial(above, self._argument())
        if name == "sqrt":
            return self._root()
        if name in ("log", "lg"):
            base = self._script() if self._take("_") else sympy.Integer(10)
            return sympy.log(self._function_argument(), base)
        if name in _FUNCTIONS:
            return self._function(_FUNCTIONS[name])
        raise ValueError(f"\\{name} is not known")

    def _function(self, function: Callable[..., Any]) -> Any:
        exponent = self._script() if self._take("^") else None
        value = function(self._function_argument())
        return value if exponent is None else _raised(value, exponent)

    def _function_argument(self) -> Any:
        """In brackets, or the product that follows as far as no other function begins."""
        if self._take("("):
            return self._closed(")")
        value = self._power()
        while self._starts_atom() and self._peek()[1:] not in _FUNCTIONS and self._peek() != "(":
            value = value * self._power()
        return value

    def _root(self) -> Any:
        degree = self._closed("]") if self._take("[") else sympy.Integer(2)
        return sympy.root(self._argument(), degree)

    def _argument(self) -> Any:
        """In braces, or the one digit, letter or command that stands there."""
        if self._take("{"):
            return self._closed("}")
        token = self._peek()
        if token[:1].isdigit() and len(token) > 1:
            # \frac12: each argument is one digit.
            self._tokens[self._at : self._at + 1] = [token[0], token[1:]]
        token = self._next()
        if token[0].isdigit():
            return sympy.Integer(token)
        if token[0].isalpha():
            return self._letter(token)
        if token.startswith("\\"):
            return self._command(token[1:])
        raise ValueError(f"{token!r} is no argument")

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        if not token:
            raise ValueError("the expression ends too soon")
        self._at += 1
        return token

    def _take(self, token: str) -> bool:
        if self._peek() != token:
            return False
        self._at += 1
        return True

    def _expect(self, token: str) -> None:
        if not self._take(token):
            raise ValueError(f"{token!r} is missing before {self._peek()!r}")


def _raised(value: Any, exponent: Any) -> Any:
    if exponent.is_Number and abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"exponent {exponent} is not computed; at most {MAX_EXPONENT}")
    return value**exponent


def _are_equal(left: Any, right: Any) -> bool:
    if isinstance(left, Group) != isinstance(right, Group):
        return False
    if not isinstance(left, Group):
        return _are_same_number(left, right)
    if (left.opening, left.closing) != (right.opening, right.closing):
        return False
    if len(left.items) != len(right.items):
        return False
    if left.opening in ("\\{", ""):  # a set, or a bare list of solutions
        return _are_equal_in_any_order(list(left.items), list(right.items))
    return all(map(_are_equal, left.items, right.items))


def _are_equal_in_any_order(left: list[Any], right: list[Any]) -> bool:
    for item in left:
        partner = next((other for other in right if _are_equal(item, other)), None)
        if partner is None:
            return False
        right.remove(partner)
    return True


def _are_same_number(left: Any, right: Any) -> bool:
    if any(value.has(sympy.zoo, sympy.nan) for value in (left, right)):
        return False  # a division by zero has no value
    if left == right:
        return True
    if left.is_Rational and right.is_Rational:
        return False
    return bool(sympy.simplify(left - right) == 0)
