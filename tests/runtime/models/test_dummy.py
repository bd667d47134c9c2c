"""Random weights in published shapes: parameter counts, seeds, and a model that runs."""

import json
import math

import pytest
import torch

from zipage_lang.kernels.backend import choose_backend
from zipage_lang.runtime.config import ModelConfig
from zipage_lang.runtime.model_shapes import MODEL_SHAPES, published_shape
from zipage_lang.runtime.models.dummy import RandomWeights, weight_shapes
from zipage_lang.runtime.models.llama import read_config as read_llama
from zipage_lang.runtime.models.qwen3 import read_config as read_qwen3
from zipage_lang.runtime.models.registry import load_dummy_model

# As the model cards state them, in billions; tied embeddings count once.
PUBLISHED_SIZES = {
    "qwen3-0.6b": 0.596,
    "qwen3-8b": 8.191,
    "qwen3-14b": 14.768,
    "qwen3-32b": 32.762,
    "deepseek-r1-distill-llama-8b": 8.030,
}
TINY = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def arch_of(name):
    hf = published_shape(name)
    return (read_llama if hf["model_type"] == "llama" else read_qwen3)(hf)


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_shape_has_the_published_number_of_parameters(name):
    count = sum(math.prod(shape) for shape in weight_shapes(arch_of(name)).values())
    assert count / 1e9 == pytest.approx(PUBLISHED_SIZES[name], abs=0.001)


def test_hub_id_names_the_same_shape():
    assert published_shape("Qwen/Qwen3-8B") == published_shape("qwen3-8b")


def test_unknown_shape_names_the_nearest():
    with pytest.raises(ValueError, match=r"did you mean 'qwen3-8b'"):
        published_shape("qwen3-7b")


def test_equal_seeds_draw_equal_weights_in_any_order():
    arch, kind = read_qwen3(TINY), (torch.float32, torch.device("cpu"))
    first, second = RandomWeights(arch, *kind), RandomWeights(arch, *kind)
    names = list(weight_shapes(arch))
    drawn = {name: first.read(name) for name in names}
    again = {name: second.read(name) for name in reversed(names)}
    assert all(torch.equal(drawn[name], again[name]) for name in names)
    other = RandomWeights(arch, *kind, seed=1)
    assert not torch.equal(drawn["model.embed_tokens.weight"], other.read(names[0]))


def test_dummy_model_from_a_folder_gives_finite_logits(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    loaded = load_dummy_model(str(tmp_path), torch.bfloat16, choose_backend("cpu"), 64)
    assert loaded.max_model_len == 64
    logits = loaded.model.logits(torch.randn(3, 32).bfloat16())
    assert logits.shape == (3, 61)
    assert torch.isfinite(logits).all()


def test_unknown_load_format_is_refused():
    with pytest.raises(ValueError, match="load_format='random' must be one of auto, dummy"):
        ModelConfig(load_format="random")
