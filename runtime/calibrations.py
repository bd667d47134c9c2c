"""What policies want to know of the model, measured when a request first asks for such a policy.

Knows nothing of how it is measured or used.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from zipage_lang.kernels.backend import Forecast
from zipage_lang.runtime.out_of_memory import is_out_of_memory
from zipage_lang.runtime.policies.policy import Calibration, Policy, QueryStats

Measured = TypeVar("Measured")


class MeasuredOnce(Generic[Measured]):
    """A measurement, taken at the first `prepare`: it may take a minute and run the model."""

    def __init__(self, measure: Callable[[], Measured]) -> None:
        self._measure = measure
        self._found: Measured | None = None

    def prepare(self) -> None:
        """Raises ValueError, for the request that asked, where the device has no room for it."""
        if self._found is not None:
            return
        try:
            self._found = self._measure()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError(
                "this kv policy looks at the model's own text first, and the device has no memory "
                "left for that; run `zipage calibrate MODEL` once, or lower gpu_memory_share"
            ) from error

    def get(self) -> Measured:
        assert self._found is not None, "a policy that needs a calibration was not prepared for"
        return self._found


class Calibrations:
    """All that can be measured; a policy says by its attributes which of it it needs."""

    def __init__(
        self, query_stats: MeasuredOnce[QueryStats], forecast: MeasuredOnce[Forecast]
    ) -> None:
        self._query_stats, self._forecast = query_stats, forecast

    def prepare(self, policy: Policy) -> None:
        """Measure what this policy needs, if that was not done yet."""
        if _needs(policy, "query_stats"):
            self._query_stats.prepare()
        if _needs(policy, "forecast"):
            self._forecast.prepare()

    def of(self, policy: Policy) -> Calibration:
        """What was prepared for this policy."""
        return Calibration(
            self._query_stats.get() if _needs(policy, "query_stats") else None,
            self._forecast.get() if _needs(policy, "forecast") else None,
        )


def needs_calibration(policy: Policy) -> bool:
    """Whether `prepare` would measure anything for this policy."""
    return _needs(policy, "query_stats") or _needs(policy, "forecast")


def _needs(policy: Policy, what: str) -> bool:
    return bool(getattr(policy, f"needs_{what}", False))
