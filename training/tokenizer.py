"""The tiny reasoner's tokenizer: one token per ASCII character, in the transformers format.

Knows nothing of problem families, models or training.

    python training/tokenizer.py FOLDER

The vocabulary is byte-level without merges, so our frontend streams it at constant cost. A byte
that is no printable ASCII character and no newline becomes `<unk>`.
"""

import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
CHARACTERS = "\n" + "".join(map(chr, range(0x20, 0x7F)))
VOCAB_SIZE = 128  # of the model: 100 tokens, padded to a multiple of 64
CONTEXT_LEN = 4096

# A user message is a prompt as the families write it: it ends with one newline.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == "user" -%}
{{- bos_token + message.content.rstrip("\\n") + "\\n" -}}
{%- elif message.role == "assistant" -%}
{{- message.content + eos_token -}}
{%- else -%}
{{- raise_exception("this model knows user and assistant messages, no " + message.role) -}}
{%- endif -%}
{%- endfor -%}"""

_ID_OF_BYTE = bytearray([UNK_ID] * 256)
for _token_id, _character in enumerate(CHARACTERS, start=len(SPECIAL_TOKENS)):
    _ID_OF_BYTE[ord(_character)] = _token_id


def encode_text(text: str) -> bytes:
    """Token ids of a text, one byte each, as the tokenizer gives them without special tokens.

    Thousands of times as fast as the tokenizer. Raises UnicodeEncodeError for text beyond ASCII.
    """
    return text.encode("ascii").translate(bytes(_ID_OF_BYTE))


def build_tokenizer() -> Tokenizer:
    """The tokenizer as the tokenizers library has it; puts `<bos>` in front by default."""
    names = [_byte_level_name(character) for character in CHARACTERS]
    vocab = {token: token_id for token_id, token in enumerate([*SPECIAL_TOKENS, *names])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS_ID)]
    )
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    pretrained = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=CONTEXT_LEN,
        clean_up_tokenization_spaces=False,
    )
    pretrained.chat_template = CHAT_TEMPLATE
    pretrained.save_pretrained(str(folder))


def _byte_level_name(character: str) -> str:
    """How byte-level vocabularies write a character: space and newline have other letters."""
    return {" ": "\u0120", "\n": "\u010a"}.get(character, character)


if __name__ == "__main__":
    write_tokenizer(Path(sys.argv[1]))
