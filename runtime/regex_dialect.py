"""Python's regexes in xgrammar's dialect, with Python's meaning.

Known differences: xgrammar's `.` takes newlines in; anchors are only understood at the two ends;
empty alternatives and named groups are not read; and of xgrammar 0.2.2 a repetition of nothing but
a repetition, such as (a{2}){1,3}, matches what it should not, so that each counted repetition is
written with its first turn apart: (aa{1})(?:aa{1}){0,2}. Classes such as \\d are ASCII ones.
Knows nothing of tokens or of how grammars are compiled.
"""

import re

MAX_WRITTEN_LEN = 256 * 1024  # counted repetitions inside others double at each level
_PART = re.compile(
    r"""(?P<escape>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.))
    |(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])
    |(?P<open>\((?:\?:|\?P<\w+>)?)
    |(?P<count>\{(?P<low>\d*)(?P<comma>,?)(?P<high>\d*)\}\??)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_WRITTEN_OUT = {"\n": r"\n", "\r": r"\r", "\t": r"\t", ".": r"[^\n]", "{": r"\{", "}": r"\}"}


def portable_regex(pattern: str) -> str:
    """The pattern for xgrammar. Raises ValueError with what is wrong, and where."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from error
    return _Writer(pattern).write()


class _Writer:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._parts: list[str] = []
        self._atom_start = 0  # in parts: what a repetition that comes now repeats
        self._groups: list[int] = []  # where the open ones start

    def write(self) -> str:
        for match in _PART.finditer(self._pattern):
            self._add(match)
            if sum(map(len, self._parts[self._atom_start :])) > MAX_WRITTEN_LEN:
                raise ValueError(f"the repetitions up to position {match.end()} are too many")
        self._fill_empty(("|",))
        return "".join(self._parts)

    def _add(self, match: re.Match[str]) -> None:
        text = match.group()
        if match["count"] and (match["low"] or match["high"] or match["comma"]):
            self._repeat(match)
        elif match["open"]:
            self._groups.append(len(self._parts))
            self._parts.append("(" if text.startswith("(?P") else text)
        elif text == ")":
            self._fill_empty(("|",))
            self._atom_start = self._groups.pop()
            self._parts.append(text)
        elif text == "|":
            self._fill_empty(("|", "(", "(?:", ""))
            self._parts.append(text)
        elif text in ("*", "+", "?"):
            self._parts.append(text)
        else:
            self._add_atom(match)

    def _add_atom(self, match: re.Match[str]) -> None:
        text = match.group()
        if text in ("^", "$"):
            is_at_end = match.start() == (0 if text == "^" else len(self._pattern) - 1)
            if not is_at_end:
                raise ValueError(
                    f"{text!r} at position {match.start()} is only understood at the ends of the "
                    "pattern, which has to match the whole answer anyway; remove it"
                )
            return
        self._atom_start = len(self._parts)
        if match["set"]:
            text = re.sub(r"^(\[\^?)\]", r"\1\\]", text)
            text = "".join(_WRITTEN_OUT[c] if c in "\n\r\t" else c for c in text)
        self._parts.append(_WRITTEN_OUT.get(text, text))

    def _repeat(self, match: re.Match[str]) -> None:
        """X{n,m} as X X{n-1,m-1}, or as (?:X X{0,m-1})? where n is 0."""
        atom = "".join(self._parts[self._atom_start :])
        low = int(match["low"] or 0)
        high = low if not match["comma"] else int(match["high"]) if match["high"] else None
        rest = None if high is None else max(0, high - 1)
        if high == 0:
            written = "()"
        elif low == 0:
            written = f"(?:{atom}{_counted(atom, 0, rest)})?"
        else:
            written = atom + _counted(atom, low - 1, rest)
        self._parts[self._atom_start :] = [written]

    def _fill_empty(self, before: tuple[str, ...]) -> None:
        """Write an empty alternative out."""
        if (self._parts[-1] if self._parts else "") in before:
            self._parts.append("()")


def _counted(atom: str, low: int, high: int | None) -> str:
    if high == 0:
        return ""
    if high is None:
        return f"{atom}{{{low},}}" if low else f"{atom}*"
    return f"{atom}{{{low},{high}}}"
