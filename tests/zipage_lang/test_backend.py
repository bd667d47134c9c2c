"""Programs on a real Engine whose process is the frontend tests' scripted one: it echoes prompts.

Knows nothing of models.
"""

import asyncio
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import zipage_lang as zipage
from zipage_lang.backend import EngineBackend, as_backend, default_backend
from zipage_lang.frontend.async_llm import AsyncLLM
from zipage_lang.frontend.errors import EngineClosedError
from zipage_lang.runtime.config import EngineConfig
from zipage_lang.testing import ScriptedBackend

SCRIPTED_ENGINE = Path(__file__).parents[1] / "frontend" / "scripted_engine.py"
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|eos|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Starts the scripted engine with a byte-level tokenizer whose token 0 is the end."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=258, special_tokens=["<|eos|>", "<|start|>"], initial_alphabet=alphabet
    )
    backend.train_from_iterator(["a text"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>")
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return [sys.executable, "-P", str(SCRIPTED_ENGINE), str(folder)]


@pytest.fixture(scope="module")
def engine(command):
    with zipage.Engine(engine_command=command) as engine:
        yield engine


@zipage.function
def twice(s, text):
    s += text + zipage.gen("a")
    s += "!" + zipage.gen("b", max_tokens=3)


def test_a_program_runs_on_an_engine(engine):
    state = twice.run("fox", backend=engine)
    assert (state["a"], state["b"]) == ("fox", "fox")
    assert state.text() == "foxfox!fox"


def test_the_next_prompt_extends_the_tokens_of_the_call_before(engine):
    state = twice.run("fox", backend=engine)
    first, second = state.meta("a"), state.meta("b")
    before = first.prompt_token_ids + first.token_ids[:-1]
    assert first.token_ids[-1] in engine.ready.eos_token_ids
    assert second.prompt_token_ids[: len(before)] == before


def test_messages_go_through_the_models_own_template(engine):
    @zipage.function
    def program(s):
        s += zipage.user("hi") + zipage.assistant(zipage.gen("a", max_tokens=1))

    state = program.run(backend=engine)
    opening = "<|start|>user\nhi<|eos|>\n<|start|>assistant\n"
    assert state.meta("a").prompt_token_ids == engine.async_llm.tokenizer.encode(opening)


def test_branches_and_streams_work_on_the_engines_loop(engine):
    @zipage.function
    def program(s):
        s += "p"
        branches = s.fork(5)
        branches += lambda i: f"{i}" + zipage.gen("v")
        branches.join()

    state = program.run(backend=engine, stream=True)
    assert state["v"] == [f"p{i}" for i in range(5)]
    assert "".join(twice.run("fox", backend=engine, stream=True).text_iter("a")) == "fox"


def test_bad_input_of_a_call_is_raised_where_its_value_is_read(engine):
    state = twice.run("x" * 600, backend=engine)
    with pytest.raises(ValueError, match="512"):
        state["a"]
    assert twice.run("fox", backend=engine)["a"] == "fox"


def test_an_engine_can_be_the_default(engine):
    zipage.set_default_backend(engine)
    try:
        assert isinstance(default_backend(), EngineBackend)
        assert twice.run("fox")["a"] == "fox"
    finally:
        zipage.set_default_backend(None)


def test_a_closed_engine_is_one_clear_error(command):
    engine = zipage.Engine(engine_command=command)
    engine.close()
    with pytest.raises(EngineClosedError, match="start a new one"):
        twice.run("fox", backend=engine)


def test_an_async_llm_runs_programs_on_its_own_loop(command):
    async def main():
        async with await AsyncLLM.start(EngineConfig(), command=command) as llm:
            state = await twice.run_async("fox", backend=llm)
            return state["a"], state.ret_value

    assert asyncio.run(main()) == ("fox", None)


def test_a_backend_is_taken_as_it_is():
    backend = ScriptedBackend()
    assert as_backend(backend) is backend
