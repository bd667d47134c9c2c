"""What a model is, read from its files without loading it.

Knows nothing of engines or of how facts are printed.
"""

import dataclasses
import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zipage_lang.commands.units import binary, decimal
from zipage_lang.runtime.config import CompressionConfig
from zipage_lang.runtime.model_shapes import MODEL_SHAPES
from zipage_lang.runtime.model_store import resolve_model
from zipage_lang.runtime.models.config import ArchConfig
from zipage_lang.runtime.models.gguf_file import GgufFile
from zipage_lang.runtime.models.registry import open_model, open_shape

BYTES = {"bfloat16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A model; `path` and what files alone tell are None for a shape with random weights."""

    name: str
    path: Path | None
    arch: ArchConfig
    num_parameters: int
    file_bytes: int | None
    template: str | None  # "": it has none

    def lines(self) -> Iterator[tuple[str, str]]:
        """(what, value) as they are shown."""
        arch = self.arch
        yield "path", str(self.path or "no weights; runs with --load-format dummy")
        yield "architecture", arch.architecture
        size = "" if self.file_bytes is None else f"; files {binary(self.file_bytes)}"
        yield "parameters", f"{decimal(self.num_parameters)}{size}"
        yield (
            "layers",
            f"{arch.num_layers} of {arch.num_q_heads} query and {arch.num_kv_heads} KV heads, "
            f"{arch.head_dim} wide; hidden size {arch.hidden_size}",
        )
        yield "vocabulary", f"{arch.vocab_size:,} tokens"
        yield "context", f"{arch.max_position:,} tokens"
        for dtype, num_bytes in BYTES.items():
            yield f"in {dtype}", self._memory(num_bytes)
        if self.template is not None:
            yield "chat template", _template_line(self.template)

    def _memory(self, num_bytes: int) -> str:
        arch = self.arch
        per_token = 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * num_bytes
        usual = CompressionConfig()
        tail_len = usual.kv_budget + usual.evict_interval
        bounded = f", a tail of K+E={tail_len:,} {binary(tail_len * per_token)}"
        return (
            f"weights {binary(self.num_parameters * num_bytes)}; KV {binary(per_token)} a token, a "
            f"full context {binary(arch.max_position * per_token)}"
            f"{bounded if tail_len < arch.max_position else ''}"
        )


def facts_of(name: str) -> ModelFacts:
    """Of a name as `--model` takes it, or of a published shape. Raises ValueError."""
    key = name.rsplit("/", 1)[-1].lower()
    if key in MODEL_SHAPES and not Path(name).exists():
        arch = open_shape(name)
        return ModelFacts(
            name=key,
            path=None,
            arch=arch,
            num_parameters=_parameters_of(arch),
            file_bytes=None,
            template=None,
        )
    try:
        path = resolve_model(name)
    except ValueError as error:
        near = difflib.get_close_matches(key, MODEL_SHAPES, n=1)
        if not near:
            raise
        raise ValueError(f"{error}; did you mean {near[0]!r}?") from error
    arch, _ = open_model(path)
    return ModelFacts(
        name=name,
        path=path,
        arch=arch,
        num_parameters=_parameters_of(arch),
        file_bytes=_file_bytes(path),
        template=_template(path),
    )


def _parameters_of(arch: ArchConfig) -> int:
    q_size, kv_size = arch.num_q_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    attention = arch.hidden_size * (2 * q_size + 2 * kv_size)
    mlp = 3 * arch.hidden_size * arch.intermediate_size
    tables = arch.vocab_size * arch.hidden_size * (1 if arch.tie_embeddings else 2)
    norms = (2 * arch.num_layers + 1) * arch.hidden_size
    return arch.num_layers * (attention + mlp) + tables + norms


def _file_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _template(path: Path) -> str:
    """The chat template's text; "" where there is none."""
    if path.suffix == ".gguf":
        return str(GgufFile(path).metadata.get("tokenizer.chat_template") or "")
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = path / "tokenizer_config.json"
    settings: Any = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return str(settings.get("chat_template") or "")


def _template_line(template: str) -> str:
    if not template:
        return "none: it continues texts (`zipage generate --raw`)"
    extras = [
        what for what, sign in (("thinking", "think"), ("tools", "tools")) if sign in template
    ]
    return "yes" + (f", with {' and '.join(extras)}" if extras else "")
