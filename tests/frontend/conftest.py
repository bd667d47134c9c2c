"""What the frontend's tests share: a small tokenizer made on the spot and a scripted engine.

Knows nothing of models or tensors.
"""

import asyncio
import sys
from pathlib import Path

import pytest

from zipage_lang.frontend.async_llm import AsyncLLM
from zipage_lang.frontend.client import EngineClient
from zipage_lang.frontend.llm import Engine
from zipage_lang.frontend.tokenizer import load_tokenizer
from zipage_lang.runtime.config import EngineConfig

SCRIPT = Path(__file__).parent / "scripted_engine.py"
TIME_LIMIT_S = 30
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. A stop string, STOP, and another one.",
    "Zwei Füchse, größer als drei Hunde. 你好世界。日本語のテキスト。",
    "Numbers 12345 67890 and signs !? -- () [] {}",
] * 4


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    """A folder with a byte-level BPE of about 330 tokens, special tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|eos|>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>")
    fast.chat_template = CHAT_TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    return load_tokenizer(tokenizer_dir)


@pytest.fixture(scope="session")
def command(tokenizer_dir):
    """Starts the scripted engine in place of the real one."""
    return [sys.executable, str(SCRIPT), str(tokenizer_dir)]


@pytest.fixture
def with_client(command):
    """Runs `await use(client)` against a fresh scripted engine, and closes it."""

    def run(use):
        async def work():
            client = await EngineClient.start(EngineConfig(), command=command)
            try:
                return await use(client)
            finally:
                await client.close()

        return asyncio.run(asyncio.wait_for(work(), TIME_LIMIT_S))

    return run


@pytest.fixture
def with_llm(command):
    """Runs `await use(llm)` against a fresh scripted engine, and closes it."""

    def run(use):
        async def work():
            async with await AsyncLLM.start(EngineConfig(), command=command) as llm:
                return await use(llm)

        return asyncio.run(asyncio.wait_for(work(), TIME_LIMIT_S))

    return run


@pytest.fixture(scope="module")
def engine(command):
    """One scripted engine for the tests of a file that leave it alive."""
    with Engine(engine_command=command) as engine:
        yield engine
