"""Device code of `score_tokens`: log-probabilities, ranks, and the likeliest tokens in order.

Knows nothing of launches; what each number means stands at its twin in `reference/sampling.py`.
"""

import torch
import triton
import triton.language as tl

from zipage_lang.kernels.window_kernels import keys_of

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
NO_KEY = tl.constexpr(-0x80000000)  # below the key of any logit


@triton.jit
def tile_scores_kernel(
    logits,
    token_ids,
    peaks,
    sums,
    ahead,
    group_keys,
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_TOP: tl.constexpr,
):
    """A tile's peak, sum of exponentials and tokens ahead; the highest key of each group in it."""
    line, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    mask = columns < vocab_size
    row = logits + line * row_stride
    token = tl.load(token_ids + line)
    chosen = tl.load(row + token).to(tl.float32)
    x = tl.load(row + columns, mask=mask, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, axis=0)
    shares = tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak))
    is_ahead = mask & ((x > chosen) | ((x == chosen) & (columns < token)))
    at = line * tl.num_programs(1) + tile
    tl.store(peaks + at, peak)
    tl.store(sums + at, tl.sum(shares, axis=0))
    tl.store(ahead + at, tl.sum(is_ahead.to(tl.int32), axis=0))
    if HAS_TOP:
        keys = tl.where(mask, keys_of(x), NO_KEY)
        highest = tl.max(tl.reshape(keys, (BLOCK // GROUP, GROUP)), axis=1)
        groups = tl.arange(0, BLOCK // GROUP)
        tl.store(group_keys + at * (BLOCK // GROUP) + groups, highest)


@triton.jit
def _take(row, group, key, taken, vocab_size, GROUP: tl.constexpr):
    """The lowest id of a key after `taken` in a group; the highest key then left there."""
    columns = group * GROUP + tl.arange(0, GROUP)
    mask = columns < vocab_size
    x = tl.load(row + columns, mask=mask, other=float("-inf")).to(tl.float32)
    keys = tl.where(mask, keys_of(x), NO_KEY)
    token = tl.min(tl.where((keys == key) & (columns > taken), columns, vocab_size - 1), axis=0)
    is_left = (keys < key) | ((keys == key) & (columns > token))
    return token, tl.max(tl.where(is_left, keys, NO_KEY), axis=0)


@triton.jit(do_not_specialize=["num_top"])
def line_scores_kernel(
    logits,
    token_ids,
    peaks,
    sums,
    ahead,
    group_keys,
    logprobs,
    ranks,
    top_ids,
    top_logprobs,
    row_stride,
    vocab_size,
    num_tiles,
    num_groups,
    num_top,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_TOP: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    at, mask = line * num_tiles + tiles, tiles < num_tiles
    peak = tl.load(peaks + at, mask=mask, other=float("-inf"))
    best = tl.max(peak, axis=0)
    share = tl.load(sums + at, mask=mask, other=0.0)
    log_sum = best + tl.log(tl.sum(share * tl.exp(peak - best), axis=0))
    row = logits + line * row_stride
    chosen = tl.load(row + tl.load(token_ids + line)).to(tl.float32)
    rank = tl.sum(tl.load(ahead + at, mask=mask, other=0), axis=0) + 1
    tl.store(logprobs + line, tl.maximum(chosen - log_sum, LOWEST))
    tl.store(ranks + line, rank.to(tl.int64))
    if HAS_TOP:
        groups = tl.arange(0, GROUPS)
        in_line = groups < num_groups
        keys = tl.load(group_keys + line * num_groups + groups, mask=in_line, other=NO_KEY)
        taken = tl.full((GROUPS,), -1, dtype=tl.int32)  # the last id taken of a group's key
        for place in range(num_top):
            key, group = tl.max(keys, axis=0, return_indices=True)  # of equal keys the lower group
            before = tl.max(tl.where(groups == group, taken, -1), axis=0)
            token, left = _take(row, group, key, before, vocab_size, GROUP)
            taken = tl.where(groups == group, tl.where(left == key, token, -1), taken)
            keys = tl.where(groups == group, left, keys)
            logprob = tl.load(row + token).to(tl.float32) - log_sum
            tl.store(top_ids + line * num_top + place, token.to(tl.int64))
            tl.store(top_logprobs + line * num_top + place, tl.maximum(logprob, LOWEST))
