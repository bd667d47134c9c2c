"""Cached prefixes: what another tenant has sent changes nothing of an answer, nor what it costs.

Costs are counted in tokens that the engine computed, never in seconds.
"""

import asyncio

import pytest
from test_support.simulation import Simulation, World

from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams

LOGPROBS = {"logprobs": 3, "prompt_logprobs": 3}
LEN, BLOCKS = 100, 96  # of a prompt, and what its whole blocks of 16 hold


def prompt(number):
    """A prompt that no other test's begins like."""
    return [20 + number, *(20 + index % 7 for index in range(LEN - 1))]


async def cost(server, caller, token_ids, **fields):
    """(what is told of the request, prompt tokens that the engine computed for it)."""
    before = (await server.stats())["num_prefilled_tokens"]
    told = await caller.generate(token_ids, **fields)
    told["meta_info"].pop("e2e_latency")
    told["meta_info"].pop("id")
    return told, (await server.stats())["num_prefilled_tokens"] - before


def cached(told):
    return told[0]["meta_info"]["cached_tokens"]


async def same_prompt(server):
    alone = await cost(server, server.anna, prompt(0), sampling=LOGPROBS)
    berts = await cost(server, server.bert, prompt(0), sampling=LOGPROBS)
    return alone, berts, await cost(server, server.anna, prompt(0))


async def salts(server):
    await cost(server, server.anna, prompt(1), cache_salt="a")
    asked = ({}, {"cache_salt": "b"}, {"cache_salt": "a"})
    return [cached(await cost(server, server.anna, prompt(1), **salt)) for salt in asked]


async def at_once(server):
    computed = []
    callers = ((server.anna, server.bert), (server.cleo, server.cleo))
    for number, pair in enumerate(callers, 2):
        before = (await server.stats())["num_prefilled_tokens"]
        await asyncio.gather(*(caller.generate(prompt(number)) for caller in pair))
        computed.append((await server.stats())["num_prefilled_tokens"] - before)
    return computed


async def foreign_parent(server):
    await server.anna.generate(prompt(4), rid="h", hold=True)
    berts = await cost(server, server.bert, prompt(4), parent_id="h")
    annas = await cost(server, server.anna, prompt(4), parent_id="h")
    await server.bert.post("/release", {"request_ids": ["h"]})
    held = [(await server.stats())["num_held_requests"]]
    await server.anna.post("/release", {"request_ids": ["h"]})
    held.append((await server.stats())["num_held_requests"])
    return cached(berts), cached(annas), held


@pytest.fixture(scope="module")
def seen(with_real_server):
    """What each of the scenes above saw, one after the other on one server."""
    scenes = (same_prompt, salts, at_once, foreign_parent)

    async def use(server):
        return {scene.__name__: await scene(server) for scene in scenes}

    return with_real_server(use)


def test_what_another_has_sent_makes_no_answer_cheaper_or_other(seen):
    """Content and cost are those of an engine that never saw the prompt; one's own cache works."""
    alone, berts, annas = seen["same_prompt"]
    assert berts == alone
    assert alone[1] == LEN
    assert (cached(alone), cached(annas)) == (0, BLOCKS)
    assert annas[1] == LEN - BLOCKS


def test_salts_part_the_requests_of_one_key_further(seen):
    assert seen["salts"] == [0, 0, BLOCKS]


def test_prompts_sent_at_once_by_two_tenants_are_computed_twice(seen):
    """Those of one tenant wait for each other and share; nobody waits for another tenant's."""
    apart, together = seen["at_once"]
    assert apart == 2 * LEN
    assert together < 2 * LEN - 64


def test_a_foreign_parent_is_as_good_as_none(seen):
    """Anna holds a state; bert names it as his parent, with her very prompt, and lets go of it."""
    assert seen["foreign_parent"] == (0, LEN - 1, [1, 0])


def test_prefixes_are_shared_between_keys_where_the_settings_say_so(with_real_server):
    async def use(server):
        await cost(server, server.anna, prompt(0))
        salted = cached(await cost(server, server.bert, prompt(0), cache_salt="s"))
        return salted, cached(await cost(server, server.bert, prompt(0)))

    assert with_real_server(use, share_prefixes=True) == (0, BLOCKS)


# -- in the engine itself, whatever the server lets through --------------------------------------

SALTED = World(num_blocks=64, block_size=2)
MODES = [
    pytest.param(None, id="plain"),
    pytest.param(
        KVParams(mode="fixed", budget=8, interval=4, policy="streaming", protect="none"),
        id="compacted",
    ),
]


def request(name, namespace, kv, token_ids=(3,) * 12, **fields):
    return AddRequest(
        request_id=name,
        token_ids=list(token_ids),
        sampling=SamplingParams(max_tokens=20, seed=4, ignore_eos=True),
        kv=kv,
        namespace=namespace,
        **fields,
    )


@pytest.mark.parametrize("kv", MODES)
@pytest.mark.parametrize("is_running", [False, True], ids=["held", "running"])
def test_a_fork_across_namespaces_shares_no_block(kv, is_running):
    """The engine's own guard. The fake runner's tokens depend on every slot that is read."""
    simulation = Simulation(SALTED)
    simulation.add(request("parent", "a", kv, hold=True))
    for _ in range(12 if is_running else 60):
        simulation.step()
    state = simulation.scheduler._state
    known = [*[3] * 12, *simulation.transcripts["parent", 0].token_ids, 7]
    children = [request("child", "b", kv, known), request("own", "a", kv, known)]
    simulation.fork("parent", children)
    child, own = (next(r for r in state.waiting if r.request_id == n) for n in ("child", "own"))
    assert child.table is None
    assert own.table is not None
    assert state.cache.match(known, namespace="b", signature=child.signature).num_tokens == 0
    assert own.is_compacted == (kv is not None)
    for _ in range(80):
        simulation.step()
    told = {key[0]: transcript for key, transcript in simulation.transcripts.items()}
    assert told["child"].final.usage.cached_tokens == 0
    assert told["own"].final.usage.cached_tokens > 0
    assert len(told["child"].token_ids) == 20


@pytest.mark.parametrize("kv", MODES)
def test_what_a_namespace_leaves_in_the_tree_no_other_finds(kv):
    simulation = Simulation(SALTED)
    simulation.add(request("first", "a", kv))
    for _ in range(40):
        simulation.step()
    said = simulation.transcripts["first", 0].token_ids
    cache = simulation.scheduler._state.cache
    settings = SALTED.compression.resolve(kv, 12)
    signature = settings.signature() if kv else None
    whole = [*[3] * 12, *said, 1]
    found = {
        name: cache.match(whole, namespace=name, signature=signature).num_tokens
        for name in ("a", "b", "", "a:", "A")
    }
    assert found.pop("a") > 12
    assert set(found.values()) == {0}
