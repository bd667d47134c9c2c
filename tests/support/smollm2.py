"""SmolLM2-135M as transformers reads it from its GGUF file.

Knows nothing of our engine.
"""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import gguf
import numpy
import transformers
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def reference_model(path: Path) -> transformers.LlamaForCausalLM:
    """float32. The shape stands here, as published: reading the file's header takes seconds."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    with no_init_weights(), _nothing_done_twice():
        model = transformers.LlamaForCausalLM(config).float().eval()
        loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(loaded["tensors"], strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embedding
    assert not unexpected, unexpected
    model.tie_weights()  # left out with the random first weights
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


@contextlib.contextmanager
def _nothing_done_twice() -> Iterator[None]:
    """What it reads is the same; without this it takes most of its time.

    It makes its table of names afresh for each of 397 modules, and a million views of a memory map.
    """
    names = functools.cache(gguf.get_tensor_name_map)
    with (
        mock.patch.object(gguf, "get_tensor_name_map", names),
        mock.patch.object(numpy, "memmap", lambda path, mode: numpy.fromfile(path, numpy.uint8)),
    ):
        yield
