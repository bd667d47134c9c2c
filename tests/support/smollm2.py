"""SmolLM2-135M as transformers reads it from its GGUF file.

Knows nothing of our engine.
"""

from pathlib import Path

import transformers
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
    model = transformers.LlamaForCausalLM(config).float().eval()
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(loaded["tensors"], strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embedding
    assert not unexpected, unexpected
    return model
