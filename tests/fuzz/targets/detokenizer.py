"""Tokens streamed in any cuts, against the whole decode: byte-level, characters, byte fallback.

Knows nothing of engines.
"""

import functools
from pathlib import Path
from typing import Any

from test_support.byte_fallback import byte_fallback_bpe
from test_support.fuzz_input import Choices
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import zipage_lang
from zipage_lang.frontend.detokenizer import REPLACEMENT, WindowDetokenizer
from zipage_lang.frontend.tokenizer import Tokenizer, load_tokenizer

REASONER = Path(zipage_lang.__file__).parent / "data" / "zipage-tiny-reasoner"
TEXTS = ["The fox, über 你好世界 👋🏽 <|im_end|> {'a': 1}", "naïve größer 日本語のテキスト"] * 8


@functools.cache
def byte_level() -> Tokenizer:
    """As SmolLM2's and Qwen's: tokens are runs of bytes, so a character may straddle several."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|eos|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>"))


@functools.cache
def byte_fallback() -> Tokenizer:
    backend = byte_fallback_bpe(("<unk>", "<s>", "</s>"))
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )
    )


@functools.cache
def characters() -> Tokenizer:
    """The tiny reasoner's: one character a token."""
    return load_tokenizer(REASONER)


KINDS = (byte_level, byte_fallback, characters)


def target(data: bytes) -> None:
    choices = Choices(data)
    tokenizer = choices.pick(KINDS)()
    skip = choices.flag()
    if choices.flag():
        text = choices.text(120).encode("utf-8", "ignore").decode()
        token_ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        most = tokenizer.vocab_size + 3  # a model's vocabulary may be padded beyond the tokenizer's
        token_ids = [choices.below(most) for _ in range(choices.below(100))]
    detokenizer = tokenizer.new_detokenizer(skip)
    shown = ""
    for piece in cut(choices, token_ids):
        shown += detokenizer.feed(piece)
        assert len(shown) <= len(tokenizer.decode(token_ids, skip)) + 8
    shown += detokenizer.flush()
    whole = tokenizer.decode(token_ids, skip)
    if shown != whole:
        assert isinstance(detokenizer, WindowDetokenizer), (shown, whole)
        assert is_same_but_for_broken_bytes(shown, whole), (shown, whole)


def cut(choices: Choices, token_ids: list[int]) -> list[list[int]]:
    pieces, at = [], 0
    while at < len(token_ids):
        size = 1 + choices.below(4)
        pieces.append(token_ids[at : at + size])
        at += size
    return pieces


def is_same_but_for_broken_bytes(shown: str, whole: str) -> bool:
    """A decoder that marks a whole run of bytes once one proves broken can't take back what was
    shown of the run; all outside of such runs must be equal.
    """
    if REPLACEMENT not in whole:
        return False
    parts: list[Any] = [part for part in whole.split(REPLACEMENT) if part]
    at = 0
    for part in parts:
        at = shown.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True
