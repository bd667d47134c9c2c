"""Of a body's wrong parts the first is told: to note each of a million would take all memory."""

import typing

import pydantic
import pytest
from pydantic import BaseModel, BeforeValidator

from zipage_lang.server import app
from zipage_lang.server.bodies import FirstWrong
from zipage_lang.server.config import ServerConfig
from zipage_lang.server.native_routes import MAX_RELEASED, ReleaseRequest
from zipage_lang.server.native_wire import GenerateRequest
from zipage_lang.server.openai.chat_request import ChatRequest
from zipage_lang.server.openai.completion_request import CompletionRequest
from zipage_lang.server.openai.responses_request import ResponsesRequest
from zipage_lang.server.service import Service
from zipage_lang.server.tokenizer_routes import DetokenizeRequest, TokenizeRequest

NUM = 1000
USER = {"role": "user", "content": "a"}
CALLED = {"role": "assistant", "tool_calls": [0] * NUM}
WRONG = [
    (ChatRequest, {"messages": [0] * NUM}),
    (ChatRequest, {"messages": [{"role": "user", "content": [0] * NUM}]}),
    (ChatRequest, {"messages": [CALLED] * NUM}),
    (ChatRequest, {"messages": [USER], "stop": [0] * NUM}),
    (ChatRequest, {"messages": [USER], "stop_token_ids": [""] * NUM}),
    (ChatRequest, {"messages": [USER], "guided_choice": [0] * NUM}),
    (ChatRequest, {"messages": [USER], "logit_bias": {str(i): "" for i in range(NUM)}}),
    (CompletionRequest, {"prompt": [None] * NUM}),
    (CompletionRequest, {"prompt": [[""] * NUM] * 3}),
    (CompletionRequest, {"prompt": [*[1] * NUM, 1.5]}),
    (ResponsesRequest, {"input": [0] * NUM}),
    (ResponsesRequest, {"input": [{"content": [0] * NUM}] * NUM}),
    (ResponsesRequest, {"input": [{"output": [0] * NUM}] * NUM}),
    (ResponsesRequest, {"input": "a", "metadata": {str(i): 0 for i in range(NUM)}}),
    (GenerateRequest, {"text": [0] * NUM}),
    (GenerateRequest, {"input_ids": [""] * NUM}),
    (GenerateRequest, {"input_ids": [[""] * NUM] * NUM}),
    (TokenizeRequest, {"messages": [0] * NUM}),
    (DetokenizeRequest, {"tokens": [""] * NUM}),
    (ReleaseRequest, {"request_ids": [0] * NUM}),
]


@pytest.mark.parametrize(("model", "body"), WRONG)
def test_the_first_wrong_part_is_told_and_no_other(model, body):
    with pytest.raises(pydantic.ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() <= 3  # one for each kind that a field may be of
    assert caught.value.errors()[0]["loc"][0] == list(body)[-1]


def body_models():
    """Of all routes that take a body, and of what stands in them."""
    service = Service(ServerConfig(), None)
    routers = [each.make_router(service) for each in vars(app).values() if is_routes(each)]
    endpoints = [route.endpoint for router in routers for route in router.routes]
    new = set(models_in(tuple(kind for each in endpoints for kind in hints_of(each))))
    found = set()
    while new:
        model = new.pop()
        found.add(model)
        new |= set(models_in(tuple(hints_of(model)))) - found
    return found


def is_routes(module):
    return hasattr(module, "make_router")


def hints_of(what):
    return typing.get_type_hints(what, include_extras=True).values()


def models_in(kind):
    parts = kind if isinstance(kind, tuple) else typing.get_args(kind)
    models = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
    return models + [model for part in parts for model in models_in(part)]


def unbounded(kind, marks=()):
    """The lists and dicts in a field's type whose wrong parts would all be noted."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if hasattr(kind, "__metadata__"):
        return unbounded(parts[0], kind.__metadata__)
    if origin is typing.Literal:
        return []
    is_checked = any(isinstance(mark, (FirstWrong, BeforeValidator)) for mark in marks)
    needs_check = origin is list or (origin is dict and parts[1] is not typing.Any)
    own = [kind] if needs_check and not is_checked else []
    return own + [found for part in parts for found in unbounded(part)]


def test_every_list_and_object_of_every_body_ends_at_its_first_wrong_part():
    models = body_models()
    assert {model for model, _ in WRONG} <= models
    for model in models:
        for name, kind in typing.get_type_hints(model, include_extras=True).items():
            assert not unbounded(kind), f"{model.__name__}.{name}"


@pytest.mark.parametrize(
    ("kind", "num_found"),
    [
        (list[int], 1),
        (dict[str, float] | None, 1),
        (dict[str, typing.Any] | list[str], 1),
        (list[dict[str, int]], 2),
        (typing.Literal["a"], 0),
    ],
)
def test_the_search_finds_what_it_is_for(kind, num_found):
    assert len(unbounded(kind)) == num_found


def test_more_states_than_a_step_has_time_for_are_not_let_go_at_once(shared_app):
    assert shared_app.post("/release", {"request_ids": ["a"] * MAX_RELEASED}).status_code == 200
    answer = shared_app.post("/release", {"request_ids": ["a"] * (MAX_RELEASED + 1)})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "request_ids"
