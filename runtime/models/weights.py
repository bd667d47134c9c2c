"""Reads model weights from safetensors files, single or sharded, by their Hugging Face names.

Knows nothing of layers, and of what a tensor is for.
"""

import json
from pathlib import Path
from typing import Any, Protocol

import safetensors
from torch import Tensor

MAX_HEADER_BYTES = 100_000_000  # as the format says
MAX_JSON_BYTES = 2**26
FORECAST_FILE = "forecast.safetensors"  # may lie beside the weights; it is none of them


class WeightSource(Protocol):
    """Named tensors of one model, whatever file they come from."""

    path: Path  # named in errors

    def __contains__(self, name: str) -> bool: ...
    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, known before anything is read."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor as stored on the host: linear weights [out_size, in_size]."""
        ...


class SafetensorsWeights:
    """The tensors of a folder's `model.safetensors`, or of the shards its index names."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._files = _weight_files(folder)  # tensor name -> file
        self._open: dict[Path, Any] = {path: open_safetensors(path) for path in self._shards()}
        for name, path in self._files.items():
            if name not in self._open[path].keys():  # noqa: SIM118 - not a dict
                raise ValueError(f"{path}: tensor {name!r} is missing; download the model again")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open[self._files[name]].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        path = self._files[name]
        try:
            return self._open[path].get_tensor(name)
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path}: tensor {name!r:.80} can't be read ({error})") from error

    def _shards(self) -> set[Path]:
        return set(self._files.values())


def open_safetensors(path: Path) -> Any:
    """An open safetensors file; its header is checked against the file's size.

    Raises ValueError that names the file when it is missing, truncated or of another format.
    """
    if not path.is_file():
        raise ValueError(f"{path}: the file is missing; download the model again")
    try:
        _check_header_len(path)
        return safetensors.safe_open(path, framework="pt")
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{path}: not a whole safetensors file ({error}); download the model again"
        ) from error


def _check_header_len(path: Path) -> None:
    """The first eight bytes say how long the header is; it is allocated on their word."""
    with path.open("rb") as file:
        said = file.read(8)
    header_len, room = int.from_bytes(said, "little"), path.stat().st_size - 8
    if len(said) < 8 or header_len > min(room, MAX_HEADER_BYTES):
        raise ValueError(f"a header of {header_len} bytes is announced, {max(0, room)} are there")


def _weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = _read_index(index)
        return {name: folder / file for name, file in shards.items()}
    singles = sorted(path for path in folder.glob("*.safetensors") if path.name != FORECAST_FILE)
    if len(singles) != 1:
        raise ValueError(
            f"{folder}: needs one .safetensors file or model.safetensors.index.json, found "
            f"{len(singles)} files; only safetensors and GGUF weights are read"
        )
    return dict.fromkeys(open_safetensors(singles[0]).keys(), singles[0])


def _read_index(index: Path) -> dict[str, str]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{index}: 'weight_map' is missing; download the model again")
    for file in shards.values():
        is_beside = isinstance(file, str) and Path(file).name == file
        if not is_beside or Path(file).suffix != ".safetensors":
            raise ValueError(
                f"{index}: {file!r:.200} is not the name of a file beside it, a .safetensors file"
            )
    return shards


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError names the file when it holds anything else."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_JSON_BYTES:
            raise ValueError(f"it has {num_bytes} bytes, more than {MAX_JSON_BYTES}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a readable JSON file ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value
