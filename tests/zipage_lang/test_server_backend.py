"""Programs over HTTP: a tiny server in front of a scripted backend, by the documented wire."""

import asyncio
import re
import time

import msgspec
import pytest

import zipage_lang as zipage
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.testing import Reply, ScriptedBackend, StatefulBackend


class Spelling:
    """The scripted backend's tokenizer, as a client has it."""

    def __init__(self, backend):
        self._backend = backend

    def encode(self, text, add_special_tokens):
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids, skip_special_tokens):
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages, *, add_generation_prompt):
        return self._backend.render_chat(messages, add_generation_prompt=add_generation_prompt)


def events_of(backend, body):
    """The backend's outputs as the wire has them; its errors as error events."""
    place = {name: body[name] for name in ("request_id", "parent_id", "hold") if name in body}
    make = backend.generate_from if place else backend.generate
    outputs = make(
        body["input_ids"],
        msgspec.convert(body["sampling_params"], SamplingParams, str_keys=True),
        kv=msgspec.convert(body["kv"], KVParams),
        group_id=body["group_id"],
        **place,
    )
    told = {}
    while True:
        try:
            step = asyncio.run_coroutine_threadsafe(anext(outputs), backend.loop)
            output = step.result()
        except StopAsyncIteration:
            return
        except Exception as error:
            yield {"error": {"message": str(error), "code": 500}}
            return
        before = told.get(output.sample_index, 0)
        told[output.sample_index] = len(output.token_ids)
        yield msgspec.to_builtins(
            {
                "request_id": output.request_id,
                "sample_index": output.sample_index,
                "text_delta": output.text_delta,
                "token_ids": output.token_ids[before:],
                "logprobs": None if output.logprobs is None else output.logprobs[before:],
                "prompt_logprobs": output.prompt_logprobs,
                "thinking": output.thinking,
                "answer": output.answer,
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
                "usage": output.usage,
                "kv": output.kv,
            }
        )


@pytest.fixture
def connect(tiny_server):
    """A ServerBackend of a server that answers by this script."""

    def connect(script, **options):
        backend = StatefulBackend(script)
        tiny_server.routes |= {
            "/get_model_info": lambda _: {"model": "scripted", "eos_token_ids": [0]},
            "/generate": lambda body: events_of(backend, body),
            "/abort_request": lambda body: {},
            "/release": lambda body: {},
            "/flush_cache": lambda body: {"num_free": 7},
            "/server_info": lambda body: {"num_running": 0},
        }
        return zipage.ServerBackend(tiny_server.url, tokenizer=Spelling(backend), **options)

    return connect


@zipage.function
def talk(s):
    s += zipage.user("hi") + zipage.assistant(zipage.gen("a", stop=".", max_tokens=9))
    branches = s.fork(2)
    branches += lambda index: f"<{index}>" + zipage.gen("b", n=2)
    branches.join()
    s += zipage.select("c", ["x", "yy"])


def test_a_program_says_the_same_as_without_the_server(connect):
    script = {"assistant\n": "well. no", "<0>": "null", "<1>": "one", re.compile(""): "scored"}
    there = talk.run(backend=connect(script), seed=3)
    here = talk.run(backend=ScriptedBackend(script), seed=3)
    assert there.text() == here.text()
    assert there.token_ids() == here.token_ids()
    assert [there[name] for name in "abc"] == [here[name] for name in "abc"]
    assert there.meta("c").distribution == here.meta("c").distribution
    assert there.meta("a").usage == here.meta("a").usage


def test_only_what_differs_from_the_defaults_travels(connect, tiny_server):
    program = zipage.function(
        lambda s: s.append(
            "q" + zipage.gen("a", temperature=0.5, logit_bias={3: 1.5}, kv=zipage.KV(budget=64))
        )
    )
    state = program.run(backend=connect("yes", api_key="secret"), seed=1)
    assert state["a"] == "yes"
    (body,) = tiny_server.bodies("/generate")
    assert set(body["sampling_params"]) == {"temperature", "logit_bias", "seed"}
    assert body["kv"] == {"budget": 64, "protected_len": 1}
    assert body["group_id"].startswith("run-")
    assert {headers["Authorization"] for *_, headers in tiny_server.requests} == {"Bearer secret"}


def test_thinking_control_travels_and_its_parts_come_back(connect, tiny_server):
    think = zipage.ThinkParams(max_tokens=7)
    program = zipage.function(lambda s: s.append("q" + zipage.gen("a", think=think)))
    state = program.run(backend=connect("<think>hm</think>yes"))
    assert (state["a"], state.meta("a").thinking) == ("yes", "hm")
    assert tiny_server.bodies("/generate")[0]["sampling_params"]["think"]["max_tokens"] == 7


def test_states_are_held_and_started_from_over_the_wire(connect, tiny_server):
    program = zipage.function(lambda s: s.append("q" + zipage.gen("a") + "r" + zipage.gen("b")))
    program.run(backend=connect("yes"))
    first, second = tiny_server.bodies("/generate")
    assert first["hold"]
    assert second["parent_id"] == first["request_id"]


def test_an_error_of_the_stream_is_raised_where_the_value_is_read(connect):
    program = zipage.function(lambda s: s.append("q" + zipage.gen("a")))
    state = program.run(backend=connect(Reply("ab", error=RuntimeError("card on fire"))))
    with pytest.raises(zipage.ServerError, match="card on fire") as raised:
        state["a"]
    assert raised.value.retryable


def test_a_bad_request_is_a_value_error_and_overload_can_be_tried_again(connect, tiny_server):
    backend = connect("yes")
    program = zipage.function(lambda s: s.append("q" + zipage.gen("a")))
    tiny_server.routes["/generate"] = lambda body: (400, {"error": {"message": "prompt too long"}})
    with pytest.raises(ValueError, match="prompt too long"):
        program.run(backend=backend)["a"]
    tiny_server.routes["/generate"] = lambda body: (503, {"error": {"message": "busy"}})
    with pytest.raises(zipage.ServerError, match=r"busy.*503") as raised:
        program.run(backend=backend)["a"]
    assert raised.value.retryable


def test_a_stream_that_breaks_off_is_an_error(connect, tiny_server):
    backend = connect("yes")

    def broken(body):
        yield {"text_delta": "y", "token_ids": [123]}
        raise ConnectionResetError

    tiny_server.routes["/generate"] = broken
    program = zipage.function(lambda s: s.append("q" + zipage.gen("a")))
    with pytest.raises(zipage.ServerError, match="broke off") as raised:
        program.run(backend=backend)["a"]
    assert raised.value.retryable


def test_no_server_is_one_clear_error():
    with pytest.raises(zipage.ServerError, match="is the server up"):
        zipage.ServerBackend("http://127.0.0.1:9", tokenizer=Spelling(ScriptedBackend()))


def test_a_cancelled_run_tells_the_server(connect, tiny_server):
    @zipage.function
    def program(s):
        s += "q" + zipage.gen("a")
        raise KeyError("mine")

    with pytest.raises(KeyError):
        program.run(backend=connect(Reply("never", token_delay_s=0.2)))
    given_up_at = time.monotonic() + 10.0
    while not tiny_server.bodies("/abort_request") and time.monotonic() < given_up_at:
        time.sleep(0.01)
    assert tiny_server.bodies("/abort_request")[0]["group_id"].startswith("run-")


def test_the_server_can_be_asked_about_itself(connect):
    backend = connect("yes")
    assert zipage.flush_cache(backend) == {"num_free": 7}
    assert zipage.get_server_info(backend)["model"] == "scripted"


def test_the_tokenizer_comes_from_the_server(tiny_server):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    text = tokenizers.Tokenizer(model).to_str()
    config = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    files = {"tokenizer.json": text, "tokenizer_config.json": config}
    tiny_server.routes |= {
        "/get_model_info": lambda _: {"eos_token_ids": [2]},
        "/tokenizer_files": lambda _: {"files": files},
    }
    backend = zipage.ServerBackend(tiny_server.url)
    assert backend.encode("b", add_special_tokens=False) == [1]
    assert backend.eos_token_ids == {2}


def test_a_tokenizer_that_can_not_spell_is_refused(tiny_server):
    tiny_server.routes["/get_model_info"] = lambda _: {"eos_token_ids": [2]}
    with pytest.raises(ValueError, match="encode, decode and render_chat"):
        zipage.ServerBackend(tiny_server.url, tokenizer=object())
