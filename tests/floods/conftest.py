"""A small real engine that the floods go through, and its outputs.

Knows nothing of what is sent.
"""

import pytest

from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams


class Flooded:
    """An engine in this process, stepped by hand; `finals` by (request id, sample)."""

    def __init__(self, **options):
        options = {
            "model": "zipage-tiny-reasoner",
            "backend": "cpu",
            "num_threads": 1,
            "swap_space": 0.01,
            "max_model_len": 128,
            "num_blocks": 200,
            **options,
        }
        self.engine = Engine(EngineConfig.from_options(**options))
        self.finals = {}
        self.tokens = {}
        self.order_begun = []
        self.num_steps = 0

    def add(self, request_id, prompt=(5, 6), tenant="", **sampling):
        self.engine.handle(
            AddRequest(
                request_id=request_id,
                token_ids=list(prompt),
                sampling=SamplingParams(**{"ignore_eos": "regex" not in sampling, **sampling}),
                tenant=tenant,
            )
        )

    def step(self):
        for output in self.engine.step():
            key = (output.request_id, output.sample_index)
            assert key not in self.finals, f"{key}: an output behind the last one"
            if key not in self.tokens:
                self.order_begun.append(output.request_id)
            self.tokens.setdefault(key, []).extend(output.token_ids)
            if output.is_final:
                self.finals[key] = output
        self.num_steps += 1

    def finish(self):
        while self.engine.has_work:
            self.step()
        self.step()
        self.engine.scheduler.check_invariants()

    def error(self, request_id):
        return self.finals[request_id, 0].error


@pytest.fixture
def flooded():
    return Flooded
