"""The bytes each token stands for, read from the files beside a model.

Knows nothing of grammars, of requests, or of how text becomes tokens elsewhere.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zipage_lang.runtime.models.gguf_file import read_gguf_texts

WORD_START = "\u2581"  # how SentencePiece vocabularies write a space
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types
_UNUSED = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """pieces[i]: what token i adds to a text, for a special token its name; b"" for no token.

    ids: the lowest token of each piece.
    """

    pieces: tuple[bytes, ...]
    special: frozenset[int]
    ids: dict[bytes, int] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids: dict[bytes, int] = {}
        for token_id, piece in enumerate(self.pieces):
            ids.setdefault(piece, token_id)
        ids.pop(b"", None)
        object.__setattr__(self, "ids", ids)

    @property
    def texts(self) -> tuple[bytes, ...]:
        """What each token writes: a special one nothing, as it is never text of a grammar."""
        return tuple(
            b"" if token_id in self.special else piece for token_id, piece in enumerate(self.pieces)
        )

    def spell(self, data: bytes) -> tuple[int, ...]:
        """Tokens whose pieces make up `data`: always the longest that fits (special ones too).

        Raises ValueError where no token fits.
        """
        found, at = [], 0
        while at < len(data):
            ends = range(len(data), at, -1)
            end = next((end for end in ends if data[at:end] in self.ids), None)
            if end is None:
                raise ValueError(f"the model has no token for {data[at : at + 8]!r}")
            found.append(self.ids[data[at:end]])
            at = end
        return tuple(found)

    def bytes_of(self, token_ids: Sequence[int]) -> bytes:
        """The tokens' pieces, joined. Raises ValueError for an id that is no token."""
        for token_id in token_ids:
            if token_id >= len(self.pieces):
                raise ValueError(
                    f"token id {token_id} is outside the vocabulary of {len(self.pieces)}"
                )
        return b"".join(self.pieces[token_id] for token_id in token_ids)


def load_vocabulary(model_path: Path, vocab_size: int) -> Vocabulary:
    """The vocabulary beside a model, padded or cut to the model's own size.

    Args:
        model_path: a folder with tokenizer.json, or a GGUF file.
        vocab_size: width of the model's logits.
    Raises ValueError, with the path, where there is none or it can't be read.
    """
    try:
        if model_path.suffix == ".gguf":
            pieces, special = _read_gguf(model_path)
        else:
            pieces, special = _read_folder(model_path / "tokenizer.json")
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"grammars and thinking control need the model's vocabulary, which can't be read from "
            f"{model_path}: {error!r}; put the model's tokenizer.json there"
        ) from error
    listed = tuple(pieces.get(token_id, b"") for token_id in range(vocab_size))
    return Vocabulary(listed, frozenset(special))


def _read_folder(path: Path) -> tuple[dict[int, bytes], set[int]]:
    described = json.loads(path.read_text(encoding="utf-8"))
    vocab = described["model"]["vocab"]
    names = vocab if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}
    kinds = json.dumps(described.get("decoder") or {})
    if '"ByteLevel"' in kinds:
        spelled = _byte_level(names)
    elif '"ByteFallback"' in kinds or '"Metaspace"' in kinds:
        spelled = _sentence_pieces(names)
    else:
        spelled = {token_id: name.encode() for name, token_id in names.items()}
    special = set()
    for added in described.get("added_tokens", ()):
        spelled[added["id"]] = added["content"].encode()
        if added["special"]:
            special.add(added["id"])
    return spelled, special


def _read_gguf(path: Path) -> tuple[dict[int, bytes], set[int]]:
    metadata, texts = read_gguf_texts(path, "tokenizer.ggml.tokens")
    names = {name: token_id for token_id, name in enumerate(texts)}
    types: Sequence[Any] = metadata.get("tokenizer.ggml.token_type") or [1] * len(texts)
    is_byte_level = metadata.get("tokenizer.ggml.model") == "gpt2"
    spelled = _byte_level(names) if is_byte_level else _sentence_pieces(names)
    special = set()
    for token_id, (name, kind) in enumerate(zip(texts, types, strict=True)):
        if kind in (_CONTROL, _USER_DEFINED):
            spelled[token_id] = name.encode()
        if kind == _CONTROL:
            special.add(token_id)
        if kind == _UNUSED:
            spelled[token_id] = b""
    return spelled, special


def _byte_level(names: Mapping[str, int]) -> dict[int, bytes]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    table |= {chr(0x100 + index): byte for index, byte in enumerate(hidden)}
    return {
        token_id: bytes(table[character] for character in name)
        if all(character in table for character in name)
        else name.encode()
        for name, token_id in names.items()
    }


def _sentence_pieces(names: Mapping[str, int]) -> dict[int, bytes]:
    spelled = {}
    for name, token_id in names.items():
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            spelled[token_id] = bytes([int(name[3:5], 16)])
        else:
            spelled[token_id] = name.replace(WORD_START, " ").encode()
    return spelled
