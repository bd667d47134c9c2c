"""A message whose handling breaks off: each of its samples has one end, whatever came of it."""

import pytest

from zipage_lang.runtime.messages import AddRequest, Fork
from zipage_lang.runtime.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def engine(make_tiny_model, driver):
    folder, _ = make_tiny_model("Llama", num_hidden_layers=1)
    return driver(folder)


def child(request_id, **sampling):
    return AddRequest(
        request_id=request_id, token_ids=[1, 2, 3, 4], sampling=SamplingParams(**sampling)
    )


@pytest.mark.parametrize("num_refused", [0, 1, 2])
def test_who_was_refused_already_is_not_refused_again(engine, monkeypatch, num_refused):
    """The scheduler refuses some of a Fork's children, takes one, and fails at the next."""
    names = [f"{num_refused}-{name}" for name in "abcd"]
    parent = AddRequest(
        request_id=f"{num_refused}-parent",
        token_ids=[1, 2, 3],
        sampling=SamplingParams(temperature=0, max_tokens=2),
        hold=True,
    )
    engine.engine.handle(parent)
    engine.finish()
    scheduler = engine.engine.scheduler
    fork = scheduler.fork

    def break_off(message):
        for request in message.children[:num_refused]:
            scheduler.refuse(request, "refused")
        taken = message.children[num_refused : num_refused + 1]
        fork(Fork(parent_id=message.parent_id, children=taken))
        raise KeyError("broke off")

    message = Fork(
        parent_id=f"{num_refused}-parent", children=[child(name, max_tokens=2) for name in names]
    )
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "fork", break_off)
        with pytest.raises(KeyError, match="broke off"):
            engine.engine.handle(message)
    engine.engine.refuse_lost(message, "lost")
    engine.finish()
    ends = {
        name: [output for output in engine.outputs[name, 0] if output.is_final] for name in names
    }
    assert [len(found) for found in ends.values()] == [1] * 4
    told = [found[0].error or found[0].finish_reason for found in ends.values()]
    wanted = ["refused"] * num_refused + ["length"] + ["lost"] * 4
    assert told == wanted[:4]
