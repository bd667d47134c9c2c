"""Writes solutions with the full KV cache, many problems at once, and scores their answers.

All sequences stand at the same position in each step: prompts are fed token by token, and what is
drawn is used from where a sequence's prompt ends. So attention needs no mask. Knows nothing of
training, and of engines and compression.
"""

import dataclasses
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from reasoner import Reasoner
from tokenizer import BOS_ID, CHARACTERS, EOS_ID, SPECIAL_TOKENS, encode_text
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

LOOK_EVERY = 64  # steps between looks at who has ended; each look waits for the device
WORTH_SHRINKING = 0.75  # share of sequences still going below which the ended ones are dropped


@dataclasses.dataclass(frozen=True)
class Written:
    """What the model wrote behind one prompt."""

    text: str
    has_ended: bool  # by itself, not by the context's end or the time limit


class _Sequences:
    """Tokens and KV cache of all sequences that go on; rows are sequences."""

    def __init__(self, model: Reasoner, prompts: Sequence[bytes]) -> None:
        shape, device = model.shape, model.cos.device
        num, context = len(prompts), shape.context
        cache_shape = (shape.num_layers, 2, num, shape.num_kv_heads, context, shape.head_dim)
        self.cache = torch.zeros(cache_shape, dtype=model.compute_dtype, device=device)
        tokens = torch.zeros(num, context + 1, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(list(prompt))
        self.tokens = tokens.to(device)  # [num, context + 1]
        self.prompt_lens = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.ended = torch.zeros(num, dtype=torch.bool, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.rows = torch.arange(num, device=device)  # places in the order of the prompts

    def keep(self, kept: Tensor) -> None:
        """Drop all sequences but those at the places `kept`."""
        self.cache = self.cache[:, :, kept]
        self.tokens, self.prompt_lens = self.tokens[kept], self.prompt_lens[kept]
        self.ended, self.rows = self.ended[kept], self.rows[kept]


@torch.inference_mode()
def write_solutions(
    model: Reasoner, prompts: Sequence[str], temperature: float, seed: int, limit_s: float
) -> list[Written]:
    """Sample one text per prompt, up to the context's end or `limit_s` seconds.

    model: with parameters in its compute dtype. temperature: above 0.
    """
    generator = torch.Generator(model.cos.device).manual_seed(seed)
    encoded = [bytes([BOS_ID]) + encode_text(prompt) for prompt in prompts]
    sequences = _Sequences(model, encoded)
    texts = sequences.tokens.clone()  # [num_prompts, context + 1]
    started = time.monotonic()
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        for place in range(model.shape.context):
            sequences.place.fill_(place)
            _write_one(model, sequences, place, temperature, generator)
            if (place + 1) % LOOK_EVERY and place + 1 < model.shape.context:
                continue
            texts[sequences.rows] = sequences.tokens
            going = (~sequences.ended).nonzero().squeeze(1)
            if going.numel() == 0 or time.monotonic() - started > limit_s:
                break
            if going.numel() < WORTH_SHRINKING * sequences.rows.numel():
                sequences.keep(going)
    return [_cut(row[len(prompt) :]) for row, prompt in zip(texts.tolist(), encoded, strict=True)]


def _write_one(
    model: Reasoner,
    sequences: _Sequences,
    place: int,
    temperature: float,
    generator: torch.Generator,
) -> None:
    """Feed every sequence's token at `place` and put a drawn one behind it."""
    x = model.embed_tokens(sequences.tokens[:, place])  # [num, hidden_size]
    cos, sin = model.rotary(sequences.place)  # [1, head_dim / 2] each
    for layer, (keys, values) in zip(model.layers, sequences.cache, strict=True):
        q, k, v = layer.self_attn.heads(layer.input_layernorm(x), cos, sin)
        keys[:, :, place], values[:, :, place] = k, v
        attended = F.scaled_dot_product_attention(
            q.unsqueeze(2),  # [num, num_q_heads, 1, head_dim]
            keys[:, :, : place + 1],
            values[:, :, : place + 1],
            enable_gqa=True,
        )
        x = layer.finish(x, attended.squeeze(2))
    probabilities = torch.softmax(model.logits(x) / temperature, dim=-1)
    drawn = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)  # [num]
    following = sequences.tokens[:, place + 1]
    is_own = sequences.prompt_lens <= place + 1
    sequences.tokens[:, place + 1] = torch.where(is_own, drawn, following)
    sequences.ended |= is_own & (drawn == EOS_ID)


def _cut(ids: list[int]) -> Written:
    has_ended = EOS_ID in ids
    own = ids[: ids.index(EOS_ID)] if has_ended else ids
    first = len(SPECIAL_TOKENS)
    text = "".join(
        CHARACTERS[token_id - first] for token_id in own if 0 <= token_id - first < len(CHARACTERS)
    )
    return Written(text, has_ended)
