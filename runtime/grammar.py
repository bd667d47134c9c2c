"""Compiles grammars for a vocabulary, with xgrammar, and says plainly what is wrong with one.

xgrammar is imported at first use: it takes seconds, and most engines never see a grammar. Its parts
are imported by name, since a worker has only some of them (`light_xgrammar`).
Knows nothing of requests, rows or logits.
"""

import contextlib
import json
import random
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from zipage_lang.runtime.grammar_source import GrammarSource
from zipage_lang.runtime.lark_grammar import lark_to_ebnf
from zipage_lang.runtime.regex_dialect import portable_regex

MAX_COMPILED_BYTES = 128 * 2**20
TRIAL_WALKS, TRIAL_LEN = 3, 40  # random outputs that a grammar is tried out on, and their tokens
MAX_TRIAL_STEP_S = 0.1  # CPU time for the mask of one token and for taking it
# A rule's name in EBNF that xgrammar wrote, outside of its strings and character classes.
_RULE_NAME = re.compile(r'("(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\])|\broot(_\w+)?')
_PLAIN_VALUES = ("const", "enum", "default", "examples")  # of a schema: no schemas themselves
_LOCATION = re.compile(r"^(\[[\d:]+\] )?(\S+\.(cc|h):\d+: )?(Check failed: \(.*?\) is \w+: )?")


class GrammarError(ValueError):
    """A grammar that can't be used; the message says what is wrong with it, and where."""


class GrammarTooCostly(GrammarError):
    """The grammar met a bound: it would again."""


class GrammarCompiler:
    """Compiled grammars for one vocabulary. Safe to use from several threads at once."""

    def __init__(self, texts: Sequence[bytes], eos_token_ids: Sequence[int]) -> None:
        from xgrammar.compiler import GrammarCompiler as Compiler

        info = _tokenizer_info(texts, eos_token_ids)
        self._compiler = Compiler(info, max_threads=1, cache_enabled=False)

    def compile(self, source: GrammarSource) -> Any:
        """An xgrammar.CompiledGrammar. Raises GrammarError."""
        try:
            compiled = self._compile(source)
        except RuntimeError as error:
            raise GrammarError(f"bad {source.kind}: {_reason(error)}") from error
        if compiled.memory_size_bytes > MAX_COMPILED_BYTES:
            raise GrammarTooCostly(
                f"the {source.kind} takes {compiled.memory_size_bytes >> 20} MiB when compiled; at "
                f"most {MAX_COMPILED_BYTES >> 20} are allowed: make it simpler"
            )
        return compiled

    def _compile(self, source: GrammarSource) -> Any:
        if source.kind == "regex":
            return self._compiler.compile_regex(_portable(source.text))
        if source.kind == "ebnf":
            return self._compiler.compile_grammar(source.text)
        if source.kind == "lark":
            return self._compiler.compile_grammar(lark_ebnf(source.text))
        if source.kind == "structural_tag":
            tag = json.dumps(tight_schemas(json.loads(source.text)), ensure_ascii=False)
            return self._compiler.compile_structural_tag(tag)
        schema = json.dumps(portable_patterns(json.loads(source.text)), ensure_ascii=False)
        return self._compiler.compile_json_schema(
            schema, any_whitespace=source.any_whitespace, strict_mode=True
        )


class GrammarReader:
    """Makes compiled grammars of what a compiler for the same vocabulary has written."""

    def __init__(self, texts: Sequence[bytes], eos_token_ids: Sequence[int]) -> None:
        self._info = _tokenizer_info(texts, eos_token_ids)

    def read(self, data: bytes) -> Any:
        """An xgrammar.CompiledGrammar."""
        from xgrammar.compiler import CompiledGrammar

        return CompiledGrammar.deserialize_json(data.decode(), self._info)


def compiled_data(compiled: Any) -> bytes:
    """The compiled grammar for a GrammarReader."""
    return str(compiled.serialize_json()).encode()


def new_matcher(compiled: Any) -> Any:
    """An xgrammar.GrammarMatcher at the start of a compiled grammar."""
    from xgrammar.matcher import GrammarMatcher

    return GrammarMatcher(compiled)


def try_out(compiled: Any, kind: str) -> None:
    """Follow a few random outputs. Raises GrammarTooCostly where a single token takes too long.

    Masks are made between two steps of an engine, while all its requests wait.
    """
    from tvm_ffi import from_dlpack
    from xgrammar import base

    core: Any = base.__dict__["_core"]  # its own matcher wants torch, which a worker has not
    rng = random.Random(0)
    num_words = -(-compiled.tokenizer_info.vocab_size // 32)
    bits = np.zeros((1, num_words), dtype=np.int32)
    shared = from_dlpack(bits)
    for _ in range(TRIAL_WALKS):
        matcher = core.GrammarMatcher(compiled._handle, None, False, -1)
        for place in range(TRIAL_LEN):
            started = time.thread_time()
            matcher.fill_next_token_bitmask(shared, 0, False)
            token_id = _random_token(bits[0], rng)
            if token_id is None or not matcher.accept_token(token_id, False):
                break
            if time.thread_time() - started > MAX_TRIAL_STEP_S:
                raise GrammarTooCostly(
                    f"the {kind} can be read in too many ways: token {place} of an output took "
                    f"over {MAX_TRIAL_STEP_S} s; make it less ambiguous"
                )
            if matcher.is_terminated():
                break


def _random_token(words: np.ndarray, rng: random.Random) -> int | None:
    """One of the allowed tokens; None where there is none."""
    (places,) = np.nonzero(words)
    if not len(places):
        return None
    place = int(places[rng.randrange(len(places))])
    word = int(words[place]) & 0xFFFFFFFF
    bit = rng.choice([bit for bit in range(32) if word >> bit & 1])
    return place * 32 + bit


def _tokenizer_info(texts: Sequence[bytes], eos_token_ids: Sequence[int]) -> Any:
    from xgrammar.tokenizer_info import TokenizerInfo, VocabType

    return TokenizerInfo(
        list(texts), VocabType.RAW, vocab_size=len(texts), stop_token_ids=list(eos_token_ids)
    )


def lark_ebnf(text: str) -> str:
    """A Lark grammar as EBNF. Raises GrammarError."""
    try:
        return lark_to_ebnf(text, regex_rules)
    except GrammarError:
        raise
    except ValueError as error:
        raise GrammarError(f"bad lark: {error}") from error


def regex_rules(pattern: str, name: str) -> str:
    """EBNF rules, of which `name` matches what the pattern matches. Raises GrammarError."""
    from xgrammar.grammar import Grammar

    try:
        rules = str(Grammar.from_regex(_portable(pattern)))
    except RuntimeError as error:
        raise GrammarError(f"bad regex /{pattern}/: {_reason(error)}") from error
    return _RULE_NAME.sub(lambda m: m[1] or name + (m[2] or ""), rules)


def _portable(pattern: str) -> str:
    try:
        return portable_regex(pattern)
    except ValueError as error:
        raise GrammarError(f"bad regex: {error}") from error


def portable_patterns(schema: Any) -> Any:
    """A copy of a JSON schema, its patterns in xgrammar's dialect where Python can read them."""
    if isinstance(schema, list):
        return [portable_patterns(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    written = {
        key: part if key in _PLAIN_VALUES else portable_patterns(part)
        for key, part in schema.items()
    }
    if isinstance(written.get("pattern"), str):
        with contextlib.suppress(ValueError):  # JavaScript's own: left for xgrammar to judge
            written["pattern"] = portable_regex(written["pattern"])
    return written


def tight_schemas(tag: Any) -> Any:
    """A copy of a structural tag whose JSON schemas allow no whitespace but `json.dumps`'s."""
    if isinstance(tag, list):
        return [tight_schemas(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    is_schema = tag.get("type") == "json_schema" and tag.get("style", "json") == "json"
    if is_schema and isinstance(tag.get("json_schema"), (dict, bool)):
        return {"type": "grammar", "grammar": _schema_ebnf(tag["json_schema"])}
    return {key: tight_schemas(part) for key, part in tag.items()}


def _schema_ebnf(schema: Any) -> str:
    from xgrammar.grammar import Grammar

    text = json.dumps(portable_patterns(schema), ensure_ascii=False)
    return str(Grammar.from_json_schema(text, any_whitespace=False, strict_mode=True))


def _reason(error: RuntimeError) -> str:
    """xgrammar's message without the place in its own source."""
    return " ".join(_LOCATION.sub("", str(error).strip()).split())[:500]
