"""The `page` policy: whole pages go, by length of value over length of key (arXiv 2509.04377).

Knows nothing of queries or attention.
"""

import dataclasses

import torch
from torch import Tensor

from zipage_lang.runtime.policies.measures import CHOSEN, require
from zipage_lang.runtime.policies.policy import Scores, TailView


@dataclasses.dataclass(frozen=True)
class Page:
    """A page's score is the mean over its slots and the layer's heads of |v| / |k|.

    Source: PagedEviction, algorithms 1 and 2. Pages are `page_len` neighbouring slots of the tail;
    a layer's heads keep the same ones. The newest token's page, and those of the `num_fresh`
    newest, stay.

    Here: a block spans all layers and the scheduler fixes which blocks are freed by counting, so
    one layer's page can't be dropped by an edit of the block table. Pages behind K move into the
    dropped ones, whole where K and E are multiples of `page_len`: at most E slots move per head, as
    for any policy, and no other data.
    Reads: keys and values of the new tokens only; older scores are remembered.
    """

    name: str = "page"
    num_queries: int = 0
    num_recent: int = 0
    num_sinks: int = 0
    page_len: int = 16
    num_fresh: int = 16  # newest tokens whose pages stay whole

    def __post_init__(self) -> None:
        require(self, 1, 4096, "page_len")
        require(self, 0, 2**20, "num_fresh")

    def score(self, view: TailView) -> Scores:
        per_token = view.remembered(_value_over_key, vectors=3)
        is_fresh = view.positions >= (view.logical_lens - self.num_fresh)[:, None, None]
        per_token_and_layer = per_token.mean(1).masked_fill(~view.valid, 0.0)
        pages = self._sums(per_token_and_layer) / self._sums(view.valid.float()).clamp(min=1)
        fresh = self._sums((is_fresh[:, 0] & view.valid).float()) > 0
        pages = pages.masked_fill(fresh, CHOSEN)  # [num_rows, num_pages]
        spread = pages.repeat_interleave(self.page_len, dim=1)[:, : view.slots.shape[1]]
        return Scores(keep=spread[:, None].expand(view.positions.shape), history=per_token)

    def _sums(self, per_slot: Tensor) -> Tensor:
        """float32 [num_rows, max_tail] -> [num_rows, num_pages]."""
        missing = -per_slot.shape[1] % self.page_len
        padded = torch.nn.functional.pad(per_slot, (0, missing))
        return padded.unflatten(1, (-1, self.page_len)).sum(-1)


def _value_over_key(view: TailView) -> Tensor:
    return view.values().norm(dim=-1) / view.keys().norm(dim=-1).clamp(min=1e-12)
