"""What a model is asked, so that its own text is like what it writes in use: prompts as token ids.

Knows nothing of what is measured on that text.
"""

import importlib.resources
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROMPTS_FILE = "calibration.jsonl"  # beside a model: prompts of the kind that it is made for


def read_prompts(file: Path) -> list[str]:
    """JSON lines, `{"prompt": ...}` each; other keys are ignored.

    Raises ValueError that names file and line, OSError where there is no file.
    """
    prompts = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}, line {number}: not JSON ({error})") from error
        prompt = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f'{file}, line {number}: must be {{"prompt": "..."}} with some text')
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{file}: it holds no prompts")
    return prompts


def prompts_for(model_path: Path) -> list[str]:
    """Those beside the model, else general ones. model_path: its folder, or a GGUF file."""
    folder = model_path if model_path.is_dir() else model_path.parent
    if (folder / PROMPTS_FILE).is_file():
        return read_prompts(folder / PROMPTS_FILE)
    package = Path(str(importlib.resources.files("zipage_lang")))
    return read_prompts(package / "data" / "calibration" / "prompts.jsonl")


def as_starts(model_path: Path, prompts: Sequence[str], vocab_size: int) -> list[list[int]]:
    """Token ids of each prompt as one user message, or as plain text without a chat template.

    Raises ValueError where the model has no tokenizer that can be read, or one of another model.
    """
    try:
        tokenizer = _load_tokenizer(model_path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{model_path}: no tokenizer could be read ({error})") from error
    starts = [_encoded(tokenizer, prompt) for prompt in prompts]
    for prompt, start in zip(prompts, starts, strict=True):
        if not start or max(start) >= vocab_size:
            raise ValueError(
                f"{model_path}: its tokenizer makes {start[:8]} of {prompt[:40]!r}, the model "
                f"knows {vocab_size} tokens; put the model's own tokenizer there"
            )
    return starts


def _encoded(tokenizer: Any, prompt: str) -> list[int]:
    if not tokenizer.chat_template:
        return list(tokenizer.encode(prompt))
    message = {"role": "user", "content": prompt}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def _load_tokenizer(model_path: Path) -> Any:
    import transformers  # takes seconds, and most engines never calibrate

    if model_path.suffix == ".gguf":
        folder, name = str(model_path.parent), model_path.name
        return transformers.PreTrainedTokenizerFast.from_pretrained(
            folder, gguf_file=name, local_files_only=True, trust_remote_code=False
        )
    return transformers.AutoTokenizer.from_pretrained(
        str(model_path), local_files_only=True, trust_remote_code=False
    )
