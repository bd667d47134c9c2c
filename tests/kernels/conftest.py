"""The device that a kernel test runs on, and other inputs on request.

With `--fresh-seed N` every generator that a kernel test seeds is seeded N further, so that what is
checked on a card is not only what was checked before. Knows nothing of any kernel.
"""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def fresh_inputs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Moves every seed; the session's one number is in pytest's header."""
    shift = request.config.getoption("--fresh-seed")
    if shift == 0:
        yield
        return

    class FreshGenerator(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            return super().manual_seed(seed + shift)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Generator", FreshGenerator)
        torch.manual_seed(shift)
        yield
