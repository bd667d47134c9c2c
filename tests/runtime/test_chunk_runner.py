"""What a step holds on to while it draws: the drawing tokens' states, and no others."""

import json
import weakref

import pytest
from test_support.tiny_shape import TINY_SHAPE

from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams

PROMPT_LEN = 30


@pytest.fixture
def engine(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY_SHAPE))
    return Engine(
        EngineConfig.from_options(
            model=str(tmp_path), load_format="dummy", backend="cpu", num_threads=1, num_blocks=20
        )
    )


@pytest.mark.parametrize("num_scored", [None, 0, 2])
def test_states_of_a_prompt_are_gone_when_tokens_are_drawn(engine, monkeypatch, num_scored):
    """Memory is measured at the start without a scored prompt, so its states may not stay."""
    runner = engine.runner._chunks
    forward, draw = runner._model.forward, runner._sampler.draw
    made, seen = [], []

    def watched_forward(*arguments):
        hidden = forward(*arguments)
        made.append((len(hidden), weakref.ref(hidden)))
        return hidden

    def watched_draw(logits, rows):
        seen.append([ref() is None for _, ref in made])
        return draw(logits, rows)

    monkeypatch.setattr(runner._model, "forward", watched_forward)
    monkeypatch.setattr(runner._sampler, "draw", watched_draw)
    sampling = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=num_scored)
    prompt = [1 + place % 40 for place in range(PROMPT_LEN)]
    engine.handle(AddRequest(request_id="one", token_ids=prompt, sampling=sampling))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [output.error for output in outputs if output.error] == []
    assert made[0][0] == (1 if num_scored is None else PROMPT_LEN)
    assert seen
    assert all(all(gone) for gone in seen)
