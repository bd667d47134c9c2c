"""Compiles grammars for a vocabulary, with xgrammar, and says plainly what is wrong with one.

xgrammar is imported at first use: it takes seconds, and most engines never see a grammar.
Knows nothing of requests, rows or logits.
"""

import re
from collections.abc import Sequence
from typing import Any

from zipage_lang.runtime.grammar_source import GrammarSource
from zipage_lang.runtime.vocabulary import Vocabulary

MAX_COMPILED_BYTES = 256 * 2**20
_LOCATION = re.compile(r"^(\[[\d:]+\] )?(\S+\.(cc|h):\d+: )?(Check failed: \(.*?\) is \w+: )?")


class GrammarError(ValueError):
    """A grammar that can't be used; the message says what is wrong with it, and where."""


class GrammarCompiler:
    """Compiled grammars for one vocabulary. Safe to use from several threads at once."""

    def __init__(self, vocabulary: Vocabulary, eos_token_ids: Sequence[int]) -> None:
        import xgrammar

        texts = [
            b"" if token_id in vocabulary.special else piece
            for token_id, piece in enumerate(vocabulary.pieces)
        ]
        info = xgrammar.TokenizerInfo(
            texts,
            xgrammar.VocabType.RAW,
            vocab_size=len(texts),
            stop_token_ids=list(eos_token_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, source: GrammarSource) -> Any:
        """An xgrammar.CompiledGrammar. Raises GrammarError."""
        try:
            compiled = self._compile(source)
        except RuntimeError as error:
            raise GrammarError(f"bad {source.kind}: {_reason(error)}") from error
        if compiled.memory_size_bytes > MAX_COMPILED_BYTES:
            raise GrammarError(
                f"the {source.kind} takes {compiled.memory_size_bytes >> 20} MiB when compiled; at "
                f"most {MAX_COMPILED_BYTES >> 20} are allowed: make it simpler"
            )
        return compiled

    def _compile(self, source: GrammarSource) -> Any:
        if source.kind == "regex":
            return self._compiler.compile_regex(portable_regex(source.text))
        if source.kind == "ebnf":
            return self._compiler.compile_grammar(source.text)
        return self._compiler.compile_json_schema(
            source.text, any_whitespace=source.any_whitespace, strict_mode=True
        )


def new_matcher(compiled: Any) -> Any:
    """An xgrammar.GrammarMatcher at the start of a compiled grammar."""
    import xgrammar

    return xgrammar.GrammarMatcher(compiled)


def portable_regex(pattern: str) -> str:
    """The pattern with Python's meaning in xgrammar's dialect. Raises GrammarError.

    Python's `.` leaves newlines out, xgrammar's does not; anchors are kept at the two ends only.
    Classes such as \\d and \\w are ASCII ones.
    """
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise GrammarError(f"bad regex: {error}") from error
    parts, is_in_class, at = [], False, 0
    while at < len(pattern):
        part = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        if not is_in_class and part in ("^", "$") and not _is_at_end(pattern, at):
            raise GrammarError(
                f"bad regex: {part!r} at position {at} is only understood at the ends of the "
                "pattern, which has to match the whole answer anyway; remove it"
            )
        parts.append(r"[^\n]" if part == "." and not is_in_class else part)
        if part == "[" and not is_in_class:
            is_in_class = True
            lead = re.match(r"\^?\]?", pattern[at + 1 :])
            assert lead is not None
            parts.append(lead.group().replace("]", r"\]"))
            at += lead.end()
        elif part == "]":
            is_in_class = False
        at += len(part)
    return "".join(parts)


def _is_at_end(pattern: str, at: int) -> bool:
    return at == (0 if pattern[at] == "^" else len(pattern) - 1)


def _reason(error: RuntimeError) -> str:
    """xgrammar's message without the place in its own source."""
    return " ".join(_LOCATION.sub("", str(error).strip()).split())[:500]
