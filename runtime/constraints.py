"""Makes the constraints of outputs: vocabulary, compiled grammars and tag tables, kept for reuse.

`prepare` may take long and runs in a thread of its own; `make` is quick.
Knows nothing of requests, rows or logits.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from zipage_lang.runtime.constraint import Constraint
from zipage_lang.runtime.grammar import GrammarCompiler, new_matcher
from zipage_lang.runtime.grammar_source import GrammarSource
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.think_params import ThinkParams
from zipage_lang.runtime.think_state import ThinkState
from zipage_lang.runtime.think_tags import ThinkTags
from zipage_lang.runtime.vocabulary import Vocabulary

MAX_CACHE_BYTES = 512 * 2**20  # of compiled grammars that nobody uses at the moment
MAX_TAGS = 64


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
        self._compiler: GrammarCompiler | None = None
        self._grammars: OrderedDict[GrammarSource, Any] = OrderedDict()  # least recently used first
        self._num_users: Counter[GrammarSource] = Counter()
        self._tags: OrderedDict[ThinkParams, ThinkTags] = OrderedDict()

    def is_prepared(self, sampling: SamplingParams) -> bool:
        """Whether `make` could be called now."""
        with self._lock:
            has_tags = sampling.think is None or sampling.think in self._tags
            return has_tags and (sampling.grammar is None or sampling.grammar in self._grammars)

    def prepare(self, sampling: SamplingParams) -> None:
        """Compile what `make` needs. Raises ValueError with what is wrong, and where."""
        vocabulary = self._whole_vocabulary()
        if sampling.think is not None:
            tags = ThinkTags(sampling.think, vocabulary)
            with self._lock:
                self._tags.setdefault(sampling.think, tags)
                while len(self._tags) > MAX_TAGS:
                    self._tags.popitem(last=False)
        if sampling.grammar is not None and not self.is_prepared(sampling):
            compiled = self._whole_compiler(vocabulary).compile(sampling.grammar)
            with self._lock:
                self._grammars.setdefault(sampling.grammar, compiled)

    def hold(self, sampling: SamplingParams) -> None:
        """A request begins: what it needs stays until it is let go."""
        with self._lock:
            if sampling.grammar is not None:
                self._grammars.move_to_end(sampling.grammar)
                self._num_users[sampling.grammar] += 1

    def let_go(self, sampling: SamplingParams) -> None:
        """A request has ended."""
        with self._lock:
            if sampling.grammar is not None:
                self._num_users[sampling.grammar] -= 1
            self._evict()

    def make(self, sampling: SamplingParams, output: Sequence[int]) -> Constraint | None:
        """The constraint of an output that has drawn `output` so far; None where it is free.

        Quick where `prepare` and `hold` were called for the same sampling.
        """
        if not sampling.is_constrained:
            return None
        if not self.is_prepared(sampling):
            self.prepare(sampling)
        with self._lock:
            think = None if sampling.think is None else ThinkState(self._tags[sampling.think])
            grammar = sampling.grammar
            matcher = None if grammar is None else new_matcher(self._grammars[grammar])
        assert self._vocabulary is not None, "no vocabulary, yet a constraint was prepared"
        constraint = Constraint(
            think,
            matcher,
            eos_token_ids=self._eos_token_ids,
            held_back=(*self._eos_token_ids, *sampling.stop_token_ids),
            min_tokens=sampling.min_tokens,
            vocab_size=len(self._vocabulary.pieces),
        )
        for token_id in output:
            constraint.accept(token_id)
        return constraint

    def _evict(self) -> None:
        """Least recently used first, until what is left unused is small enough."""
        unused = [source for source in self._grammars if self._num_users[source] == 0]
        num_bytes = sum(self._grammars[source].memory_size_bytes for source in unused)
        for source in unused:
            if num_bytes <= MAX_CACHE_BYTES:
                break
            num_bytes -= self._grammars.pop(source).memory_size_bytes
        self._num_users = +self._num_users

    def _whole_vocabulary(self) -> Vocabulary:
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._load_vocabulary()
            return self._vocabulary

    def _whole_compiler(self, vocabulary: Vocabulary) -> GrammarCompiler:
        if not self._eos_token_ids:
            raise ValueError(
                "the model names no end-of-sequence token, so an answer that is complete could not "
                "end; use a model whose config.json has eos_token_id"
            )
        with self._loading:
            if self._compiler is None:
                self._compiler = GrammarCompiler(vocabulary, self._eos_token_ids)
            return self._compiler
