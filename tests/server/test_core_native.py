"""/generate in its two forms and the small routes beside it, in front of the scripted engine."""

import asyncio
import itertools
import json
import threading

import pytest

from zipage_lang.frontend.outputs import RequestOutput
from zipage_lang.runtime.messages import LogprobEntry
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.server import held_states, service
from zipage_lang.server.held_states import HeldStates
from zipage_lang.server.native_wire import DeltaWriter

PROMPT = [30, 31, 32]  # the scripted engine says it again, and then the end of sequence


def events_of(response):
    assert response.status_code == 200, response.text
    *events, end = [line for line in response.text.split("\n\n") if line]
    assert end == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_an_answer_has_what_sglangs_clients_read(shared_app):
    body = {
        "input_ids": PROMPT,
        "rid": "mine",
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
        "sampling_params": {"max_new_tokens": 2, "stop": None, "no_such_field": 1},
    }

    answer = shared_app.post("/generate", body).json()
    info = answer["meta_info"]
    assert answer["output_ids"] == [30, 31]
    assert info["id"] == "mine"
    assert info["finish_reason"] == {"type": "length", "length": 2}
    assert (info["prompt_tokens"], info["completion_tokens"]) == (3, 2)
    assert info["output_token_logprobs"] == [[-0.5, 30, None], [-0.5, 31, None]]
    assert info["output_top_logprobs"] == [[[-0.5, 30, None]], [[-0.5, 31, None]]]
    assert info["input_token_logprobs"] == [[None, 30, None], [-1.0, 31, None], [-1.0, 32, None]]
    assert info["input_top_logprobs"] == [None, [], []]


def test_several_prompts_and_samples_are_answered_in_order(shared_app):
    body = {"input_ids": [[30], [31, 32]], "sampling_params": {"n": 2}}
    answers = shared_app.post("/generate", body).json()
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert [answer["output_ids"] for answer in answers] == [[30, 0]] * 2 + [[31, 32, 0]] * 2
    assert answers[0]["meta_info"]["finish_reason"] == {"type": "stop", "matched": 0}
    assert len({answer["meta_info"]["id"] for answer in answers}) == 2


def test_one_bad_prompt_of_several_ends_the_others(with_app, script):
    async def use(app):
        answer = await app.post("/generate", {"input_ids": [[script.STALL], [script.REFUSE]]})
        return answer, await app.service.llm.stats(), app.service.records

    answer, stats, records = with_app(use)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "refused: pool"
    assert stats["Abort"] == 1
    assert not records


def test_a_stream_is_cumulative_for_each_prompt(shared_app):
    events = events_of(shared_app.post("/generate", {"text": ["1", "22"], "stream": True}))
    for index in (0, 1):
        texts = [event["text"] for event in events if event["index"] == index]
        assert len(texts) > 1
        assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert texts[-1] == "22"


def test_deltas_add_up_to_the_whole(shared_app):
    body = {"input_ids": PROMPT, "sampling_params": {"n": 2, "logprobs": 1}}
    whole = shared_app.post("/generate", body).json()
    streams = {**body, "stream": True, "stream_format": "delta", "request_id": "r"}
    events = events_of(shared_app.post("/generate", streams))
    for index in (0, 1):
        mine = [event for event in events if event["sample_index"] == index]
        assert "".join(event["text_delta"] for event in mine) == whole[index]["text"]
        tokens = [token for event in mine for token in event["token_ids"]]
        assert tokens == whole[index]["output_ids"]
        entries = [entry for event in mine for entry in event["logprobs"]]
        assert [entry[0] for entry in entries] == tokens
        assert mine[-1]["finish_reason"] == "stop"
        assert mine[-1]["usage"]["completion_tokens"] == len(tokens)
    assert {event["request_id"] for event in events} == {"r"}


def test_a_request_may_be_aborted_by_id_by_group_and_with_all(with_app, script):
    async def use(app):
        ends = []
        for fields, abort in (
            ({"rid": "a"}, {"rid": "a"}),
            ({"group_id": "g"}, {"group_id": "g"}),
            ({}, {"abort_all": True}),
        ):
            body = {"input_ids": [script.SLOW, 30], "sampling_params": {"max_tokens": 10**6}}
            running = asyncio.create_task(app.post("/generate", {**body, **fields}))
            while not app.service.records:
                await asyncio.sleep(0.01)
            assert (await app.post("/abort_request", abort)).status_code == 200
            ends.append((await running).json()["meta_info"]["finish_reason"])
        return ends

    assert with_app(use) == [{"type": "abort"}] * 3


def test_release_reaches_the_engine(shared_app):
    shared_app.post("/generate", {"input_ids": PROMPT, "rid": "held", "hold": True})
    shared_app.post("/release", {"request_ids": ["held"]})
    assert shared_app.get("/server_info").json()["last_released"] == "held"


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"stream": True, "stream_format": "delta"}])
def test_what_is_held_has_a_lease_from_its_end_on(with_app, monkeypatch, body):
    monkeypatch.setattr(held_states, "LEASE_S", 0.05)

    async def use(app):
        await app.post("/generate", {"input_ids": PROMPT, "rid": "a", "hold": True, **body})
        await asyncio.sleep(0.2)
        return await app.service.llm.stats()

    assert with_app(use)["last_released"] == "a"


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"stream": True, "stream_format": "delta"}])
def test_what_never_came_to_its_end_has_no_lease(with_app, script, body):
    async def use(app):
        ask = {"input_ids": [script.STALL], "rid": "a", "hold": True, **body}
        running = asyncio.create_task(app.post("/generate", ask))
        while app.service.tables["held_leases"]() == 0:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        return app.service.tables["held_leases"]()

    assert with_app(use) == 0


def test_a_request_id_in_use_is_refused(with_app, script):
    async def use(app):
        stream = app.service.generate([script.SLOW, 30], SamplingParams(), request_id="a")
        await anext(stream)
        answer = await app.post("/generate", {"input_ids": PROMPT, "rid": "a"})
        still = await anext(stream)
        await stream.aclose()
        return answer, still

    answer, still = with_app(use)
    assert answer.status_code == 400
    assert "'a' is in use" in answer.json()["error"]["message"]
    assert still.token_ids == [30, 30]


def test_tokens_and_text_go_both_ways(shared_app):
    def post(path, body):
        return shared_app.post(path, body).json()

    tokens = post("/tokenize", {"prompt": "12+3=15"})
    plain = post("/tokenize", {"prompt": "12+3=15", "add_special_tokens": False})
    text = post("/detokenize", {"tokens": plain["tokens"]})
    chat = post("/tokenize", {"messages": [{"role": "user", "content": "12+3=15"}]})
    assert tokens["tokens"][1:] == plain["tokens"]
    assert tokens["count"] == len(tokens["tokens"])
    assert text == {"prompt": "12+3=15", "text": "12+3=15"}
    assert chat["tokens"][: tokens["count"]] == tokens["tokens"]


def test_a_tokenizer_at_work_on_much_does_not_hold_up_the_loop(with_app, monkeypatch):
    monkeypatch.setattr(service, "LONG_TEXT", 4)
    own, others = [], []

    async def use(app):
        tokenizer, loop_thread = app.service.llm.tokenizer, threading.get_ident()

        def watched(name):
            work = getattr(tokenizer, name)

            def noting(*arguments):
                (own if threading.get_ident() == loop_thread else others).append(name)
                return work(*arguments)

            return noting

        for name in ("encode", "decode", "files"):
            monkeypatch.setattr(tokenizer, name, watched(name))
        for size in (3, 4):
            await app.post("/tokenize", {"prompt": "1" * size})
            await app.post("/detokenize", {"tokens": [30] * size})
        await app.get("/tokenizer_files")

    with_app(use)
    assert own == ["encode", "decode"]
    assert others == ["encode", "decode", "files"]


def test_special_tokens_are_told_by_name(shared_app):
    info = shared_app.get("/tokenizer_info").json()
    assert info["eos_token"] == "<eos>"
    assert info["bos_token"] == "<bos>"
    assert "message.content" in info["chat_template"]


@pytest.mark.parametrize(
    ("path", "has_body"),
    [
        ("/health", False),
        ("/ready", False),
        ("/health_generate", False),
        ("/version", True),
        ("/server_info", True),
        ("/get_model_info", True),
    ],
)
def test_a_ready_server_says_so_everywhere(shared_app, path, has_body):
    response = shared_app.get(path)
    assert response.status_code == 200
    assert bool(response.content) == has_body


def test_the_model_may_be_served_under_another_name(with_app):
    async def use(app):
        return await app.get("/get_model_info")

    assert with_app(use, served_model_name="mine").json()["model"] == "mine"


def test_the_cache_is_flushed(shared_app):
    before = shared_app.get("/server_info").json().get("FlushCache", 0)
    assert shared_app.post("/flush_cache", {}).json()["FlushCache"] == before + 1


def test_the_openapi_document_tells_our_errors_and_not_fastapis(shared_app):
    document = shared_app.get("/openapi.json").json()
    generate = document["paths"]["/generate"]["post"]["responses"]
    assert {"200", "400", "401", "413", "429", "500", "503"} <= set(generate)
    assert "422" not in generate
    error = document["components"]["schemas"]["ErrorBody"]["properties"]["error"]
    assert error == {"$ref": "#/components/schemas/ErrorDetail"}
    assert "ErrorDetail" in document["components"]["schemas"]


def test_a_held_state_is_let_go_when_nobody_uses_it_for_long():
    async def work():
        released = []
        held = HeldStates(released.append, lease_s=0.2)
        for name in "abc":
            held.add(name)
        held.forget(["b"])
        await asyncio.sleep(0.1)
        held.renew("c")
        held.renew("never held")
        await asyncio.sleep(0.15)
        early = list(released)
        await asyncio.sleep(0.15)
        return early, released

    assert asyncio.run(work()) == ([["a"]], [["a"], ["c"]])


def test_every_sample_of_a_request_is_told_the_prompts_logprobs_once():
    writer = DeltaWriter("a", has_thinking=False)
    scored = [None, LogprobEntry(7, -0.5, 1, [])]

    def told(sample_index, num_tokens, prompt_logprobs):
        output = RequestOutput(
            request_id="a",
            prompt_token_ids=[5, 7],
            sample_index=sample_index,
            token_ids=[1] * num_tokens,
            prompt_logprobs=prompt_logprobs,
        )
        return writer.delta(output).prompt_logprobs

    assert told(1, 1, None) is None  # the engine tells them with sample 0's first output
    assert told(0, 1, scored) == scored
    assert told(1, 2, scored) == scored
    assert told(0, 2, scored) is None
    assert told(1, 3, scored) is None
