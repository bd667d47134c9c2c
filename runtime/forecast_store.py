"""Forecasts on disk: where a model's one lies, and how it is read, checked and written.

Knows nothing of how a forecast is made.
"""

import hashlib
import importlib.resources
import math
import os
import tempfile
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from zipage_lang.kernels.backend import Forecast
from zipage_lang.runtime.kv_cache import KVShape
from zipage_lang.runtime.model_store import zipage_home
from zipage_lang.runtime.models.registry import LoadedModel
from zipage_lang.runtime.models.weights import FORECAST_FILE

FORMAT = "zipage-forecast-1"
_IDENTITY_LEN = 16  # hex digits
_SAMPLED_ROWS, _SAMPLED_COLUMNS = 64, 64


def model_identity(loaded: LoadedModel) -> str:
    """A digest of architecture, norms and parts of the embedding: equal for equal models.

    Weights count as bfloat16, so the number format that a model is loaded in makes no difference.
    A fine-tune that trained neither embedding nor norms shares its base model's forecast.
    """
    model = loaded.model
    row_step = math.ceil(len(model.embedding) / _SAMPLED_ROWS)
    parts = [model.embedding[::row_step, :_SAMPLED_COLUMNS], model.final_norm]
    for layer in model.layers:
        norms = layer.attention.norms
        parts += [] if norms is None else [norms.q, norms.k]
    digest = hashlib.sha256(repr(loaded.arch).encode())
    for part in parts:
        digest.update(
            part.to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy().tobytes()
        )
    return digest.hexdigest()[:_IDENTITY_LEN]


def file_beside(model_path: Path) -> Path:
    """Where a forecast that came with the model lies. model_path: its folder, or a GGUF file."""
    return (model_path if model_path.is_dir() else model_path.parent) / FORECAST_FILE


def file_in_package(identity: str) -> Path:
    """Where a forecast for a model that is fetched from elsewhere comes with this package."""
    package = Path(str(importlib.resources.files("zipage_lang")))
    return package / "data" / "forecasts" / f"{identity}.safetensors"


def file_at_home(identity: str) -> Path:
    """Where a forecast that was made here lies."""
    return zipage_home() / "forecasts" / f"{identity}.safetensors"


def read_forecast(file: Path, shape: KVShape, frequencies: Tensor, identity: str) -> Forecast:
    """The forecast in a file, on the device of `frequencies`.

    frequencies: float32 [head_dim / 2], of the model at hand. Raises ValueError that names the file
    when it is broken or made for another model.
    """
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            about = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error})") from error
    if about.get("format") != FORMAT:
        raise ValueError(f"{file}: its format is {about.get('format')!r}, not {FORMAT!r}")
    _check_tensors(file, tensors, shape, frequencies)
    if about.get("identity") != identity:
        raise ValueError(
            f"{file}: made for a model with identity {about.get('identity')}, this is {identity}"
        )
    device = frequencies.device
    return Forecast(**{name: tensors[name].to(device, torch.float32) for name in Forecast._fields})


def write_forecast(file: Path, forecast: Forecast, identity: str, about: str) -> None:
    """Written whole or not at all. about: how it was made. Raises OSError where it can't be."""
    tensors = {name: tensor.cpu() for name, tensor in forecast._asdict().items()}
    metadata = {"format": FORMAT, "identity": identity, "made_from": about}
    content = safetensors.torch.save(tensors, metadata)
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as target:
            target.write(content)
        Path(scratch).chmod(0o644)  # a scratch file is its owner's alone
        Path(scratch).replace(file)
    except OSError:
        Path(scratch).unlink(missing_ok=True)
        raise


def _check_tensors(
    file: Path, tensors: dict[str, Tensor], shape: KVShape, frequencies: Tensor
) -> None:
    heads = (shape.num_layers, shape.num_kv_heads)
    expected = {
        "key": (*heads, shape.head_dim),
        "value": (*heads, shape.head_dim),
        "age": heads,
        "frequencies": tuple(frequencies.shape),
    }
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        raise ValueError(f"{file}: its shapes are {found}, this model's are {expected}")
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ValueError(f"{file}: it holds numbers that are not finite")
    if not torch.allclose(tensors["frequencies"].float(), frequencies.cpu(), rtol=1e-4, atol=0):
        raise ValueError(f"{file}: made for another rotation of keys (rope scaling) than this one")
