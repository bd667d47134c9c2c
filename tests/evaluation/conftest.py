"""A tiny random model with the tiny reasoner's tokenizer, and a runner that plays from a script.

Knows nothing of what is tested.
"""

import importlib.util
from pathlib import Path

import pytest

from zipage_lang.evaluation.runner import Output
from zipage_lang.runtime.messages import KVUsage, Ready

TOKENIZER_FILE = Path(__file__).resolve().parents[2] / "training" / "tokenizer.py"
CONTEXT_LEN = 512
EOS_ID = 2


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A folder that the engine loads: random weights, characters as tokens, context 512."""
    import torch
    import transformers

    spec = importlib.util.spec_from_file_location("tiny_tokenizer", TOKENIZER_FILE)
    tokenizer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tokenizer)
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer.write_tokenizer(folder)
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        vocab_size=tokenizer.VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT_LEN,
        initializer_range=0.2,
        bos_token_id=tokenizer.BOS_ID,
        eos_token_id=tokenizer.EOS_ID,
        pad_token_id=tokenizer.PAD_ID,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


class CharacterTokenizer:
    """One token per character, for runners without a model."""

    has_chat_template = False
    bos_token_id = None

    def encode(self, text, add_special_tokens=True):
        return [ord(character) for character in text]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(map(chr, token_ids))


class ScriptedRunner:
    """Answers each job by `answer(problem_id, setting_name, sample_index)`, a text.

    `fail_after`: raises KeyboardInterrupt behind so many outputs.
    """

    def __init__(self, answer, fail_after=None):
        self.answer, self.fail_after = answer, fail_after
        self.tokenizer = CharacterTokenizer()
        self.max_running = 4
        self.num_tokens = 0
        self.jobs = []
        self.num_flushes = 0
        self.ready = Ready(
            model="scripted",
            model_path="",
            architecture="none",
            backend="none",
            max_model_len=CONTEXT_LEN,
            vocab_size=256,
            eos_token_ids=[EOS_ID],
            num_blocks=1,
            block_size=16,
        )

    def run(self, jobs):
        for job in jobs:
            self.jobs.append(job)
            cell, problem = job.key
            for index in range(job.sampling.n):
                if self.fail_after is not None and self.num_outputs >= self.fail_after:
                    raise KeyboardInterrupt
                text = self.answer(problem.id, cell.setting.name, index)
                self.num_tokens += len(text) + 1
                yield Output(
                    job.key,
                    index,
                    [*map(ord, text), EOS_ID],
                    "stop",
                    EOS_ID,
                    KVUsage(max_resident_len=7, compactions=2, dropped=5),
                )

    @property
    def num_outputs(self):
        return sum(job.sampling.n for job in self.jobs[:-1])

    def stats(self):
        counts = ("peak_held", "num_compactions", "num_preemptions", "num_swap_outs")
        return dict.fromkeys(counts, 3)

    def flush_cache(self):
        self.num_flushes += 1

    def close(self):
        pass


@pytest.fixture
def scripted_runner():
    return ScriptedRunner
