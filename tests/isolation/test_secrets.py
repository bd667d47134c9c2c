"""Many clients with secrets in their prompts, at once, in a pool that is far too small for them.

Each answer is what the client gets alone, and nobody sees another's secret anywhere.
"""

import asyncio
import logging
import string

import pytest

NUM_SECRETS = 3  # of each client
SMALL = {"num_blocks": 20, "swap_space": 0.001, "max_running": 6}


def secret(client, number):
    """Twelve letters that no model writes by itself."""
    letters = string.ascii_lowercase
    start = 7 * client + 3 * number
    return "".join(letters[(start + 5 * index + index * index) % 26] for index in range(12))


def bodies(client):
    for number in range(NUM_SECRETS):
        text = f"{secret(client, number)} " * 4 + "0123456789 " * number
        params = {"max_tokens": 24, "temperature": 0.0, "logprobs": 2, "prompt_logprobs": 0}
        yield {"text": text, "sampling_params": {**params, "ignore_eos": True}}


async def tell(caller, client):
    """A client's answers and what it is refused: whole, streamed, echoed, and in errors."""
    told = []
    for number, body in enumerate(bodies(client)):
        body |= {"rid": f"r{number}", "group_id": "g", "stream": number % 2 == 1}
        told.append((await caller.post("/generate", body)).text)
    name = secret(client, 0)
    wrong = [
        {"text": name * 400},
        {"text": name, "sampling_params": {"regex": f"({name}"}},
        {"text": name, "parent_id": name, "sampling_params": {"max_tokens": 10**9}},
        {"text": name, "kv": {"policy": name, "mode": "fixed"}},
    ]
    refused = [await caller.post("/generate", body) for body in wrong]
    assert {response.status_code for response in refused} == {400}
    return told, [response.text for response in refused]


async def outputs(caller, client):
    """Tokens and log-probabilities, as numbers."""
    found = []
    for body in bodies(client):
        answer = (await caller.post("/generate", body)).json()
        scored = answer["meta_info"]["output_token_logprobs"]
        found.append((answer["output_ids"], [round(logprob, 3) for logprob, *_ in scored]))
    return found


def callers_of(server):
    return [server.anna, server.bert, server.cleo]


@pytest.fixture(scope="module")
def alone(with_real_server):
    """What each client gets on an engine that serves one request at a time."""

    async def use(server):
        return [await outputs(caller, i) for i, caller in enumerate(callers_of(server))]

    return with_real_server(use)


def test_under_pressure_everybody_gets_what_they_get_alone(with_real_server, alone):
    async def use(server):
        calls = [outputs(caller, i) for i, caller in enumerate(callers_of(server))]
        again = [outputs(caller, i) for i, caller in enumerate(callers_of(server))]
        found = await asyncio.gather(*calls, *again)
        return found, await server.stats()

    found, stats = with_real_server(use, engine=SMALL)
    assert stats["num_swap_outs"] + stats["num_preemptions"] > 0, "there was no pressure"
    assert found == [*alone, *alone]


def test_nobody_sees_anothers_secret_anywhere(with_real_server, caplog, capfd):
    """Answers, errors, metrics, the live page's data, the operator's info, both processes' logs."""
    caplog.set_level(logging.DEBUG, logger="zipage")

    async def use(server):
        looking = [
            server.operator.get(path) for path in ("/metrics", "/dashboard/data", "/server_info")
        ]
        calls = [tell(caller, i) for i, caller in enumerate(callers_of(server))]
        *told, metrics, page, info = await asyncio.gather(*calls, *looking)
        last = [await server.operator.get(path) for path in ("/metrics", "/dashboard/data")]
        return told, [each.text for each in (metrics, page, info, *last)]

    told, public = with_real_server(use, engine=SMALL, log_requests=True)
    texts = ["".join(answers + refused) for answers, refused in told]
    logs = caplog.text + "".join(str(vars(record)) for record in caplog.records)
    shown = capfd.readouterr()
    for client in range(3):
        for number in range(NUM_SECRETS):
            name = secret(client, number)
            others = [text for i, text in enumerate(texts) if i != client]
            assert not [text for text in (*others, *public) if name in text]
            assert name * 2 not in logs + shown.out + shown.err
            assert f"{name} {name}" not in logs + shown.out + shown.err
