"""The C interface of the Hopper kernels: loading, argument types, errors as exceptions.

Knows nothing of tensors.
"""

import ctypes
import functools

import torch

from zipage_lang.kernels.hopper.build import HOPPER, KernelsUnavailableError, library_path
from zipage_lang.kernels.hopper.choose import MAX_CLUSTER

MAP_BYTES = 128  # of a CUtensorMap
MAP_ALIGNMENT = 64

_int, _pointer = ctypes.c_int, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[list[type], type]] = {
    "zl_weight_map": ([_pointer, _pointer, _int, _int], _int),
    "zl_linear": (
        [
            *(_pointer, _int, _int),  # weight
            *(_pointer, _int),  # x
            *(_pointer, _int, _pointer),  # out, bias
            *(_pointer, _int, _pointer),  # residual, out_squares
            *(_pointer, _int, ctypes.c_float),  # in_squares, eps
            *[_int] * 5,  # rows, gated, groups, splits, sharers
            _pointer,  # stream
        ],
        _int,
    ),
    "zl_pool_map": ([_pointer, _pointer, _int, _int], _int),
    "zl_max_clusters": ([_int] * 4, _int),
    "zl_attention": (
        [
            *(_pointer, _pointer, _int),  # map, q
            *[_pointer] * 2,  # out, lse
            *[_pointer] * 3,  # num_items, items, block_ids
            *[_pointer] * 4,  # queue, arrived, sums, stats
            *[_int] * 3,  # heads, group, dim
            ctypes.c_float,
            _int,  # num_ctas
            _pointer,  # stream
        ],
        _int,
    ),
    "zl_scoring": (
        [
            *[_pointer] * 7,  # keys, slots, positions, queries
            *[_pointer] * 2,  # mass, similarity
            *[_int] * 8,
            *[ctypes.c_float] * 2,
            _pointer,  # stream
        ],
        _int,
    ),
    "zl_error": ([_int], ctypes.c_char_p),
}


@functools.cache
def load() -> ctypes.CDLL:
    """The library with its functions' types declared.

    Raises KernelsUnavailableError off Hopper, or where there is no library and no compiler.
    """
    if not torch.cuda.is_available():
        raise KernelsUnavailableError("the Hopper kernels need an NVIDIA card and torch with CUDA")
    capability = torch.cuda.get_device_capability()
    if capability[0] != HOPPER:
        raise KernelsUnavailableError(f"the Hopper kernels need compute 9.0, not {capability}")
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailableError(f"{path} does not load here: {error}") from error
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


@functools.cache
def clusters_held() -> tuple[int, ...]:
    """How many clusters of each size, from 0, this card holds at once."""
    sizes = range(1, MAX_CLUSTER + 1)
    # Any kernel will do: each takes a whole SM. Below 0 it is an error: the size does not exist.
    counts = [load().zl_max_clusters(128, 2, size, 1) for size in sizes]
    return (0, *(max(0, count) for count in counts))


def is_available() -> bool:
    """Whether `load` would succeed; it may build the library."""
    try:
        load()
    except KernelsUnavailableError:
        return False
    return True


def check(code: int) -> None:
    """Raise RuntimeError with the library's own words unless code is 0."""
    if code != 0:
        raise RuntimeError(f"Hopper kernel: {load().zl_error(code).decode()} (code {code})")


class TensorMap:
    """A tensor map in host memory aligned as the driver asks."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
        start = ctypes.addressof(self._memory)
        self.address = start + -start % MAP_ALIGNMENT


def weight_map(address: int, num_rows: int, num_columns: int) -> TensorMap:
    """Of bfloat16 [num_rows, num_columns] at `address` on the card, contiguous."""
    made = TensorMap()
    check(load().zl_weight_map(made.address, address, num_rows, num_columns))
    return made


def pool_map(address: int, num_rows: int, num_columns: int) -> TensorMap:
    """Of a layer's keys and values at `address`: bfloat16 [num_rows, num_columns], contiguous."""
    made = TensorMap()
    check(load().zl_pool_map(made.address, address, num_rows, num_columns))
    return made
