"""What a request alone in the world says: histories of tokens, draws, survivors of compactions.

Everything here follows from a request's own tokens, seed and lengths of compaction. The fake runner
arrives at the same from the slots that it reads. Knows nothing of slots, blocks or plans.
"""

import zlib
from collections.abc import Iterable, Sequence

from zipage_lang.runtime.sampling_params import SamplingParams

EMPTY_HISTORY = 0x5EED


def extend_history(history: int, token_id: int) -> int:
    """The rolling hash after one more token. Hashes of ints are the same in every process."""
    return hash((history, token_id))


def histories_of(token_ids: Iterable[int]) -> list[int]:
    """The rolling hash after each token."""
    histories, history = [], EMPTY_HISTORY
    for token_id in token_ids:
        history = extend_history(history, token_id)
        histories.append(history)
    return histories


def draw_token(
    seed: int,
    resident: Sequence[tuple[int, int]],
    output_index: int,
    sampling: SamplingParams,
    vocab_size: int,
    eos_token_ids: Iterable[int] = (),
) -> int:
    """The token drawn after `resident` (position, token id) pairs, in position order.

    A temperature of 0 ignores the seed. Tokens that would end the output are not drawn before
    min_tokens.
    """
    if sampling.temperature == 0:
        seed = 0
    banned = set(eos_token_ids) | set(sampling.stop_token_ids)
    if output_index >= sampling.min_tokens or len(banned) >= vocab_size:
        banned = set()
    draw = hash((seed, output_index, tuple(resident)))
    while (token_id := (draw ^ draw >> 17) % vocab_size) in banned:
        draw = hash((draw, 1))
    return token_id


Chain = tuple[tuple[int, int], ...]  # (logical_len, num_keep) of each compaction, oldest first


def select_survivors(
    policy: str, window: int, num_keep: int, tail: Iterable[int], histories: Sequence[int]
) -> frozenset[int]:
    """The positions of `tail` that survive: the newest `window`, and others as a hash has it."""
    newest_first = sorted(tail, reverse=True)
    num_newest = min(window, num_keep)
    salt = zlib.crc32(policy.encode())
    rest = sorted(newest_first[num_newest:], key=lambda position: hash((salt, histories[position])))
    return frozenset(newest_first[:num_newest] + rest[: num_keep - num_newest])


def lone_survivors(
    policy: str, window: int, protected_len: int, chain: Chain, histories: Sequence[int]
) -> frozenset[int]:
    """What the compactions of `chain` leave of the tail of a request with these histories."""
    tail, start = frozenset[int](), protected_len
    for logical_len, num_keep in chain:
        grown = {*tail, *range(start, logical_len)}
        tail = select_survivors(policy, window, num_keep, grown, histories)
        start = logical_len
    return tail
