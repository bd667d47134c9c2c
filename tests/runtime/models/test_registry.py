"""What load_model refuses, and how it says so.

Knows nothing of how a model computes.
"""

import json

import pytest
import safetensors.torch
import torch

from zipage_lang.kernels.backend import choose_backend
from zipage_lang.runtime.models.registry import load_model


def load(path, **options):
    return load_model(path, torch.float32, choose_backend("cpu"), options.get("max_model_len"))


def edit_config(twin, **changes):
    path = twin.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(twin, change):
    path = twin.folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path)


@pytest.fixture
def twin(make_twin):
    return make_twin("llama")


def test_the_context_is_the_models_unless_a_shorter_one_is_asked_for(twin):
    assert twin.load().max_model_len == 128
    shorter = twin.load(max_model_len=50)
    assert shorter.max_model_len == 50
    assert shorter.model.rotary.cos.shape == (50, 4)


def test_a_context_past_the_models_is_refused(twin):
    with pytest.raises(ValueError, match=r"max_model_len=129 is past the 128 tokens .* or less"):
        twin.load(max_model_len=129)


def test_generation_config_names_the_end_tokens(twin):
    assert twin.load().arch.eos_token_ids == (5,)
    (twin.folder / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert twin.load().arch.eos_token_ids == (7, 5)


def test_old_spelling_of_rope_settings_is_read(twin):
    old = {"type": "linear", "factor": 2.0}
    edit_config(twin, rope_parameters=None, rope_theta=300.0, rope_scaling=old)
    arch = twin.load().arch
    assert arch.rope_theta == 300.0
    assert arch.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: the file is missing; give a folder"):
        load(tmp_path)


def test_a_broken_config_is_refused(twin):
    (twin.folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not a readable JSON file"):
        twin.load()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba' is not supported; known are llama"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"vocab_size": None}, "the config lacks 'vocab_size'"),
        ({"num_hidden_layers": 0}, "num_layers=0 must be a whole number, at least 1"),
        ({"num_key_value_heads": 4}, "num_attention_heads=6 must be a multiple of"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"max_position_embeddings": 2**40}, "must be at most 16777216"),
        ({"quantization_config": {"bits": 4}}, "quantised safetensors are not supported"),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "rope scaling 'longrope' is not supported; known are linear, dynamic, yarn and llama3",
        ),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope scaling 'llama3' lacks the setting"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta=-1 must be a number from"),
        ({"intermediate_size": 2**20}, "tensor 'model.layers.0.mlp.gate_proj.weight' has shape"),
    ],
)
def test_a_config_that_cannot_run_names_file_and_reason(twin, changes, message):
    edit_config(twin, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        twin.load()
    assert str(twin.folder) in str(caught.value)


def test_sliding_windows_are_refused(make_twin):
    twin = make_twin("qwen2", use_sliding_window=True, max_window_layers=0)
    with pytest.raises(ValueError, match="use_sliding_window=true is not supported"):
        twin.load()


def test_missing_weights_are_refused(twin):
    (twin.folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"needs one \.safetensors file"):
        twin.load()


def test_a_missing_shard_is_named(make_twin):
    twin = make_twin("llama", shard_size="20KB")
    shard = sorted(twin.folder.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard.name}: the file is missing"):
        twin.load()


def test_an_index_that_leaves_its_folder_is_refused(twin):
    index = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    (twin.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is not the name of a file beside it"):
        twin.load()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.5, 0.99])
def test_truncated_weights_are_refused(twin, share):
    path = twin.folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a whole safetensors file"):
        twin.load()


def test_a_missing_tensor_is_named(twin):
    edit_weights(twin, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.self_attn\.k_proj\.weight' is miss"):
        twin.load()


def test_a_tensor_of_another_shape_is_named(twin):
    edit_weights(twin, lambda tensors: tensors.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' has shape \(47,\).*\(48,\)"):
        twin.load()


def test_dynamic_rope_past_the_trained_length_is_refused(twin):
    from zipage_lang.runtime.models.rope import rotary_frequencies

    dynamic = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    edit_config(twin, rope_parameters=dynamic)
    with pytest.raises(ValueError, match="set max_model_len=128 or less"):
        rotary_frequencies(twin.load().arch, 129)
