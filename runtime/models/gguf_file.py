"""Reads a GGUF file's header: metadata and where each tensor lies. Every length is checked first.

Knows nothing of models or of what a tensor is for.

Format: magic, version, counts, then key/value pairs, then tensor infos, then aligned tensor data.
A file is untrusted, so no count or length is believed before it is compared with the bytes that are
left; the header can't make this code allocate more than the file holds.
"""

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_AXES = 4  # the format's own bound
_MAX_ARRAY_LEN = 2**20  # numbers; a longer one is skipped as strings are
# What no model's header comes near. A Python object takes many times the bytes it is made of, so
# that a header fits into its file bounds nothing.
_MAX_PAIRS, _MAX_TENSORS = 2**16, 2**20
_MAX_NUMBERS = 2**22  # of all arrays together
_MAX_STRINGS = 2**24  # of one array: tokens of a vocabulary
_MAX_TEXT_BYTES = 2**24
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclasses.dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor's bytes lie and how they are coded."""

    shape: tuple[int, ...]  # outermost axis first, as torch has it
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


class GgufFile:
    """A GGUF file's metadata (arrays of strings, and very long ones, are skipped), its tensors."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def __init__(self, path: Path) -> None:
        """Raises ValueError that names the file when it is missing, truncated or not GGUF."""
        self.path = path
        try:
            self._data = np.memmap(path, dtype=np.uint8, mode="r")
            self.metadata, self.tensors = _read_header(self.data)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path}: not a whole GGUF file ({error}); download the model again"
            ) from error

    @property
    def data(self) -> memoryview:
        """The file's bytes."""
        return self._data.data

    def read(self, name: str) -> np.ndarray:
        """The tensor's values, dequantised: float32, in the tensor's shape."""
        tensor = self.tensors[name]
        raw = self._data[tensor.offset : tensor.offset + tensor.num_bytes]
        try:
            values = dequantize(_as_rows(raw, tensor), tensor.kind)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: tensor {name!r} is coded as {tensor.kind.name}, which can't be "
                "read; use another quantisation of this model"
            ) from error
        return np.array(values, dtype=np.float32).reshape(tensor.shape)


def read_gguf_texts(path: Path, key: str) -> tuple[dict[str, Any], list[str]]:
    """A file's metadata, and the one array of strings that stands under `key`.

    Raises ValueError where the file is no whole GGUF file, or has no such array.
    """
    file = GgufFile(path)
    try:
        return file.metadata, _texts(file.data, key)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _texts(data: memoryview, key: str) -> list[str]:
    cursor = _Cursor(data)
    cursor.skip(4)
    cursor.number("I")
    cursor.number("Q")
    for _ in range(cursor.number("Q")):
        name, kind = cursor.text(), cursor.number("I")
        if name == key and kind == _ARRAY:
            return cursor.texts()
        cursor.value(kind)
    raise ValueError(f"it has no metadata {key!r}")


def _as_rows(raw: np.ndarray, tensor: GgufTensor) -> np.ndarray:
    """The bytes as `dequantize` takes them: typed for plain floats, rows of bytes for the rest."""
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    if tensor.kind in plain:
        return raw.view(plain[tensor.kind])
    return raw.reshape(math.prod(tensor.shape[:-1]), -1)


class _Cursor:
    """A place in the file's bytes that never moves past their end."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0
        self._num_numbers = 0

    def skip(self, num_bytes: int) -> int:
        """Move on; returns where the skipped bytes start."""
        start = self.at
        if num_bytes > len(self.data) - start:
            raise ValueError(
                f"it ends at byte {len(self.data)}, but byte {start + num_bytes} is wanted"
            )
        self.at = start + num_bytes
        return start

    def number(self, code: str) -> Any:
        start = self.skip(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self.data, start)[0]

    def text(self) -> str:
        length = self.number("Q")
        _check_at_most("bytes in a text", length, _MAX_TEXT_BYTES)
        start = self.skip(length)
        return bytes(self.data[start : start + length]).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        if kind not in _NUMBERS:
            raise ValueError(f"unknown metadata type {kind} at byte {self.at}")
        return self.number(_NUMBERS[kind])

    def array(self) -> list[Any] | None:
        """A list of numbers; None for strings and long lists: tokenizer tables, of no use here."""
        kind, count = self.number("I"), self.number("Q")
        if kind in _NUMBERS:
            start = self.skip(count * struct.calcsize("<" + _NUMBERS[kind]))
            if count > _MAX_ARRAY_LEN:
                return None
            self._num_numbers += count
            _check_at_most("numbers in arrays", self._num_numbers, _MAX_NUMBERS)
            return list(struct.unpack_from(f"<{count}{_NUMBERS[kind]}", self.data, start))
        if kind != _STRING:
            raise ValueError(f"unknown array type {kind} at byte {self.at}")
        _check_at_most("strings in an array", count, _MAX_STRINGS)
        self.require(count, 8)
        for _ in range(count):
            self.skip(self.number("Q"))
        return None

    def texts(self) -> list[str]:
        """An array of strings."""
        kind, count = self.number("I"), self.number("Q")
        if kind != _STRING:
            raise ValueError(f"array type {kind} at byte {self.at}, where strings are wanted")
        _check_at_most("strings in an array", count, _MAX_STRINGS)
        self.require(count, 8)
        return [self.text() for _ in range(count)]

    def require(self, count: int, least_bytes: int) -> None:
        """`count` entries of at least `least_bytes` each must still fit."""
        if count * least_bytes > len(self.data) - self.at:
            raise ValueError(f"it has no room for the {count} entries announced at byte {self.at}")


def _check_at_most(what: str, count: int, most: int) -> None:
    """Raises ValueError for a count that no model's file has."""
    if count > most:
        raise ValueError(f"it announces {count} {what}, more than {most}")


def _read_header(data: memoryview) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    cursor = _Cursor(data)
    if bytes(data[cursor.skip(4) : 4]) != _MAGIC:
        raise ValueError("it does not start with 'GGUF'")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version} is not one of {_VERSIONS}")
    num_tensors, num_pairs = cursor.number("Q"), cursor.number("Q")
    _check_at_most("metadata pairs", num_pairs, _MAX_PAIRS)
    _check_at_most("tensors", num_tensors, _MAX_TENSORS)
    cursor.require(num_pairs, 13)
    metadata = dict(_read_pair(cursor) for _ in range(num_pairs))
    cursor.require(num_tensors, 24)
    infos = [_read_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment={alignment!r} must be a positive whole number")
    data_start = -(-cursor.at // alignment) * alignment
    return metadata, {
        name: _placed(name, shape, kind, data_start + offset, len(data))
        for name, shape, kind, offset in infos
    }


def _read_pair(cursor: _Cursor) -> tuple[str, Any]:
    key = cursor.text()
    return key, cursor.value(cursor.number("I"))


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape, coding, offset in the data section)."""
    name, num_axes = cursor.text(), cursor.number("I")
    if num_axes > _MAX_AXES:
        raise ValueError(f"tensor {name!r:.80} has {num_axes} axes, more than {_MAX_AXES}")
    shape = tuple(cursor.number("Q") for _ in range(num_axes))[::-1]
    return name, shape, cursor.number("I"), cursor.number("Q")


def _placed(name: str, shape: tuple[int, ...], code: int, offset: int, file_len: int) -> GgufTensor:
    kind = GGMLQuantizationType(code)
    block_len, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in shape:
        raise ValueError(f"tensor {name!r:.80} of shape {shape} holds nothing")
    row_len = shape[-1] if shape else 1
    if row_len % block_len:
        raise ValueError(f"tensor {name!r}: rows of {row_len} don't fill blocks of {block_len}")
    num_bytes = math.prod(shape) // block_len * block_bytes
    if offset + num_bytes > file_len:
        raise ValueError(f"tensor {name!r} ends at byte {offset + num_bytes} of {file_len}")
    return GgufTensor(shape, kind, offset, num_bytes)
