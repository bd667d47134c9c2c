"""The blocking engine for scripts, against a scripted engine process. Knows nothing of models."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from zipage_lang.frontend.errors import (
    EngineClosedError,
    EngineDiedError,
    EngineStartError,
    RequestError,
)
from zipage_lang.frontend.llm import Engine
from zipage_lang.runtime.sampling_params import SamplingParams

LONG = SamplingParams(max_tokens=10_000)


def test_one_prompt_gives_one_output(engine):
    assert [output.text for output in engine.generate("the fox")] == ["the fox"]


def test_many_prompts_come_back_prompt_major(engine):
    prompts = ["the fox", "lazy", "größer 你好"]
    outputs = engine.generate(prompts, SamplingParams(n=2))
    assert [output.text for output in outputs] == [text for text in prompts for _ in range(2)]
    assert [output.sample_index for output in outputs] == [0, 1] * 3


def test_token_ids_are_one_prompt_and_lists_of_them_are_many(engine):
    assert [o.prompt_token_ids for o in engine.generate([5, 6])] == [[5, 6]]
    assert [o.prompt_token_ids for o in engine.generate([[5, 6], [7]])] == [[5, 6], [7]]
    assert engine.generate([]) == []


def test_each_prompt_may_have_its_own_sampling(engine):
    sampling = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2, n=2)]
    outputs = engine.generate([[5, 6, 7], [5, 6, 7]], sampling)
    assert [len(output.token_ids) for output in outputs] == [1, 2, 2]


def test_all_prompts_run_at_once(engine, script):
    seen = []

    def watch(progress):
        seen.append(engine.submit(engine.async_llm.stats()).result()["running"])
        if seen[-1] == 3:
            engine.submit(abort_all()).result()

    async def abort_all():
        engine.async_llm.abort(engine.async_llm.client._streams)

    outputs = engine.generate([[script.SLOW, 5]] * 3, LONG, progress=watch)
    assert max(seen) == 3
    assert {output.finish_reason for output in outputs} == {"abort"}


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        (["fox", ""], None, "the prompt has no tokens"),
        ([["fox"]], None, "'fox'; token ids must be whole numbers"),
        (5, None, "prompts=5 must be a string"),
        (["a", "b"], [SamplingParams()], "1 sampling params for 2 prompts"),
        ("a", ["greedy"], "must be a SamplingParams"),
        ("a", "greedy", "must be a SamplingParams"),
    ],
)
def test_bad_input_is_refused_before_the_engine_hears_of_it(engine, prompts, sampling, message):
    before = engine.stats().get("AddRequest", 0)
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, sampling)
    assert engine.stats().get("AddRequest", 0) == before


def test_the_first_error_is_raised_and_the_others_are_aborted(engine, script):
    with pytest.raises(RequestError, match="refused: pool"):
        engine.generate([[script.SLOW, 5], [script.REFUSE, 5], [script.SLOW, 6]], LONG)
    assert engine.stats()["running"] == 0
    assert engine.generate("fox")[0].text == "fox"


def test_progress_is_told_up_to_the_end(engine):
    seen = []
    engine.generate(
        ["fox", "lazy"],
        SamplingParams(n=2),
        progress=lambda p: seen.append((p.num_finished, p.num_samples)),
    )
    assert seen[-1] == (4, 4)


def test_an_error_in_the_progress_function_aborts_and_is_raised(engine, script):
    def broken(progress):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.generate([script.SLOW, 5], LONG, progress=broken)
    assert engine.stats()["running"] == 0


def test_the_progress_bar_is_drawn_on_stderr(engine, capsys):
    engine.generate(["fox", "lazy"], progress=True)
    captured = capsys.readouterr()
    assert "2/2" in captured.err
    assert captured.out == ""


def test_stream_gives_outputs_as_they_come(engine):
    outputs = list(engine.stream("größer fox"))
    assert "".join(output.text_delta for output in outputs) == "größer fox"
    assert outputs[-1].is_final


def test_leaving_a_stream_aborts_the_request(engine, script):
    outputs = engine.stream([script.SLOW, 5], LONG)
    next(outputs)
    outputs.close()
    deadline = time.monotonic() + 5
    while engine.stats()["running"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.stats()["running"] == 0


def test_a_stream_raises_the_requests_error(engine, script):
    with pytest.raises(RequestError, match="refused: pool"):
        list(engine.stream([script.REFUSE, 5]))


def test_a_bad_stream_prompt_is_refused_at_the_call(engine):
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        engine.stream("")


def test_stats_and_flush_are_answered(engine):
    assert engine.flush_cache()["FlushCache"] >= 1
    assert engine.stats()["GetStats"] >= 1


def test_several_threads_may_generate_at_once(engine):
    texts = []

    def work(text):
        texts.append((text, engine.generate(text)[0].text))

    threads = [threading.Thread(target=work, args=(f"fox {i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 8
    assert all(asked == got for asked, got in texts)


def test_a_blocking_call_in_the_engines_own_loop_is_refused(engine):
    async def work():
        engine.generate("fox")

    with pytest.raises(RuntimeError, match=r"await engine\.async_llm"):
        engine.submit(work()).result()


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(ValueError, match="'kv_budgets'; did you mean 'kv_budget'"):
        Engine(kv_budgets=5)


def test_a_failed_start_leaves_no_thread_behind(command):
    before = [thread for thread in threading.enumerate() if thread.name == "zipage-loop"]
    with pytest.raises(EngineStartError, match="try smollm2-135m"):
        Engine("fails", engine_command=command)
    after = [thread for thread in threading.enumerate() if thread.name == "zipage-loop"]
    assert after == before


def test_a_closed_engine_says_so_whatever_is_called(command):
    with Engine(engine_command=command) as engine:
        assert engine.generate("fox")[0].text == "fox"
    engine.close()
    for call in (
        lambda: engine.generate("fox"),
        lambda: engine.stream("fox"),
        engine.stats,
        engine.flush_cache,
        lambda: engine.submit(asyncio.sleep(0)),
    ):
        with pytest.raises(EngineClosedError, match="the engine is closed; start a new one"):
            call()


def test_a_killed_engine_fails_generate_and_stream_and_can_still_be_closed(command, script):
    with Engine(engine_command=command) as engine:
        outputs = engine.stream([script.SLOW, 5], LONG)
        next(outputs)
        with pytest.raises(EngineDiedError, match="SIGKILL"):
            engine.generate([[script.SLOW, 5], [script.KILL, 5]], LONG)
        with pytest.raises(EngineDiedError, match="SIGKILL"):
            list(outputs)
        with pytest.raises(EngineDiedError, match="SIGKILL"):
            engine.stats()


SCRIPT = """
import os, signal, sys
from zipage_lang.frontend.llm import Engine
from zipage_lang.runtime.sampling_params import SamplingParams

# Whoever runs the tests in the background of a shell hands down an ignored SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupt(progress):
    if progress.num_tokens:
        os.kill(os.getpid(), signal.SIGINT)

engine = Engine(engine_command=sys.argv[1:])
try:
    engine.generate([[906, 5]] * 2, SamplingParams(max_tokens=10_000), progress=interrupt)
except KeyboardInterrupt:
    stats = engine.stats()
    print("interrupted", stats["running"], stats["Abort"])
print(engine.generate("fox")[0].text)
"""


def test_ctrl_c_aborts_and_a_script_that_never_closes_ends_cleanly(command):
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    printed = "interrupted 0 2\nfox\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
