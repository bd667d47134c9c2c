"""load_model and load_dummy_model: from a folder, a GGUF file or a shape to a model that runs.

Knows nothing of where models are kept or how they are fetched.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from zipage_lang.kernels.backend import Backend
from zipage_lang.runtime.model_shapes import published_shape
from zipage_lang.runtime.models.assemble import assemble_decoder
from zipage_lang.runtime.models.config import ArchConfig, ModelFamily
from zipage_lang.runtime.models.decoder import Decoder
from zipage_lang.runtime.models.dummy import DEFAULT_STD, RandomWeights
from zipage_lang.runtime.models.gguf_file import GgufFile
from zipage_lang.runtime.models.gguf_weights import GgufWeights, read_gguf_config
from zipage_lang.runtime.models.llama import LLAMA
from zipage_lang.runtime.models.qwen2 import QWEN2
from zipage_lang.runtime.models.qwen3 import QWEN3
from zipage_lang.runtime.models.weights import SafetensorsWeights, WeightSource, read_json

_FAMILIES = {family.name: family for family in (LLAMA, QWEN2, QWEN3)}


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and the context it runs with."""

    arch: ArchConfig
    model: Decoder
    max_model_len: int  # tokens


def load_model(
    path: Path, dtype: torch.dtype, backend: Backend, max_model_len: int | None
) -> LoadedModel:
    """Load weights and config.

    Args:
        path: a folder with config.json and safetensors, or a .gguf file.
        dtype: of the weights in memory.
        max_model_len: context in tokens; None: what the model was made for.

    Raises ValueError that names the file for anything missing, broken or not supported.
    """
    arch, source = open_model(path)
    context = _context(arch, max_model_len, path)
    try:
        model = assemble_decoder(arch, source, dtype, backend, context)
    except ValueError as error:
        raise _named(path, error) from error
    return LoadedModel(arch, model, context)


def open_model(path: Path) -> tuple[ArchConfig, WeightSource]:
    """The shape of a model and its tensors, none of which is read yet. Raises as `load_model`."""
    return _open_gguf(path) if path.suffix == ".gguf" else _open_folder(path)


def open_shape(name: str) -> ArchConfig:
    """The published shape of that name. Raises ValueError."""
    return _read_arch(published_shape(name), Path(name))


def load_dummy_model(
    name: str,
    dtype: torch.dtype,
    backend: Backend,
    max_model_len: int | None,
    *,
    std: float = DEFAULT_STD,
) -> LoadedModel:
    """A model with random weights.

    Args:
        name: of a published shape, or a local folder with config.json.
        dtype, max_model_len: as for `load_model`.
        std: standard deviation of the weights.

    Raises ValueError for a name that is not known or a config that is not supported.
    """
    path = Path(name).expanduser()
    config_path = path / "config.json"
    arch = _read_arch(read_json(config_path) if path.is_dir() else published_shape(name), path)
    context = _context(arch, max_model_len, path)
    source = RandomWeights(arch, dtype, backend.device, std=std)
    return LoadedModel(arch, assemble_decoder(arch, source, dtype, backend, context), context)


def _open_folder(folder: Path) -> tuple[ArchConfig, WeightSource]:
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise ValueError(
            f"{config_path}: the file is missing; give a folder with config.json and safetensors "
            "weights, or a .gguf file"
        )
    hf = read_json(config_path)
    if hf.get("quantization_config"):
        raise ValueError(
            f"{config_path}: quantised safetensors are not supported; use the unquantised model "
            "or a GGUF file"
        )
    generation = folder / "generation_config.json"
    if generation.is_file():
        hf["eos_token_id"] = read_json(generation).get("eos_token_id") or hf.get("eos_token_id")
    arch = _read_arch(hf, config_path)
    return arch, SafetensorsWeights(folder)


def _open_gguf(path: Path) -> tuple[ArchConfig, WeightSource]:
    file = GgufFile(path)
    try:
        hf = read_gguf_config(file)
    except ValueError as error:
        raise _named(path, error) from error
    arch = _read_arch(hf, path)
    heads = {"attn_q": arch.num_q_heads, "attn_k": arch.num_kv_heads}
    interleaves = _FAMILIES[arch.architecture].gguf_interleaves_rope
    return arch, GgufWeights(file, heads if interleaves else {})


def _read_arch(hf: dict[str, Any], path: Path) -> ArchConfig:
    family = _family(hf.get("model_type"), path)
    try:
        return family.read_config(hf)
    except (ValueError, TypeError) as error:
        raise _named(path, error) from error


def _family(name: Any, path: Path) -> ModelFamily:
    if not isinstance(name, str) or name not in _FAMILIES:
        raise ValueError(
            f"{path}: architecture {name!r} is not supported; known are {', '.join(_FAMILIES)}"
        )
    return _FAMILIES[name]


def _context(arch: ArchConfig, asked: int | None, path: Path) -> int:
    if asked is not None and asked > arch.max_position:
        raise ValueError(
            f"max_model_len={asked} is past the {arch.max_position} tokens that {path} was made "
            f"for; set it to {arch.max_position} or less"
        )
    return asked or arch.max_position


def _named(path: Path, error: Exception) -> ValueError:
    text = str(error)
    return ValueError(text if str(path) in text else f"{path}: {text}")
