"""Tiny random models made by transformers, and a driver that runs ours over a paged cache.

Knows nothing of the scheduler or the engine.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
import transformers

from zipage_lang.kernels.backend import AttentionBatch, choose_backend
from zipage_lang.runtime.forward_batch import ForwardBatch
from zipage_lang.runtime.kv_cache import KVCache, KVShape
from zipage_lang.runtime.models.registry import LoadedModel, load_model

VOCAB = 61
_KINDS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


@dataclasses.dataclass
class Twin:
    """The same weights in transformers and on disk."""

    theirs: transformers.PreTrainedModel
    folder: Path

    def load(self, dtype=torch.float32, max_model_len=None) -> LoadedModel:
        return load_model(self.folder, dtype, choose_backend("cpu"), max_model_len)

    @torch.inference_mode()
    def expected_logits(self, token_ids):
        return self.theirs(torch.tensor([token_ids])).logits[0].float()


@pytest.fixture
def make_twin(tmp_path):
    """make_twin(family, shard_size=None, **config overrides) -> Twin."""

    def make(family, shard_size=None, **overrides):
        config_class, model_class = _KINDS[family]
        settings = {
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.3,
            "eos_token_id": 5,
            "bos_token_id": 3,
        }
        torch.manual_seed(11)
        theirs = model_class(config_class(**(settings | overrides))).eval()
        with torch.no_grad():
            for parameter in theirs.parameters():
                if parameter.dim() == 1:  # norms are all one and biases all zero at the start
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        size = {} if shard_size is None else {"max_shard_size": shard_size}
        theirs.save_pretrained(tmp_path, **size)
        return Twin(theirs, tmp_path)

    return make


class PagedDriver:
    """Feeds chunks of sequences through a loaded model, each sequence in scattered blocks."""

    def __init__(self, loaded, *, num_seqs, max_len, block_size, dtype=torch.float32):
        self.model, self.block_size = loaded.model, block_size
        arch = self.arch = loaded.arch
        shape = KVShape(
            num_layers=arch.num_layers,
            num_q_heads=arch.num_q_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            dtype=dtype,
        )
        blocks_each = -(-max_len // block_size)
        num_blocks = 1 + num_seqs * blocks_each
        self.cache = KVCache(
            shape,
            num_blocks=num_blocks,
            block_size=block_size,
            num_query_slots=2,
            window=4,
            device=torch.device("cpu"),
        )
        self.cache.kv.fill_(float("nan"))
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(7)) + 1
        self.tables = order.view(num_seqs, blocks_each).int()
        self.lens = [0] * num_seqs

    @torch.inference_mode()
    def feed(self, chunks, ring_slots: torch.Tensor | None = None):
        """chunks: sequence number -> its next tokens. Returns the logits of each chunk's tokens."""
        logits = self.logits_of(None, chunks, ring_slots)
        return dict(zip(chunks, logits.split([len(ids) for ids in chunks.values()]), strict=True))

    @torch.inference_mode()
    def logits_of(self, wanted, chunks, ring_slots: torch.Tensor | None = None):
        """As `feed`, of these tokens of the step alone, [num_wanted, vocab_size]; None: of all."""
        seqs, sizes = list(chunks), [len(ids) for ids in chunks.values()]
        starts = [self.lens[seq] for seq in seqs]
        positions = torch.cat(
            [torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        )
        rows = torch.tensor(seqs).repeat_interleave(torch.tensor(sizes))
        blocks = self.tables[rows, positions // self.block_size].long()
        for seq, size in zip(seqs, sizes, strict=True):
            self.lens[seq] += size
        batch = ForwardBatch(
            token_ids=torch.tensor([token for ids in chunks.values() for token in ids]),
            positions=positions,
            slots=blocks * self.block_size + positions % self.block_size,
            attention_plan=self._plan(seqs, sizes),
            ring_slots=ring_slots,
            wanted=None if wanted is None else torch.tensor(wanted, dtype=torch.int64),
            logits_index=torch.arange(len(positions) if wanted is None else len(wanted)),
        )
        hidden = self.model.forward(batch, self.cache)
        return self.model.logits(hidden[batch.logits_index]).float()

    def _plan(self, seqs, sizes):
        metadata = AttentionBatch(
            torch.tensor([0, *sizes]).cumsum(0).int(),
            torch.tensor([self.lens[seq] for seq in seqs]).int(),
            self.tables[seqs],
        )
        arch = self.arch
        return self.model.backend.plan_attention(
            metadata, arch.num_q_heads, arch.num_kv_heads, arch.head_dim, self.block_size
        )


@pytest.fixture
def make_driver():
    return PagedDriver


@pytest.fixture
def prompts():
    """Three token sequences of different lengths."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (size,), generator=generator).tolist() for size in (23, 9, 40)]
