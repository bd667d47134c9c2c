"""Which of FlashInfer's two kernels attends to a step's prompts: what each would read, weighed.

Nothing depends on it but speed. Knows nothing of kernels, devices or blocks.
"""

import numpy as np

# In keys that a multiprocessor takes, one after the other. Measured on an H200 over 700 batches and
# two sizes of heads (`benchmarks/card/prompt_ways.py`): the choices take 1.002 to 1.004 times what
# the faster kernel of each batch takes.
ITEM_KEYS = 300  # what a work item of Hopper's kernel costs beside its own
GENERAL_RATIO = 1.6  # how much longer the general kernel takes for a key
GENERAL_KEYS = 2000  # and for its start and its splits
GENERAL_TILE_ROWS = 128  # tokens times the query heads of a KV head


def is_for_hopper(
    q_lens: np.ndarray,
    kv_lens: np.ndarray,
    num_q_heads: int,
    num_kv_heads: int,
    tile_tokens: int,
    num_sms: int,
) -> bool:
    """Whether Hopper's kernel is the faster one.

    The general one takes all query heads of a KV head together and splits long sequences, which is
    better for few tokens of each.

    Args:
        q_lens, kv_lens: int32 [num_seqs], at least 1.
        tile_tokens: of a work item of Hopper's kernel, which is for one query head.
    """
    lens = q_lens.astype(np.int64), kv_lens.astype(np.int64)
    num_tiles = int((-(-lens[0] // tile_tokens)).sum())
    own_keys = num_q_heads * (_keys_read(*lens, tile_tokens) + ITEM_KEYS * num_tiles)
    longest = int(lens[1].max()) + ITEM_KEYS
    general_tile = max(GENERAL_TILE_ROWS * num_kv_heads // num_q_heads, 1)
    general_keys = GENERAL_RATIO * num_kv_heads * _keys_read(*lens, general_tile)
    return max(own_keys / num_sms, longest) < general_keys / num_sms + GENERAL_KEYS


def _keys_read(q_lens: np.ndarray, kv_lens: np.ndarray, tile_tokens: int) -> int:
    """By all tiles, each up to what its last token sees."""
    num_tiles = -(-q_lens // tile_tokens)  # [num_seqs]
    ahead = num_tiles * (kv_lens - q_lens)  # [num_seqs]
    full = tile_tokens * (num_tiles * (num_tiles - 1) // 2)  # [num_seqs], of all tiles but the last
    return int((ahead + full + q_lens).sum())
