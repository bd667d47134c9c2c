"""Rows under a grammar or watched thinking, while memory is refused: their text still fits."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_support.refusals import Refusals, RefusedMemory

from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams

PATTERN = "(red|blue) [0-9]{3}(, (red|blue) [0-9]{3}){2}"


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "one step ahead"])
def engine(request):
    options = {"num_blocks": 60, "num_threads": 1, "max_running": 8, "backend": "cpu"}
    return Engine(
        EngineConfig.from_options(model="zipage-tiny-reasoner", overlap=request.param, **options)
    )


def run(engine, refuse_at):
    """(token ids, errors) by request; `refuse_at`: step -> what is refused while it is launched."""
    launch, number = engine.runner.launch, iter(range(10**6))

    def launch_with_little_memory(plan):
        refusals = refuse_at.get(next(number))
        if refusals is None:
            return launch(plan)
        with RefusedMemory(refusals):
            return launch(plan)

    engine.runner.launch = launch_with_little_memory
    tokens, errors = {}, {}
    for index in range(4):
        sampling = SamplingParams(
            max_tokens=40, temperature=0.9, seed=index, regex=PATTERN if index < 3 else None
        )
        prompt = [5 + index, *range(20, 30)]
        engine.handle(AddRequest(request_id=f"r{index}", token_ids=prompt, sampling=sampling))
    try:
        while engine.has_work:
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
                if output.error is not None:
                    errors[output.request_id] = output.error
            engine.scheduler.check_invariants()
    finally:
        del engine.runner.launch
    return tokens, errors


def text_of(engine, token_ids):
    texts = engine._constraints._whole_vocabulary().texts  # of special tokens nothing
    return b"".join(texts[token] for token in token_ids).decode()


@pytest.fixture(scope="module")
def expected(engine):
    tokens, errors = run(engine, {})
    assert not errors
    texts = [text_of(engine, tokens[f"r{index}"]) for index in range(3)]
    assert all(re.fullmatch(PATTERN, text) for text in texts), texts
    return tokens


@settings(max_examples=6, deadline=None)
@given(
    step=st.integers(0, 35),
    first=st.integers(0, 300),
    count=st.sampled_from([1, 2, 4, 10**6]),
    length=st.integers(1, 3),
)
def test_constrained_rows_go_on_as_if_nothing_had_happened(
    engine, expected, step, first, count, length
):
    numbers = range(first, first + count)
    refused = {at: Refusals(numbers=numbers.__contains__) for at in range(step, step + length)}
    tokens, errors = run(engine, refused)
    for name, told in tokens.items():
        if name in errors:
            assert "out of memory" in errors[name]
            assert told == expected[name][: len(told)]
        else:
            assert told == expected[name]
    if count == 1 and length == 1:
        assert not errors
