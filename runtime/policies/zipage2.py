"""The `zipage2` policy: keep the newest, and what is likely to be looked at once more.

Knows nothing of queries, of blocks or of how slots are moved.
"""

import dataclasses

from zipage_lang.kernels.backend import ScoreTiers
from zipage_lang.runtime.policies.measures import require
from zipage_lang.runtime.policies.policy import TailView


@dataclasses.dataclass(frozen=True)
class Zipage2:
    """Ours. A share of the budget K goes to the newest tokens. Most of the rest goes to the highest
    forecasts of the strongest attention that any later token will pay,

        key weights * key before RoPE + value weights * value + age weight * log(1 + age),

    weights per layer and KV head; a last share by lots, one per token and head for good, so that a
    query which looks at nothing in particular still meets a sample of the text.

    What decides whether a token may go is not how much attention it gets but the one time it is
    needed: on reasoning text, an oracle that keeps the highest future maximum loses nothing at an
    eighth of the length, where one that keeps the highest future sum fails. The last few queries do
    not tell it, a token's own key and value do. So the weights are fitted, once per model, to the
    0.95 quantile of log(0.001 + that maximum) on text that the model itself writes
    (`runtime/forecast_fit.py`).

    All but the age never changes for a token, and is remembered as its global score.
    Reads: key and value of the tokens that are new since the last compaction. No queries: a request
    needs no query slot.
    """

    name: str = "zipage2"
    num_queries: int = 0
    num_recent: int = 32  # newest tokens that stay in any case
    num_sinks: int = 0
    recent_share: float = 0.15  # of the budget, where that is more
    lot_share: float = 0.2  # of what is left of it
    needs_forecast = True  # no parameter: has no annotation

    def __post_init__(self) -> None:
        require(self, 0, 1, "recent_share", "lot_share")

    def score(self, view: TailView) -> ScoreTiers:
        forecast, base = view.forecast_scores()
        return ScoreTiers(
            measures=(forecast,),
            shares=(1 - self.lot_share,),
            history=base,
            recent_share=self.recent_share,
            fresh=False,
        )
