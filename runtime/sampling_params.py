"""How to sample one request: every field, its range, and its validation.

Knows nothing of tensors, tokenizers or the engine.
"""

import dataclasses
import math
from typing import Any

from zipage_lang.runtime.documented import documented
from zipage_lang.runtime.grammar_source import (
    GrammarSource,
    canonical_schema,
    canonical_tag,
    check_grammar_text,
    check_nesting,
)
from zipage_lang.runtime.strict_fields import strict_fields
from zipage_lang.runtime.think_params import ThinkParams

MAX_LOGPROBS = 20
MAX_SAMPLES = 1024
MAX_STOPS = 10_000
MAX_STOP_CHARACTERS = 64 * 1024  # of all stop strings: each takes a place in an automaton
MAX_TOKENS_NAMED = 1024  # stop tokens, or biased ones: looked through or sent at each step
MAX_INT = 2**31 - 1


@strict_fields("sampling field")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of one request.

    Parameters: the fields below. Errors: ValueError (value and fix named) for an unknown field, one
    out of range, or two that do not go together.

    >>> zipage.SamplingParams(temperature=0, max_tokens=16).replace(n=2).n
    2
    """

    max_tokens: int = documented(128, "output tokens at most")
    min_tokens: int = documented(
        0, "no end-of-sequence, stop token or stop string before this many output tokens"
    )
    temperature: float = documented(1.0, "0 is greedy")
    top_p: float = documented(
        1.0, "smallest set of tokens whose probability reaches this; 1 is off"
    )
    top_k: int = documented(0, "only the k likeliest tokens; 0 is off")
    min_p: float = documented(
        0.0, "drop tokens under this share of the likeliest token's probability"
    )
    repetition_penalty: float = documented(
        1.0, "> 1 divides (or multiplies) the logits of tokens already seen"
    )
    presence_penalty: float = documented(0.0, "subtracted once from tokens already generated")
    frequency_penalty: float = documented(0.0, "subtracted per occurrence among generated tokens")
    seed: int | None = documented(None, "None: the engine draws one")
    stop: str | list[str] = documented(
        "", "strings that end the output; they are cut from the text"
    )
    stop_token_ids: list[int] = documented(help="tokens that end the output", factory=list)
    ignore_eos: bool = documented(False, "go on behind the end-of-sequence token")
    n: int = documented(1, "samples from one prefill")
    logprobs: int | None = documented(
        None, "k: the drawn token's logprob and those of the k likeliest"
    )
    prompt_logprobs: int | None = documented(None, "the same for each prompt token")
    prompt_logprobs_start: int = documented(
        0, "first prompt token they are wanted for; what is before may be cached"
    )
    logit_bias: dict[int, float] | None = documented(None, "token id -> added to its logit")
    skip_special_tokens: bool = documented(True, "leave special tokens out of the text")
    regex: str | None = documented(None, "the whole answer matches it (Python's syntax)")
    json_schema: str | dict[str, Any] | bool | None = documented(
        None, "the answer is JSON that it accepts"
    )
    json_any_whitespace: bool = documented(False, "False: one line, as json.dumps writes it")
    ebnf: str | None = documented(None, "the answer is derived from its rule `root` (GBNF)")
    lark: str | None = documented(
        None, "the answer is derived from its rule `start` (Lark, without templates)"
    )
    structural_tag: str | dict[str, Any] | None = documented(
        None, "the answer mixes text, tags and grammars as it says (xgrammar's structural tags)"
    )
    think: ThinkParams | None = documented(
        None, "watch and bound thinking; grammars hold for the answer only"
    )

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 1)
        _whole("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower it"
            )
        _real("temperature", self.temperature, 0.0, 100.0)
        _real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ValueError("top_p=0 keeps no token; use temperature=0 for greedy")
        _whole("top_k", self.top_k, -1)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("repetition_penalty", self.repetition_penalty, 1e-3, 100.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        self._check_stops()
        _whole("n", self.n, 1, MAX_SAMPLES)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _whole("prompt_logprobs_start", self.prompt_logprobs_start, 0)
        self._check_logit_bias()
        self._check_grammar()
        if self.think is not None and not isinstance(self.think, ThinkParams):
            raise ValueError(f"think={self.think!r:.80} must be a ThinkParams or None")

    @property
    def grammar(self) -> GrammarSource | None:
        """What the answer must match; None where it is free."""
        if self.regex is not None:
            return GrammarSource("regex", self.regex)
        if self.ebnf is not None:
            return GrammarSource("ebnf", self.ebnf)
        if self.lark is not None:
            return GrammarSource("lark", self.lark)
        if self.structural_tag is not None:
            return GrammarSource("structural_tag", str(self.structural_tag))
        if self.json_schema is not None:
            return GrammarSource("json_schema", str(self.json_schema), self.json_any_whitespace)
        return None

    @property
    def is_constrained(self) -> bool:
        """Whether which tokens may be drawn depends on those drawn before."""
        return self.think is not None or self.grammar is not None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, whichever way they were given."""
        if isinstance(self.stop, str):
            return (self.stop,) if self.stop else ()
        return tuple(self.stop)

    def replace(self, **changes: Any) -> "SamplingParams":
        """A copy with `changes` applied and validated."""
        return dataclasses.replace(self, **changes)

    def _check_stops(self) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) for s in stops):
            raise ValueError(f"stop={self.stop!r:.80} must be a string or a list of strings")
        if not isinstance(self.stop, str) and "" in stops:
            raise ValueError("stop contains an empty string, which would match at once; remove it")
        _at_most("stop has {} strings", len(stops), MAX_STOPS)
        _at_most("stop has {} characters in all", sum(map(len, stops)), MAX_STOP_CHARACTERS)
        if not isinstance(self.stop_token_ids, (list, tuple)):
            raise ValueError(
                f"stop_token_ids={self.stop_token_ids!r:.80} must be a list of token ids"
            )
        _at_most("stop_token_ids has {} tokens", len(self.stop_token_ids), MAX_TOKENS_NAMED)
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0)

    def _check_grammar(self) -> None:
        """Also writes the schema as a text, its one form from here on."""
        names = ("regex", "json_schema", "ebnf", "lark", "structural_tag")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} can't be combined; give one of them")
        if not isinstance(self.json_any_whitespace, bool):
            raise ValueError(
                f"json_any_whitespace={self.json_any_whitespace!r} must be True or False"
            )
        for name in ("regex", "ebnf", "lark"):
            if getattr(self, name) is not None:
                check_nesting(name, check_grammar_text(name, getattr(self, name)))
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", canonical_schema(self.json_schema))
        if self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", canonical_tag(self.structural_tag))
        if given and self.ignore_eos:
            raise ValueError(
                f"ignore_eos=True can't be combined with {given[0]}: an answer that is complete "
                "ends with the end of sequence"
            )

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            raise ValueError(f"logit_bias={self.logit_bias!r:.80} must map token ids to numbers")
        _at_most("logit_bias has {} tokens", len(self.logit_bias), MAX_TOKENS_NAMED)
        for token_id, bias in self.logit_bias.items():
            _whole("logit_bias token id", token_id, 0)
            _real(f"logit_bias[{token_id}]", bias, -100.0, 100.0)


def _whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    """A whole number from low to high; without a bound of its own at most what 32 bits hold."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be a whole number")
    if value < low or value > (MAX_INT if high is None else high):
        is_open = high is None and value < low
        bound = f"at least {low}" if is_open else f"from {low} to {high or MAX_INT}"
        raise ValueError(f"{name}={value} must be {bound}")


def _at_most(what: str, count: int, most: int) -> None:
    if count > most:
        raise ValueError(f"{what.format(count)}; at most {most} are allowed: give fewer")


def _real(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}={value!r} must be a number")
    if not math.isfinite(value) or not low <= value <= high:
        raise ValueError(f"{name}={value} must be a finite number from {low:g} to {high:g}")
