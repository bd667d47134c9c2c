"""GGUF files: the same logits as the safetensors they were made from, and clear errors when broken.

Knows nothing of tokenizers.
"""

import struct

import gguf
import numpy as np
import pytest
import torch

from zipage_lang.kernels.backend import choose_backend
from zipage_lang.runtime.models.gguf_file import GgufFile
from zipage_lang.runtime.models.registry import load_model

F32, F16, Q8 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "Q8_0"))
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers": "blk",
}


def interleave(values, num_heads):
    """What llama.cpp's converter does to q and k of Llama models."""
    shape = values.shape
    halves = values.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:])
    return halves.swapaxes(1, 2).reshape(shape)


def write_gguf(path, twin, family, kind=F32, extra=None):
    """Write transformers' weights as llama.cpp lays them out."""
    config, writer = twin.theirs.config, gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    writer.add_eos_token_id(5)
    writer.add_bos_token_id(3)
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    tensors = {name: tensor.numpy() for name, tensor in twin.theirs.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name, values in (tensors | (extra or {})).items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        part = name.split(".")[-2]
        if family == "llama" and part in heads:
            values = interleave(values, heads[part])
        for theirs, llama_cpp in NAMES.items():
            name = name.replace(theirs, llama_cpp)
        used = kind if values.ndim == 2 else F32
        if used != F32:
            values = gguf.quants.quantize(values, used)
        writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path):
    return load_model(path, torch.float32, choose_backend("cpu"), None)


def logits_of(loaded, make_driver, ids):
    return make_driver(loaded, num_seqs=1, max_len=48, block_size=4).feed({0: ids})[0]


@pytest.fixture
def tiny_gguf(make_twin, tmp_path):
    return write_gguf(tmp_path / "tiny.gguf", make_twin("llama"), "llama")


@pytest.mark.parametrize("kind", [F32, F16, Q8], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_gives_the_logits_of_the_safetensors_it_came_from(
    make_twin, make_driver, prompts, tmp_path, family, kind
):
    settings = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    twin = make_twin(family, head_dim=16, **settings)
    with torch.no_grad():  # weights that the coding holds exactly, so that logits must be equal
        for weight in twin.theirs.parameters():
            if weight.dim() == 2 and kind != F32:
                coded = gguf.quants.quantize(weight.numpy(), kind)
                weight.copy_(torch.from_numpy(gguf.quants.dequantize(coded, kind)))
    path = write_gguf(tmp_path / "tiny.gguf", twin, family, kind)
    logits = logits_of(load(path), make_driver, prompts[0])
    torch.testing.assert_close(logits, twin.expected_logits(prompts[0]), atol=1e-4, rtol=1e-4)


def test_gguf_metadata_gives_the_same_arch_as_config_json(make_twin, tmp_path):
    twin = make_twin("qwen2", tie_word_embeddings=True, rms_norm_eps=2.0**-16)
    arch = load(write_gguf(tmp_path / "tiny.gguf", twin, "qwen2")).arch
    assert arch == twin.load().arch
    assert arch.eos_token_ids == (5,)
    assert arch.bos_token_id == 3


def test_rope_divisors_in_gguf_are_the_llama3_scaling(make_twin, make_driver, prompts, tmp_path):
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 1000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    twin = make_twin("llama", rope_parameters=llama3)
    plain = 1000.0 ** -(torch.arange(0, 8, 2) / 8)
    divisors = (plain / twin.theirs.model.rotary_emb.inv_freq).numpy()
    assert divisors.max() > 4
    path = write_gguf(tmp_path / "tiny.gguf", twin, "llama", extra={"rope_freqs.weight": divisors})
    logits = logits_of(load(path), make_driver, prompts[0])
    torch.testing.assert_close(logits, twin.expected_logits(prompts[0]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.2, 0.5, 0.95, 0.9999])
def test_truncated_file_is_one_clear_error(tiny_gguf, share):
    whole = tiny_gguf.read_bytes()
    tiny_gguf.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ValueError, match=r"tiny\.gguf: not a whole GGUF file .*download"):
        load(tiny_gguf)


@pytest.mark.parametrize("offset", [8, 16, 24])
def test_an_absurd_count_is_refused_before_anything_is_allocated(tiny_gguf, offset):
    data = bytearray(tiny_gguf.read_bytes())
    data[offset : offset + 8] = struct.pack("<Q", 2**60)  # tensors, pairs, first key's length
    tiny_gguf.write_bytes(data)
    with pytest.raises(ValueError, match="not a whole GGUF file"):
        GgufFile(tiny_gguf)


def test_any_corrupt_header_byte_loads_or_is_a_value_error(tiny_gguf):
    whole = tiny_gguf.read_bytes()
    generator = np.random.default_rng(0)
    complaints = []
    for _ in range(300):
        data = bytearray(whole)
        data[generator.integers(2500)] = generator.integers(256)
        tiny_gguf.write_bytes(data)
        try:
            load(tiny_gguf)
        except ValueError as error:
            complaints.append(str(error))
    assert len(complaints) > 50
    assert [text for text in complaints if "tiny.gguf" not in text] == []


def test_another_kind_of_file_is_refused(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"PK" * 100)
    with pytest.raises(ValueError, match="does not start with 'GGUF'"):
        load(path)


def test_unknown_architecture_in_gguf_is_named(make_twin, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", make_twin("llama"), "mamba")
    with pytest.raises(ValueError, match="architecture 'mamba' is not supported; known are llama"):
        load(path)


def test_smollm2_equals_transformers(smollm2, smollm2_reference, make_driver):
    loaded = load(smollm2)
    arch = loaded.arch
    ids = torch.randint(arch.vocab_size, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        expected = smollm2_reference(torch.tensor([ids])).logits[0]
    logits = logits_of(loaded, make_driver, ids)
    assert arch.eos_token_ids == (2,)
    assert arch.max_position == loaded.max_model_len == 8192
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
