"""Makes the constraints of outputs: vocabulary, compiled grammars and tag tables, kept for reuse.

`prepare` may take long and runs in a thread of its own; `make` is quick.
Knows nothing of requests, rows or logits.
"""

import copy
import dataclasses
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from zipage_lang.runtime.constraint import Constraint
from zipage_lang.runtime.grammar import (
    GrammarError,
    GrammarReader,
    GrammarTooCostly,
    new_matcher,
)
from zipage_lang.runtime.grammar_pool import GrammarPool
from zipage_lang.runtime.grammar_source import GrammarSource
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.think_params import ThinkParams
from zipage_lang.runtime.think_state import ThinkState
from zipage_lang.runtime.think_tags import ThinkTags
from zipage_lang.runtime.vocabulary import Vocabulary

MAX_CACHE_BYTES = 256 * 2**20  # of compiled grammars that nobody uses at the moment
MAX_BYTES = 1024 * 2**20  # of all compiled grammars
MAX_TAGS = 64  # tables of tags; a request's caps need none of their own
MAX_REFUSED, REFUSED_FOR_S = 256, 60.0  # grammars that ran into a bound, and for how long it counts


class Constraints:
    """What constrained outputs of one model share."""

    def __init__(
        self, load_vocabulary: Callable[[], Vocabulary], eos_token_ids: Sequence[int]
    ) -> None:
        """load_vocabulary: called at the first use; its ValueErrors reach the requests."""
        self._load_vocabulary = load_vocabulary
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()  # around the tables, never while compiling
        self._loading = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._compilers: tuple[GrammarPool, GrammarReader] | None = None
        self._refused: OrderedDict[GrammarSource, tuple[float, str]] = OrderedDict()
        self._grammars: OrderedDict[GrammarSource, Any] = OrderedDict()  # least recently used first
        self._num_users: Counter[GrammarSource] = Counter()
        self._tags: OrderedDict[ThinkParams, ThinkTags] = OrderedDict()

    def is_prepared(self, sampling: SamplingParams) -> bool:
        """Whether `make` could be called now."""
        with self._lock:
            has_tags = sampling.think is None or _tags_key(sampling.think) in self._tags
            return has_tags and (sampling.grammar is None or sampling.grammar in self._grammars)

    def prepare(self, sampling: SamplingParams) -> None:
        """Compile what `make` needs. Raises ValueError with what is wrong, and where."""
        vocabulary = self._whole_vocabulary()
        if sampling.think is not None:
            self._tags_of(sampling.think, vocabulary)
        if sampling.grammar is not None and not self.is_prepared(sampling):
            self._keep(sampling.grammar, self._compile(sampling.grammar, vocabulary))

    def hold(self, sampling: SamplingParams) -> bool:
        """A request begins: what it needs stays until it is let go. False where it has just had to
        give way to others."""
        with self._lock:
            if sampling.grammar is not None:
                if sampling.grammar not in self._grammars:
                    return False
                self._grammars.move_to_end(sampling.grammar)
                self._num_users[sampling.grammar] += 1
            return True

    def let_go(self, sampling: SamplingParams) -> None:
        """A request has ended."""
        with self._lock:
            if sampling.grammar is not None:
                self._num_users[sampling.grammar] -= 1
            self._evict(MAX_CACHE_BYTES)

    def table_sizes(self) -> dict[str, int]:
        """Entries of the caches, by name."""
        with self._lock:
            return {
                "grammars": len(self._grammars),
                "grammar_users": len(self._num_users),
                "think_tags": len(self._tags),
            }

    def make(self, sampling: SamplingParams, output: Sequence[int]) -> Constraint | None:
        """The constraint of an output that has drawn `output` so far; None where it is free.

        Quick where `prepare` and `hold` were called for the same sampling.
        """
        if not sampling.is_constrained:
            return None
        if not self.is_prepared(sampling):
            self.prepare(sampling)
        assert self._vocabulary is not None, "no vocabulary, yet a constraint was prepared"
        think, grammar = sampling.think, sampling.grammar
        tags = None if think is None else self._tags_of(think, self._vocabulary)
        with self._lock:
            matcher = None if grammar is None else new_matcher(self._grammars[grammar])
        constraint = Constraint(
            None if tags is None else ThinkState(tags),
            matcher,
            eos_token_ids=self._eos_token_ids,
            held_back=(*self._eos_token_ids, *sampling.stop_token_ids),
            min_tokens=sampling.min_tokens,
            vocab_size=len(self._vocabulary.pieces),
        )
        for token_id in output:
            constraint.accept(token_id)
        return constraint

    def _tags_of(self, params: ThinkParams, vocabulary: Vocabulary) -> ThinkTags:
        """The tables of the request's tags, with its own caps. Others may drop them from the table
        at any time, never from who has them."""
        key = _tags_key(params)
        with self._lock:
            tags = self._tags.get(key)
        if tags is None:
            tags = ThinkTags(key, vocabulary)
        with self._lock:
            tags = self._tags.setdefault(key, tags)
            self._tags.move_to_end(key)
            while len(self._tags) > MAX_TAGS:
                self._tags.popitem(last=False)
        own = copy.copy(tags)
        own.params = params
        return own

    def _compile(self, source: GrammarSource, vocabulary: Vocabulary) -> Any:
        """In a process of its own. What ran into a bound just now is not tried again."""
        with self._lock:
            until, error = self._refused.get(source, (0.0, ""))
        if time.monotonic() < until:
            raise GrammarError(error)
        pool, reader = self._whole_compilers(vocabulary)
        try:
            return reader.read(pool.compile(source))
        except GrammarTooCostly as error:
            with self._lock:
                self._refused[source] = (time.monotonic() + REFUSED_FOR_S, str(error))
                while len(self._refused) > MAX_REFUSED:
                    self._refused.popitem(last=False)
            raise

    def _keep(self, source: GrammarSource, compiled: Any) -> None:
        with self._lock:
            in_use = (self._grammars[used].memory_size_bytes for used in +self._num_users)
            self._evict(MAX_BYTES - compiled.memory_size_bytes - sum(in_use))
            num_bytes = sum(kept.memory_size_bytes for kept in self._grammars.values())
            if num_bytes + compiled.memory_size_bytes > MAX_BYTES:
                raise GrammarError(
                    f"the grammars in use take {num_bytes >> 20} MiB, and this one "
                    f"{compiled.memory_size_bytes >> 20} of the {MAX_BYTES >> 20} that there are; "
                    "try again later"
                )
            self._grammars.setdefault(source, compiled)

    def _evict(self, max_unused_bytes: int) -> None:
        """Least recently used first, until what is left unused is small enough."""
        unused = [source for source in self._grammars if self._num_users[source] == 0]
        num_bytes = sum(self._grammars[source].memory_size_bytes for source in unused)
        for source in unused:
            if num_bytes <= max_unused_bytes:
                break
            num_bytes -= self._grammars.pop(source).memory_size_bytes
        self._num_users = +self._num_users

    def _whole_vocabulary(self) -> Vocabulary:
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._load_vocabulary()
            return self._vocabulary

    def _whole_compilers(self, vocabulary: Vocabulary) -> tuple[GrammarPool, GrammarReader]:
        if not self._eos_token_ids:
            raise ValueError(
                "the model names no end-of-sequence token, so an answer that is complete could not "
                "end; use a model whose config.json has eos_token_id"
            )
        with self._loading:
            if self._compilers is None:
                pool = GrammarPool(vocabulary.texts, self._eos_token_ids)
                pool.start_one()  # gets ready while the reader does
                reader = GrammarReader(vocabulary.texts, self._eos_token_ids)
                self._compilers = pool, reader
            return self._compilers


def _tags_key(params: ThinkParams) -> ThinkParams:
    """What the tables depend on: not on how long a request may think."""
    return dataclasses.replace(params, max_tokens=None, min_tokens=0, starts_inside=False)
