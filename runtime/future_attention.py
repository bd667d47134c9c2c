"""What later queries of a text will have paid to its tokens: attention maxima, and samples of them.

Knows nothing of how a forecast is fitted or kept.
"""

import dataclasses

import torch
from torch import Tensor

from zipage_lang.kernels.reference.fused_ops import turn_back
from zipage_lang.runtime.written_text import TextWriter

MIN_DISTANCE = 2  # tokens ahead; what a token and its successor pay to a key says little of later
NUM_NEWEST = 128  # half of the places are drawn from this many tokens before a boundary
_GRACE_LEN = 16  # tokens that a text must go on for after a boundary
_FLOOR = 1e-3  # added to an attention before its logarithm
_SCRATCH_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Samples:
    """Slots as they were at some moment, and what came later. Host tensors."""

    key: Tensor  # [num_layers, num_samples, num_kv_heads, head_dim], before its rotation
    value: Tensor  # [num_layers, num_samples, num_kv_heads, head_dim]
    # float32 [num_layers, num_samples, num_kv_heads]: log(0.001 + highest later attention)
    target: Tensor
    age: Tensor  # float32 [num_samples], log(1 + tokens since)
    sequence: Tensor  # int64 [num_samples], which text it is of


def block_maxima(
    keys: Tensor, queries: Tensor, first_position: int, lens: Tensor, scale: float
) -> Tensor:
    """The highest attention that one block of queries pays to each token.

    Maximum over the queries at MIN_DISTANCE or more from the key and over a KV head's query heads;
    queries at or behind a sequence's end do not count. Scratch is bounded by taking few sequences
    at a time.

    Args:
        keys: [num_sequences, num_seen, num_kv_heads, head_dim], after RoPE, by position.
        queries: [num_sequences, block_len, num_q_heads, head_dim], after RoPE, by position.
        first_position: of the block's first query.
        lens: int64 [num_sequences].

    Returns: float32 [num_sequences, num_kv_heads, num_seen], 0 where no query counts.
    """
    num_seen, (block_len, num_q_heads) = keys.shape[1], queries.shape[1:3]
    step = max(1, _SCRATCH_BYTES // (4 * num_q_heads * block_len * num_seen))
    parts = [slice(first, first + step) for first in range(0, len(keys), step)]
    return torch.cat(
        [_maxima(keys[part], queries[part], first_position, lens[part], scale) for part in parts]
    )


@torch.inference_mode()
def collect_samples(
    writer: TextWriter, frequencies: Tensor, samples_each: int, generator: torch.Generator
) -> Samples:
    """Write the texts to their end and sample slots at each boundary between blocks of queries.

    A block is as long as the writer's ring, and the texts' length is a multiple of it.

    Args:
        frequencies: float32 [head_dim / 2], on the writer's device.
        samples_each: slots per text and boundary.
        generator: a host one.
    """
    block_len = writer.cache.window
    num_blocks, rest = divmod(writer.max_len, block_len)
    assert rest == 0, f"{writer.max_len} tokens are no multiple of {block_len}"
    boundaries, slots = _draw_places(
        writer.num_sequences, num_blocks, block_len, samples_each, generator
    )
    slots = slots.to(writer.lens.device)
    highest = _write_and_watch(writer, num_blocks, slots, samples_each)
    goes_on = boundaries + min(_GRACE_LEN, block_len) <= writer.lens.cpu()[:, None]
    return _taken(writer, frequencies, boundaries, slots, highest, goes_on)


def _maxima(
    keys: Tensor, queries: Tensor, first_position: int, lens: Tensor, scale: float
) -> Tensor:
    num_sequences, num_seen, num_kv_heads, head_dim = keys.shape
    block_len = queries.shape[1]
    grouped = queries.float().view(num_sequences, block_len, num_kv_heads, -1, head_dim)
    grouped = grouped.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [num_sequences, heads, group * block]
    logits = grouped @ keys.float().permute(0, 2, 3, 1) * scale
    logits = logits.unflatten(2, (-1, block_len))  # [.., num_kv_heads, group, block_len, num_seen]
    places = first_position + torch.arange(block_len, device=keys.device)
    distance = places[:, None] - torch.arange(num_seen, device=keys.device)  # [block_len, num_seen]
    shares = logits.masked_fill_(distance < 0, -torch.inf).softmax(-1).amax(2)
    counts = (distance >= MIN_DISTANCE) & (places < lens[:, None])[..., None]
    return shares.masked_fill_(~counts[:, None], 0.0).amax(2)


def _draw_places(
    num_sequences: int,
    num_blocks: int,
    block_len: int,
    samples_each: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Boundaries [num_places], rising, and slots [num_sequences, num_places] before them."""
    boundaries = torch.arange(1, num_blocks).repeat_interleave(samples_each) * block_len
    is_newer = torch.arange(len(boundaries)) % 2 == 0
    num_choices = torch.where(is_newer, boundaries.clamp(max=NUM_NEWEST), boundaries)
    uniform = torch.rand((num_sequences, len(boundaries)), generator=generator, dtype=torch.float64)
    return boundaries, boundaries - 1 - (uniform * num_choices).long()


def _write_and_watch(
    writer: TextWriter, num_blocks: int, slots: Tensor, samples_each: int
) -> Tensor:
    """The highest attention paid to each slot behind its boundary, while the texts are written.

    Returns: float32 [num_layers, num_sequences, num_kv_heads, num_places].
    """
    shape, block_len = writer.cache.shape, writer.cache.window
    by_head = slots[:, None].expand(-1, shape.num_kv_heads, -1)
    highest = torch.zeros((shape.num_layers, *by_head.shape), device=slots.device)
    for block in range(num_blocks):
        for _ in range(block_len):
            writer.write()
        num_open = block * samples_each  # places whose boundary is behind us
        if num_open == 0:
            continue
        for layer in range(shape.num_layers):
            found = block_maxima(
                writer.keys(layer),
                writer.ring(layer),
                block * block_len,
                writer.lens,
                shape.head_dim**-0.5,
            )
            seen = highest[layer, ..., :num_open]
            torch.maximum(seen, found.gather(2, by_head[..., :num_open]), out=seen)
        if writer.all_ended():
            break
    return highest


def _taken(
    writer: TextWriter,
    frequencies: Tensor,
    boundaries: Tensor,
    slots: Tensor,
    highest: Tensor,
    goes_on: Tensor,
) -> Samples:
    """The samples of the places whose text goes on. goes_on: bool [num_sequences, num_places]."""
    sequence, place = goes_on.nonzero(as_tuple=True)  # [num_samples] each, host
    of, at = sequence.to(slots.device), place.to(slots.device)
    slot = slots[of, at]
    angles = slot[:, None, None].float() * frequencies  # [num_samples, 1, head_dim / 2]
    keys, values, targets = [], [], []
    for layer in range(writer.cache.shape.num_layers):
        rotated = writer.keys(layer)[of, slot]  # [num_samples, num_kv_heads, head_dim]
        keys.append(turn_back(rotated.float(), angles).to(rotated.dtype).cpu())
        values.append(writer.values(layer)[of, slot].cpu())
        targets.append((highest[layer].transpose(1, 2)[of, at] + _FLOOR).log().cpu())
    age = (boundaries[place] - slot.cpu()).float().log()
    return Samples(torch.stack(keys), torch.stack(values), torch.stack(targets), age, sequence)
