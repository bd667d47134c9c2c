"""A tokenizer as Llama 2's: a mark for the leading space, byte tokens for what is unknown.

Knows nothing of what is tested with it.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def byte_fallback_bpe(specials: Sequence[str] = ("<unk>",)) -> Tokenizer:
    """specials: its first tokens; "<unk>" is among them."""
    words = ["\u2581", *"abcdefghijklmnopqrstuvwxyz,.!", "\u2581the", "\u2581a", "he"]
    names = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {name: index for index, name in enumerate(names)}
    merges = [("h", "e"), ("\u2581", "a")]
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made
