"""Text or chat messages to token ids and back, by the model's own tokenizer (transformers').

Knows nothing of requests, engines or streams of output.
"""

import functools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zipage_lang.frontend.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from zipage_lang.frontend.template_bounds import bounded_rendering, check_text


class Tokenizer:
    """A fast tokenizer of the transformers library. Safe to use from several threads at once."""

    def __init__(self, pretrained: Any) -> None:
        if getattr(pretrained, "backend_tokenizer", None) is None:
            raise ValueError(
                f"{type(pretrained).__name__} is no fast tokenizer; give a model folder with a "
                "tokenizer.json"
            )
        self._pretrained = pretrained
        # transformers' own call changes truncation and padding each time, which is not safe from
        # two threads; the backend below is set once and then only read.
        self._backend = pretrained.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_token_ids = frozenset(
            token_id for token_id, token in pretrained.added_tokens_decoder.items() if token.special
        )
        self._character_bytes = _byte_of_character() if _is_byte_level(self._backend) else {}
        self._bytes_cache: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """Tokens the tokenizer knows; the model's own vocabulary may be padded beyond."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @functools.cached_property
    def longest_token_len(self) -> int:
        """Characters of the longest token, as the vocabulary writes it."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @property
    def bos_token_id(self) -> int | None:
        return self._pretrained.bos_token_id  # type: ignore[no-any-return]

    @property
    def eos_token_ids(self) -> list[int]:
        """The tokenizer's own; `Ready.eos_token_ids` is what the engine ends at."""
        eos = self._pretrained.eos_token_id
        return [] if eos is None else [eos]

    @property
    def has_chat_template(self) -> bool:
        return bool(self._pretrained.chat_template)

    @property
    def chat_template(self) -> str | None:
        """The template that `render_chat` uses, as its author wrote it; None without one."""
        return self._pretrained.get_chat_template() if self.has_chat_template else None

    @property
    def special_tokens(self) -> dict[str, str]:
        """Which token plays which part: "eos_token", "bos_token", "pad_token" and their like."""
        named = self._pretrained.special_tokens_map.items()
        return {name: str(token) for name, token in named if name.endswith("_token")}

    def files(self) -> dict[str, str]:
        """What `load_tokenizer` reads from a folder: file names and their texts."""
        with tempfile.TemporaryDirectory(prefix="zipage-tokenizer-") as folder:
            self._pretrained.save_pretrained(folder)
            paths = [path for path in Path(folder).iterdir() if path.is_file()]
            return {path.name: path.read_text(encoding="utf-8") for path in paths}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` as in transformers (say, a leading BOS)."""
        try:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise _bad_text_error(text) from error
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole list of token ids; ids that the tokenizer does not know give nothing."""
        text = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_id(self, token: str) -> int | None:
        """Id of one vocabulary entry such as "<|im_end|>"; None where there is none."""
        return self._backend.token_to_id(token)  # type: ignore[no-any-return]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text (special tokens: their name). Byte-level only."""
        known = self._bytes_cache.get(token_id)
        if known is None:
            known = self._bytes_cache[token_id] = self._spell(token_id)
        return known

    def new_detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental detokenizer for one sample."""
        if not self._character_bytes:
            left_out = self.special_token_ids if skip_special_tokens else frozenset()
            return WindowDetokenizer(
                lambda ids: self.decode(ids, skip_special_tokens),
                lambda id_: id_ in left_out or self._backend.id_to_token(id_) is None,
            )
        if skip_special_tokens:
            return ByteDetokenizer(self._ordinary_token_bytes)
        return ByteDetokenizer(self.token_bytes)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_values: Any,
    ) -> str:
        """The messages as one text, by the model's own chat template.

        The template writes special tokens itself: encode the result with add_special_tokens=False.
        Raises ValueError where the model has no template or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise ValueError(
                "this model's tokenizer has no chat template; pass a plain prompt, or use an "
                "instruct or chat version of the model"
            )
        try:
            with bounded_rendering():
                rendered = self._pretrained.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=None if tools is None else [dict(tool) for tool in tools],
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt and not continue_final_message,
                    continue_final_message=continue_final_message,
                    **template_values,
                )
            return check_text(str(rendered))
        except Exception as error:  # jinja's own errors, and whatever a template's code runs into
            raise ValueError(f"the chat template refused the messages: {error}") from error

    def _ordinary_token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self.special_token_ids else self.token_bytes(token_id)

    def _spell(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(self._character_bytes[character] for character in token)
        except KeyError:  # an added token: its name is the text itself
            return str(token).encode()


def load_tokenizer(model_path: str | Path) -> Tokenizer:
    """The tokenizer beside a model: a folder with tokenizer files, or a GGUF file.

    Raises ValueError where there is none or it can't be read.
    """
    path = Path(model_path)
    try:
        pretrained = _of_gguf(path) if path.suffix == ".gguf" else _of_folder(path)
    except Exception as error:  # the library raises many kinds for a missing or broken file
        raise ValueError(
            f"no tokenizer could be loaded from {path}: {_first_line(error)}; the folder needs "
            "tokenizer.json and tokenizer_config.json, or give a GGUF file"
        ) from error
    return Tokenizer(pretrained)


def _of_folder(folder: Path) -> Any:
    from transformers import AutoTokenizer  # takes seconds and imports torch: only when needed

    # None instead of False would ask on the terminal whether to run a model's own code.
    return AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )


def _of_gguf(path: Path) -> Any:
    """The file says all; AutoTokenizer would first read it whole, in seconds, to choose a class."""
    from transformers import PreTrainedTokenizerFast  # as above

    return PreTrainedTokenizerFast.from_pretrained(
        str(path.parent), gguf_file=path.name, local_files_only=True, trust_remote_code=False
    )


def _bad_text_error(text: Any) -> ValueError:
    """Why a tokenizer did not take `text`."""
    if not isinstance(text, str):
        return ValueError(f"text={text!r:.80} must be a string, not {type(text).__name__}")
    place = next(index for index, character in enumerate(text) if "\ud800" <= character <= "\udfff")
    return ValueError(
        f"the text has a lone surrogate at character {place}, which no tokenizer takes; clean it "
        "with text.encode('utf-8', 'replace').decode()"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _is_byte_level(backend: Any) -> bool:
    decoder = json.loads(backend.to_str()).get("decoder")
    return decoder is not None and decoder["type"] == "ByteLevel"


def _byte_of_character() -> dict[str, int]:
    """The printable character that byte-level vocabularies write for each byte (GPT-2's table).

    Printable Latin-1 bytes stand for themselves; the others follow in order from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}
