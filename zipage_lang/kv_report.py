"""What one call, or all calls of a state, kept and dropped of the KV cache.

Knows nothing of requests, states or how a policy chooses.
"""

import dataclasses
from collections.abc import Sequence

from zipage_lang.runtime.messages import KVUsage


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVReport:
    """What `s.kv(name)` and `s.kv()` give. Lengths are slots per (layer, KV head).

    Of `logical_len` tokens `kept_len` are resident after the (last) call and `missing_len` are not,
    whoever dropped them; `max_kept_len` is the most that was resident at once; the first
    `protected_len` are never dropped. `num_compactions`, `num_dropped` and `num_recomputed` count
    what these calls themselves did, summed over `num_calls` of them.

    Parameters: as above. Errors: none.

    >>> state = zipage.function(lambda s: s.append("Q" + zipage.gen("a"))).run()
    >>> state.kv("a").missing_len, state.kv().num_calls
    (0, 1)
    """

    num_calls: int = 0
    logical_len: int = 0
    kept_len: int = 0
    max_kept_len: int = 0
    protected_len: int = 0
    num_compactions: int = 0
    num_dropped: int = 0
    num_recomputed: int = 0

    @property
    def missing_len(self) -> int:
        """Tokens of which no slot is left to attend to."""
        return self.logical_len - self.kept_len

    def and_then(self, later: "KVReport") -> "KVReport":
        """The report of these calls and later ones of the same state."""
        if later.num_calls == 0:
            return self
        return KVReport(
            num_calls=self.num_calls + later.num_calls,
            logical_len=later.logical_len,
            kept_len=later.kept_len,
            max_kept_len=max(self.max_kept_len, later.max_kept_len),
            protected_len=later.protected_len,
            num_compactions=self.num_compactions + later.num_compactions,
            num_dropped=self.num_dropped + later.num_dropped,
            num_recomputed=self.num_recomputed + later.num_recomputed,
        )


def report_of(usages: Sequence[KVUsage]) -> KVReport:
    """One call's report. Of several samples the first goes on, so the lengths are its; work adds
    up.
    """
    first = usages[0]
    return KVReport(
        num_calls=1,
        logical_len=first.logical_len,
        kept_len=first.resident_len,
        max_kept_len=max(usage.max_resident_len for usage in usages),
        protected_len=first.protected_len,
        num_compactions=sum(usage.compactions for usage in usages),
        num_dropped=sum(usage.dropped for usage in usages),
        num_recomputed=sum(usage.recomputed for usage in usages),
    )
