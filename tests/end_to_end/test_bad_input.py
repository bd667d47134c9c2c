"""Bad input gets one clear error that says what to do, and the engine lives on.

Issue 2, point 5.
"""

import asyncio
import json
import os
import signal
import time
from contextlib import aclosing

import pytest

import zipage_lang as zipage
from zipage_lang.frontend.errors import EngineDiedError, EngineStartError, RequestError

SHORT = zipage.SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def engine():
    """64 blocks of 16 hold 1,024 tokens; a request may ask for twice that."""
    with zipage.Engine("smollm2-135m", num_blocks=64, num_threads=1, max_model_len=2048) as engine:
        yield engine


def is_alive(engine: zipage.Engine) -> bool:
    return len(engine.generate("Hello", SHORT)[0].token_ids) == 4


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("", "no tokens|empty"),
        ([], "no tokens|empty"),
        ([5] * 2048, "max_model_len"),
        ("word " * 3000, "max_model_len"),
        ([49152], "ids go from 0 to 49151"),
        ([-1], "ids go from 0 to 49151"),
        ([1.5], "prompt"),
        (None, "prompt"),
    ],
    ids=[
        "no text",
        "no tokens",
        "at context",
        "past context",
        "too high",
        "negative",
        "float",
        "None",
    ],
)
def test_bad_prompts_are_refused_with_the_fix(engine, prompt, told):
    with pytest.raises(ValueError, match=told):
        engine.generate([prompt], SHORT)
    assert is_alive(engine)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"n": 0}, "n=0 must be"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"stop": [""]}, "empty string"),
        ({"stop": 3}, "stop=3 must be"),
        ({"temperature": float("nan")}, "temperature=nan must be a finite number"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"max_tokens": 2**63, "min_tokens": 2**63}, "max_tokens=.* must be from 1 to"),
        ({"top_p": 0.0}, "temperature=0 for greedy"),
    ],
)
def test_bad_sampling_fields_are_refused_with_the_fix(fields, told):
    with pytest.raises(ValueError, match=told):
        zipage.SamplingParams(**fields)


def test_a_request_that_can_never_fit_is_refused_with_the_limit(engine):
    huge = zipage.KV(mode="fixed", budget=2000, interval=256)
    sampling = zipage.SamplingParams(max_tokens=1500)
    with pytest.raises(RequestError, match="lower max_tokens or the kv budget"):
        engine.generate("Hello", sampling)
    with pytest.raises(RequestError, match="the pool"):
        engine.generate("Hello", sampling, kv=huge)
    assert is_alive(engine)


def test_an_unknown_policy_names_the_known_ones(engine):
    with pytest.raises(RequestError, match=r"unknown kv policy 'zipag'.*zipage"):
        engine.generate("Hello", SHORT, kv=zipage.KV(mode="fixed", policy="zipag"))


@pytest.mark.parametrize("asked", ["rkv:mass_wait=1", "rkv:mass_weight=2", "snapkv:num_queries=99"])
def test_a_policys_bad_parameter_refuses_the_request_alone(engine, asked):
    with pytest.raises(RequestError, match=f"kv policy '{asked}'"):
        engine.generate("Hello", SHORT, kv=zipage.KV(mode="fixed", policy=asked))
    kv = zipage.KV(mode="fixed", policy="rkv:mass_weight=0.5")
    assert engine.generate("Hello", SHORT, kv=kv)
    assert is_alive(engine)


def test_a_request_that_can_draw_no_token_fails_alone():
    """Every token is suppressed until min_tokens is reached: its error, nobody else's."""
    with zipage.Engine("zipage-tiny-reasoner", num_threads=1) as small:
        every = list(range(small.async_llm.ready.vocab_size))
        nothing = zipage.SamplingParams(
            max_tokens=4, min_tokens=1, stop_token_ids=every, temperature=0
        )
        good, bad = small.submit(both(small.async_llm, SHORT, nothing)).result(60)
        assert len(good[0].token_ids) == 4
        assert isinstance(bad, RequestError)
        assert "suppressed" in str(bad)
        assert small.stats()["num_running"] == 0


async def both(llm, first, second):
    calls = (llm.complete("12+3", first), llm.complete("12+3", second))
    return await asyncio.gather(*calls, return_exceptions=True)


def test_the_id_of_a_held_state_can_not_be_taken_again(engine):
    llm = engine.async_llm
    engine.submit(llm.complete("Hello", SHORT, request_id="kept", hold=True)).result(60)
    with pytest.raises(RequestError, match="in use"):
        engine.submit(llm.complete("Hello", SHORT, request_id="kept", hold=True)).result(60)
    assert engine.stats()["num_held_requests"] == 1
    engine.submit(release(llm, "kept")).result(60)
    assert is_alive(engine)
    assert engine.stats()["num_held_requests"] == 0


async def release(llm, request_id):
    llm.release([request_id])


def test_unknown_engine_options_name_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'kv_budget'"):
        zipage.Engine("smollm2-135m", kv_budge=3)


def test_an_unknown_model_names_the_nearest_and_what_is_taken():
    with pytest.raises(EngineStartError, match="did you mean 'smollm2-135m'"):
        zipage.Engine("smollm2-135n")


def test_a_broken_model_file_is_named(smollm2, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(smollm2.read_bytes()[:200_000])
    with pytest.raises(EngineStartError, match=r"broken\.gguf"):
        zipage.Engine(str(broken))


def test_an_unknown_architecture_is_named_with_the_supported_ones(tmp_path):
    config = {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineStartError, match=r"mamba[\s\S]*qwen3"):
        zipage.Engine(str(tmp_path))


def test_killing_the_engine_fails_every_waiting_call_within_a_second():
    with zipage.Engine("zipage-tiny-reasoner", num_blocks=128, num_threads=1) as engine:
        llm = engine.async_llm
        waiting = zipage.SamplingParams(max_tokens=400, ignore_eos=True)
        ended: list[tuple[float, BaseException]] = []

        async def read(prompt: str, first: asyncio.Event) -> None:
            try:
                async with aclosing(llm.generate(prompt, waiting)) as stream:
                    async for _ in stream:
                        first.set()
            except EngineDiedError as error:
                ended.append((time.monotonic(), error))

        async def scenario() -> float:
            first = asyncio.Event()
            readers = [asyncio.create_task(read(f"{i}+12", first)) for i in range(4)]
            await first.wait()
            killed = time.monotonic()
            os.kill(llm.client.pid, signal.SIGKILL)
            await asyncio.wait_for(asyncio.gather(*readers), 10)
            return killed

        killed = engine.submit(scenario()).result(60)
        assert len(ended) == 4
        assert max(when for when, _ in ended) - killed < 1.0
        assert "SIGKILL" in str(ended[0][1])
        with pytest.raises(EngineDiedError):
            engine.generate("Hello", SHORT)


def test_a_known_model_that_is_not_there_says_how_to_pull_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ZIPAGE_HOME", str(tmp_path))
    with pytest.raises(EngineStartError, match="zipage models pull smollm2-135m"):
        zipage.Engine("smollm2-135m")
