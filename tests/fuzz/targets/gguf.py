"""GGUF files: whatever a header says, shape and tensors are read, or a ValueError names the file.

Knows nothing of kernels or engines.
"""

import struct
import tempfile
from pathlib import Path

import numpy as np
from test_support.fuzz_input import Choices

from zipage_lang.runtime.models.gguf_file import GgufFile, read_gguf_texts
from zipage_lang.runtime.models.registry import open_model

STRING, ARRAY = 8, 9
NUMBERS = {
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
SIZES = (0, 1, 2, 8, 32, 2**16, 2**31, 2**32, 2**63, 2**64 - 1)
KEYS = (
    "general.architecture",
    "general.alignment",
    "llama.embedding_length",
    "llama.block_count",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.key_length",
    "llama.feed_forward_length",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.rope.freq_base",
    "llama.rope.scaling.type",
    "llama.rope.scaling.factor",
    "llama.context_length",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.tokens",
)
WHOLE = {
    "general.architecture": (STRING, "llama"),
    "llama.embedding_length": (4, 8),
    "llama.block_count": (4, 1),
    "llama.attention.head_count": (4, 2),
    "llama.attention.head_count_kv": (4, 1),
    "llama.feed_forward_length": (4, 8),
    "llama.context_length": (4, 64),
    "tokenizer.ggml.eos_token_id": (4, 2),
}
TENSORS = ("token_embd.weight", "output_norm.weight", "rope_freqs.weight", "blk.0.attn_q.weight")
MAX_READ_VALUES = 1 << 16


def target(data: bytes) -> None:
    choices = Choices(data)
    content = choices.rest() if choices.flag() else choices.damaged(file_of(choices))
    with tempfile.TemporaryDirectory(prefix="fuzz-gguf-") as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(content)
        try:
            read(path)
        except ValueError as error:
            assert str(path) in str(error), error


def read(path: Path) -> None:
    file = GgufFile(path)
    for name, tensor in file.tensors.items():
        assert tensor.offset >= 0
        assert tensor.offset + tensor.num_bytes <= path.stat().st_size
        if np.prod(tensor.shape, dtype=float) <= MAX_READ_VALUES:
            values = file.read(name)
            assert values.shape == tensor.shape
            assert values.dtype == np.float32
    _, source = open_model(path)
    if "model.norm.weight" in source:
        assert len(source.shape("model.norm.weight")) <= 4
    read_gguf_texts(path, "tokenizer.ggml.tokens")


def file_of(choices: Choices) -> bytes:
    """A file much like a real one, some of whose parts are not what they should be."""
    pairs = dict(WHOLE)
    for _ in range(choices.below(4)):
        kind = choices.pick((*NUMBERS, STRING, ARRAY, 13, 4, 4))
        pairs[choices.pick(KEYS)] = (kind, choices.pick(SIZES))
    tensors = [(choices.pick(TENSORS), *shape_of(choices)) for _ in range(choices.below(4))]
    tensors = [("token_embd.weight", (8, 16), 0, 0), *tensors]
    head = b"GGUF" + struct.pack("<IQQ", choices.pick((3, 2, 1)), len(tensors), len(pairs))
    body = b"".join(text(key) + value(kind, held) for key, (kind, held) in pairs.items())
    infos = b"".join(
        text(name)
        + struct.pack("<I", len(shape))
        + b"".join(struct.pack("<Q", size) for size in shape)
        + struct.pack("<IQ", coding, offset)
        for name, shape, coding, offset in tensors
    )
    whole = head + body + infos
    return whole + b"\0" * (-len(whole) % 32) + b"\x11" * (512 + choices.below(64))


def shape_of(choices: Choices) -> tuple[tuple[int, ...], int, int]:
    """(shape, coding, offset)."""
    shape = tuple(choices.pick(SIZES) for _ in range(choices.below(5)))
    return shape, choices.below(40), choices.pick((0, 32, 64, 480, 2**63))


def text(word: str) -> bytes:
    return struct.pack("<Q", len(word)) + word.encode()


def value(kind: int, held: object) -> bytes:
    head = struct.pack("<I", kind)
    if kind == STRING:
        return head + text(str(held))
    if kind == ARRAY:
        return head + struct.pack("<IQ", STRING, 1) + text("a")
    code = NUMBERS.get(kind, "Q")
    if code in "fd":
        return head + struct.pack("<" + code, float(held))  # type: ignore[arg-type]
    size = struct.calcsize("<" + code)
    return head + (int(held) % 256**size).to_bytes(size, "little")  # type: ignore[call-overload]
