"""From a message to requests: checks against the limits, defaults, seeds, one request per sample.

Knows nothing of what runs at the moment.
"""

import hashlib
import secrets
from collections.abc import Mapping

from zipage_lang.runtime.config import CompressionConfig
from zipage_lang.runtime.kv_params import KVSettings
from zipage_lang.runtime.limits import Limits
from zipage_lang.runtime.messages import MAX_MESSAGE_BYTES, AddRequest
from zipage_lang.runtime.request import Request, RequestRefused
from zipage_lang.runtime.sampling_params import SamplingParams

LOGPROB_BYTES, TOP_BYTES = 24, 15  # a token's entry in a message, and each likeliest one's, at most


def sample_seed(seed: int, sample_index: int) -> int:
    """The seed of one of a request's samples: its own stream, the same on every run."""
    if sample_index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


class Intake:
    """Makes requests, or raises RequestRefused with the limit and the fix named."""

    def __init__(
        self,
        compression: CompressionConfig,
        limits: Limits,
        block_size: int,
        policy_queries: Mapping[str, int],
    ) -> None:
        self._compression = compression
        self._limits = limits
        self._block_size = block_size
        self._policy_queries = policy_queries
        self._arrivals = 0

    def make_requests(self, message: AddRequest) -> list[Request]:
        """One request per sample; the first is the leader that computes the prompt."""
        self._check_tokens(message.token_ids, message.sampling)
        kv = self._compression.resolve(message.kv, len(message.token_ids))
        self._check_policy(kv)
        self._check_fits(message, kv)
        if message.hold and message.sampling.n > 1:
            raise RequestRefused(f"hold works with one sample, not n={message.sampling.n}; use n=1")
        seed = message.sampling.seed
        root = secrets.randbits(63) if seed is None else seed
        return [self._make(message, kv, root, index) for index in range(message.sampling.n)]

    def _make(self, message: AddRequest, kv: KVSettings, root: int, index: int) -> Request:
        self._arrivals += 1
        return Request(
            request_id=message.request_id,
            sample_index=index,
            arrival=self._arrivals,
            # Samples share one list until they start: n of a long prompt would be n copies.
            token_ids=message.token_ids if index else list(message.token_ids),
            num_prompt_tokens=len(message.token_ids),
            sampling=message.sampling,
            seed=sample_seed(root, index),
            kv=kv,
            end_len=min(
                len(message.token_ids) + message.sampling.max_tokens, self._limits.max_model_len
            ),
            needs_queries=kv.compacts and self._policy_queries[kv.policy] > 0,
            query_line=kv.protected_len + kv.max_tail_len - self._limits.window,
            namespace=message.namespace,
            priority=message.priority,
            group_id=message.group_id,
            hold=message.hold,
        )

    def _check_tokens(self, token_ids: list[int], sampling: SamplingParams) -> None:
        if not token_ids:
            raise RequestRefused("the prompt has no tokens; give at least one")
        longest = self._limits.max_model_len - 1
        if len(token_ids) > longest:
            raise RequestRefused(
                f"the prompt has {len(token_ids)} tokens, but max_model_len="
                f"{self._limits.max_model_len} leaves room for {longest}; shorten it"
            )
        self._check_vocabulary("the prompt", token_ids)
        self._check_vocabulary("logit_bias", list(sampling.logit_bias or {}))
        self._check_vocabulary("stop_token_ids", sampling.stop_token_ids)
        self._check_prompt_logprobs(len(token_ids), sampling)

    def _check_prompt_logprobs(self, num_prompt_tokens: int, sampling: SamplingParams) -> None:
        """They go to the client in one message, which has a limit."""
        if sampling.prompt_logprobs is None:
            return
        entry_bytes = LOGPROB_BYTES + sampling.prompt_logprobs * TOP_BYTES
        wanted = num_prompt_tokens - sampling.prompt_logprobs_start
        most = MAX_MESSAGE_BYTES // 2 // entry_bytes
        if wanted > most:
            raise RequestRefused(
                f"prompt_logprobs={sampling.prompt_logprobs} of {wanted} prompt tokens are over "
                f"what is sent at once, {most} tokens; raise prompt_logprobs_start, or ask for less"
            )

    def _check_vocabulary(self, what: str, token_ids: list[int]) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._limits.vocab_size):
            wrong = next(t for t in token_ids if not 0 <= t < self._limits.vocab_size)
            raise RequestRefused(
                f"{what} has token id {wrong}, outside the vocabulary of {self._limits.vocab_size}"
            )

    def _check_policy(self, kv: KVSettings) -> None:
        if not kv.compacts:
            return
        if kv.mode == "adaptive" and self._limits.deterministic:
            raise RequestRefused(
                "kv mode 'adaptive' compacts when others need memory, and this engine is "
                "deterministic; use mode 'fixed' or 'off'"
            )
        try:
            is_known = kv.policy in self._policy_queries
        except ValueError as error:  # known, but not with these parameters
            raise RequestRefused(str(error)) from error
        if not is_known:
            known = ", ".join(sorted(self._policy_queries))
            raise RequestRefused(f"unknown kv policy {kv.policy!r}; known: {known}")
        if kv.policy == "full":
            raise RequestRefused("kv policy 'full' keeps every token; use it with mode='off'")

    def _check_fits(self, message: AddRequest, kv: KVSettings) -> None:
        """What could never fit even alone in the pool is refused now, not starved later."""
        needed = self.most_blocks(len(message.token_ids), message.sampling.max_tokens, kv)
        if needed > self._limits.num_blocks:
            raise RequestRefused(
                f"the request may need {needed} KV blocks of {self._block_size} tokens, but the "
                f"pool has {self._limits.num_blocks}; lower max_tokens or the kv budget, use kv "
                "mode 'fixed', or give the engine more kv_cache_memory"
            )

    def most_blocks(self, num_prompt_tokens: int, max_tokens: int, kv: KVSettings) -> int:
        """Blocks a request holds at the most when it is alone in the pool.

        The last drawn token is never computed. A bounded request may overshoot by one block while
        it gathers queries, and needs one more to copy a shared, partly filled block.
        """
        total = min(num_prompt_tokens + max_tokens, self._limits.max_model_len) - 1
        whole = -(-total // self._block_size)
        if not kv.compacts:
            return whole
        bounded = -(-(kv.protected_len + kv.max_tail_len) // self._block_size)
        return min(whole, bounded + 1) + 1
