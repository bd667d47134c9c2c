"""One request's life: its tokens, how many are computed, where it stands, why it ended.

Knows nothing of steps, queues or tensors; block tables are held, never changed, here.
"""

import dataclasses
import enum
import time

from zipage_lang.radix_cache.block_table import BlockTable, SwappedTable
from zipage_lang.runtime.fair_share import Account
from zipage_lang.runtime.kv_params import KVSettings
from zipage_lang.runtime.messages import KVUsage, LogprobEntry, Usage
from zipage_lang.runtime.sampling_params import SamplingParams


class RequestRefused(ValueError):
    """A request that the engine will not take; the message names the limit and the fix."""


class Status(enum.Enum):
    WAITING = "waiting"  # queued; may already hold blocks (a branch) or host blocks (swapped)
    RUNNING = "running"  # has a row
    COMPACTING = "compacting"  # has a row, sits out until its compaction is done
    FOLLOWING = "following"  # a sample that waits for its leader's prefill
    HELD = "held"  # ended, state kept for Fork until Release or until memory is short
    ENDED = "ended"


@dataclasses.dataclass(frozen=True, slots=True)
class SwappedState:
    """A state in host memory."""

    host_ids: tuple[int, ...]
    table: SwappedTable


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One sample of one AddRequest.

    Lower (round of its tenant, priority, turn, arrival) takes precedence. Without several tenants
    all are of one round; among those of one tenant it decides nothing.
    """

    request_id: str
    sample_index: int
    arrival: int
    token_ids: list[int]  # known tokens: prompt, then what was drawn
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    kv: KVSettings
    end_len: int  # known tokens at which it ends by count
    needs_queries: bool  # whether its policy scores with queries at all
    query_line: int  # resident length that it may not pass without a query slot, if it needs one
    namespace: str = ""
    priority: int = 0
    group_id: str = ""
    hold: bool = False
    account: Account = dataclasses.field(default_factory=Account)  # its tenant's

    status: Status = Status.WAITING
    row: int | None = None
    table: BlockTable | None = None
    swapped: SwappedState | None = None
    followers: "list[Request]" = dataclasses.field(
        default_factory=list
    )  # samples awaiting the prefill
    turn: int = 0  # grows with what it draws; changes only while it is in no queue
    queued_since: float | None = dataclasses.field(default_factory=time.monotonic)  # None: it ran
    skips: int = 0  # times a later request was admitted before it (lpm)
    is_charged: bool = False  # its tenant has paid for its prompt; what it draws counts as it comes
    num_pending: int = 0  # tokens being drawn by steps whose result has not come back
    is_prefilled: bool = False  # its whole prompt is computed and may be shared through the tree
    is_stalled: bool = False  # found no block in the last step: goes in with the decodes next time
    came_back_len: int = -1  # logical_len as it last came back from host memory

    query_slot: int | None = None
    query_slot_since: int = 0  # logical length when the slot was taken: older queries are not in it
    stateful_len: int = 0  # leading tail slots that carry state from a compaction
    last_compaction_at: int = 0  # logical length at the last compaction

    num_thinking_tokens: int = 0  # leading output tokens
    num_cached_tokens: int = 0
    max_computed_len: int = (
        0  # most tokens ever computed: what is computed again counts as recomputed
    )
    num_recomputed: int = 0
    compactions: int = 0
    dropped: int = 0
    max_resident_len: int = 0
    last_kv: KVUsage = dataclasses.field(
        default_factory=KVUsage
    )  # as of the end, when the table is gone
    prompt_logprobs: list[LogprobEntry | None] = dataclasses.field(default_factory=list)

    @property
    def precedence(self) -> tuple[int, int, int, int]:
        return (self.account.round, self.priority, self.turn, self.arrival)

    @property
    def own_precedence(self) -> tuple[int, int, int]:
        """Among the requests of its tenant."""
        return (self.priority, self.turn, self.arrival)

    @property
    def num_uncharged(self) -> int:
        """Known tokens that its tenant has not been charged with yet; samples share one prompt."""
        if self.is_charged or self.sample_index > 0:
            return 0
        return len(self.token_ids) - self.logical_len

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def logical_len(self) -> int:
        """Tokens computed so far."""
        return 0 if self.table is None else self.table.logical_len

    @property
    def resident_len(self) -> int:
        return 0 if self.table is None else self.table.resident_len

    @property
    def tail_len(self) -> int:
        """Resident slots that may be dropped; negative while protected ones are not computed."""
        return self.resident_len - self.kv.protected_len

    @property
    def num_uncomputed(self) -> int:
        """Tokens no step has computed yet, known or being drawn: 1 is a decode, more a prefill."""
        return len(self.token_ids) + self.num_pending - self.logical_len

    @property
    def is_compacted(self) -> bool:
        return self.table is not None and self.table.is_compacted

    @property
    def signature(self) -> str | None:
        """Which compacted nodes of the tree this request may continue from or leave behind."""
        return self.kv.signature() if self.kv.compacts else None

    @property
    def max_reusable_len(self) -> int:
        """Known tokens whose KV may come from elsewhere: the last is always computed, and so are
        those from which prompt logprobs are still wanted."""
        longest = len(self.token_ids) - 1
        if self.first_wanted_logprob is None:
            return longest
        return min(longest, self.first_wanted_logprob - 1)

    @property
    def first_wanted_logprob(self) -> int | None:
        """The first prompt token whose logprob is still to be found; None when there is none."""
        if self.sampling.prompt_logprobs is None or self.sample_index > 0:
            return None
        first = max(self.sampling.prompt_logprobs_start, len(self.prompt_logprobs), 1)
        return first if first < self.num_prompt_tokens else None

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            cached_tokens=min(self.num_cached_tokens, self.num_prompt_tokens),
            thinking_tokens=self.num_thinking_tokens,
        )

    def kv_usage(self) -> KVUsage:
        table = self.table
        if table is None:
            return self.last_kv
        return KVUsage(
            logical_len=table.logical_len,
            resident_len=table.resident_len,
            max_resident_len=self.max_resident_len,
            protected_len=min(self.kv.protected_len, table.resident_len),
            compactions=self.compactions,
            dropped=self.dropped,
            recomputed=self.num_recomputed,
        )
