"""Text through a scripted engine process and back. Knows nothing of models."""

import asyncio
import contextlib

import pytest

from zipage_lang.frontend.async_llm import AsyncLLM
from zipage_lang.frontend.errors import EngineDiedError, EngineStartError, RequestError
from zipage_lang.frontend.outputs import Progress
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams

TEXT = "größer 你好 👋 fox"


async def collect(outputs):
    return [output async for output in outputs]


def endless(script, llm, text):
    """A prompt whose answer repeats `text` until somebody ends it."""
    return [script.SLOW, *llm.tokenizer.encode(text)]


def long(**fields):
    return SamplingParams(max_tokens=10_000, **fields)


def test_a_prompt_streams_back_as_whole_characters(with_llm):
    outputs = with_llm(lambda llm: collect(llm.generate(TEXT)))
    assert "".join(output.text_delta for output in outputs) == TEXT
    assert not any("\ufffd" in output.text for output in outputs)
    assert [output.is_final for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_the_last_output_holds_all(with_llm, script):
    async def use(llm):
        (output,) = await llm.complete(TEXT)
        return output, llm.tokenizer.encode(TEXT)

    output, prompt = with_llm(use)
    assert output.text == TEXT
    assert output.prompt_token_ids == prompt
    assert output.token_ids == [*prompt, script.EOS]
    assert (output.finish_reason, output.stop_reason) == ("stop", script.EOS)
    assert output.usage.prompt_tokens == len(prompt)
    assert output.usage.completion_tokens == len(prompt) + 1
    assert output.kv.logical_len == 2 * len(prompt) + 1


def test_samples_come_interleaved_and_are_told_apart(with_llm):
    outputs = with_llm(lambda llm: collect(llm.generate(TEXT, SamplingParams(n=3))))
    for index in range(3):
        mine = [output for output in outputs if output.sample_index == index]
        assert "".join(output.text_delta for output in mine) == TEXT
    first_six = [output.sample_index for output in outputs[:6]]
    assert first_six == [0, 1, 2, 0, 1, 2]


def test_max_tokens_ends_with_length(with_llm):
    (output,) = with_llm(lambda llm: llm.complete(TEXT, SamplingParams(max_tokens=3)))
    assert (output.finish_reason, len(output.token_ids)) == ("length", 3)


def test_a_stop_string_ends_the_engines_work_too(with_llm, script):
    async def use(llm):
        prompt = endless(script, llm, "fox STOP ")
        outputs = await collect(llm.generate(prompt, long(stop=["STOP"])))
        return outputs, len(llm.tokenizer.encode("fox STOP")), await llm.stats()

    outputs, num_tokens, stats = with_llm(use)
    assert "".join(output.text_delta for output in outputs) == outputs[-1].text == "fox "
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "STOP")
    assert outputs[-1].usage.completion_tokens == len(outputs[-1].token_ids) == num_tokens
    assert (stats["Stop"], stats["last_stop_tokens"], stats["running"]) == (1, num_tokens, 0)
    assert "Abort" not in stats


def test_leaving_the_iterator_aborts_the_request(with_llm, script):
    async def use(llm):
        async with contextlib.aclosing(
            llm.generate(endless(script, llm, "fox"), long())
        ) as outputs:
            await anext(outputs)
        return await llm.stats()

    stats = with_llm(use)
    assert (stats["Abort"], stats["running"]) == (1, 0)


def test_cancelling_the_reader_aborts_the_request(with_llm, script):
    async def use(llm):
        reader = asyncio.create_task(llm.complete(endless(script, llm, "fox"), long(n=4)))
        while (await llm.stats())["running"] != 4:
            await asyncio.sleep(0.01)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        return await llm.stats()

    assert with_llm(use)["running"] == 0


def test_an_abort_from_elsewhere_ends_the_stream_with_its_text(with_llm, script):
    async def use(llm):
        outputs = llm.generate(endless(script, llm, "fox"), long(), group_id="g")
        first = await anext(outputs)
        llm.abort(group_ids=["g"])
        *_, last = await collect(outputs)
        return first, last

    first, last = with_llm(use)
    assert last.finish_reason == "abort"
    assert last.text.startswith(first.text)


def test_a_parent_makes_it_a_fork(with_llm):
    async def use(llm):
        await llm.complete("the", hold=True, request_id="p")
        (child,) = await llm.complete("the lazy", parent_id="p", request_id="c")
        llm.release(["p"])
        return child, await llm.stats()

    child, stats = with_llm(use)
    assert (child.request_id, child.text) == ("c", "the lazy")
    assert (stats["Fork"], stats["last_parent"], stats["last_released"]) == (1, "p", "p")


def test_logprobs_of_tokens_and_prompt_are_passed_on(with_llm):
    async def use(llm):
        sampling = SamplingParams(logprobs=1, prompt_logprobs=0, n=2)
        return await llm.complete("the lazy dog", sampling)

    for output in with_llm(use):
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_progress_counts_tokens_and_samples(with_llm):
    async def use(llm):
        progress = Progress(num_samples=2)
        outputs = await llm.complete(TEXT, SamplingParams(n=2), progress=progress)
        return progress, outputs

    progress, outputs = with_llm(use)
    assert progress.num_finished == 2
    assert progress.num_tokens == sum(len(output.token_ids) for output in outputs)


def test_a_refused_request_raises_the_reason_and_the_engine_lives_on(with_llm, script):
    async def use(llm):
        with pytest.raises(RequestError, match="refused: pool") as caught:
            await llm.complete([script.REFUSE, 5], SamplingParams(n=3), request_id="r")
        (output,) = await llm.complete("the")
        return caught.value, output, await llm.stats()

    error, output, stats = with_llm(use)
    assert (error.request_id, error.retryable) == ("r", False)
    assert output.text == "the"
    assert stats["running"] == 0


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ("", None, "the prompt has no tokens"),
        ([], None, "the prompt has no tokens"),
        ("fox " * 600, None, "max_model_len=512; shorten the prompt"),
        ([5, 1000], None, "token id 1000; this model's ids go from 0 to 999"),
        (7, None, "a string or a list of token ids, not int"),
        ("fox", "greedy", "must be a SamplingParams"),
        ("a\ud800", None, "lone surrogate"),
    ],
)
def test_bad_input_is_refused_at_the_call(with_llm, prompt, sampling, message):
    async def use(llm):
        with pytest.raises(ValueError, match=message):
            llm.generate(prompt, sampling)
        return await llm.stats()

    assert "AddRequest" not in with_llm(use)


def test_kv_params_of_another_type_are_refused_at_the_call(with_llm):
    async def use(llm):
        with pytest.raises(ValueError, match="must be a KVParams"):
            llm.generate("fox", kv={"mode": "off"})
        return await llm.complete("fox", kv=KVParams(mode="off"))

    assert with_llm(use)[0].text == "fox"


def test_an_engine_killed_mid_stream_fails_all_readers_within_a_second(with_llm, script):
    async def use(llm):
        readers = [
            asyncio.create_task(llm.complete(endless(script, llm, "fox"), long())) for _ in range(4)
        ]
        while (await llm.stats())["running"] != 4:
            await asyncio.sleep(0.01)
        killer = asyncio.create_task(llm.complete([script.KILL, 5]))
        await llm.client._link.wait_end()
        done, pending = await asyncio.wait([*readers, killer], timeout=1.0)
        assert not pending
        return [task.exception() for task in done]

    errors = with_llm(use)
    assert len(errors) == 5
    assert all(isinstance(error, EngineDiedError) and "SIGKILL" in str(error) for error in errors)


def test_a_model_without_tokenizer_ends_the_engine_again(command, tmp_path, monkeypatch):
    started = []
    popen = __import__("subprocess").Popen

    def spy(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr("subprocess.Popen", spy)
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        asyncio.run(AsyncLLM.start(EngineConfig(), command=[*command[:2], str(tmp_path)]))
    assert [process.returncode for process in started] == [0]


def test_a_start_that_fails_raises_the_engines_reason(command):
    config = EngineConfig.from_options(model="fails")
    with pytest.raises(EngineStartError, match="try smollm2-135m"):
        asyncio.run(AsyncLLM.start(config, command=command))
