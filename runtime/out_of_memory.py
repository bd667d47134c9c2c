"""Recognises that a device or the host has no memory left, and runs work again in smaller parts.

Knows nothing of what the work is.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")
Items = TypeVar("Items", bound=Sequence[Any])

# What torch's CPU allocator, the CUDA driver, cuBLAS and Triton say; only torch's CUDA allocator
# has an exception of its own.
_REFUSALS = ("can't allocate memory", "out of memory", "status_alloc_failed")
_BROKEN_CAPTURE = "during capture"  # what a refusal inside a graph's capture may end as


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory was refused: then nothing is broken, and less may still work."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    if any(words in text for words in _REFUSALS):
        return True
    return _BROKEN_CAPTURE in text and is_out_of_memory(error.__context__)


def release_memory() -> None:
    """Give back what torch's allocator keeps but nobody holds; waits for the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def memory_in_use(device: torch.device) -> int:
    """Bytes of the card in use, by whoever; 0 for a device without memory of its own."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free


@contextmanager
def explained_out_of_memory(what: str, device: torch.device) -> Iterator[None]:
    """Turn a refusal at the start into a ValueError: what did not fit, and what to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        place, in_use = "this machine's memory", ""
        if device.type == "cuda":
            place, in_use = "the card", f"{memory_in_use(device) / 2**30:.2f} GiB were in use: "
        raise ValueError(
            f"{what} did not fit {place} ({in_use}{str(error) or 'no memory'}); take a smaller "
            "model or dtype='bfloat16', lower kv_cache_memory, max_step_tokens, max_running or "
            "num_query_slots, or free memory that other processes hold"
        ) from error


def no_memory_left(device: torch.device) -> str:
    """The error of a request whose smallest piece of work found no memory."""
    place = "the card" if device.type == "cuda" else "this machine"
    return (
        f"{place} is out of memory even for the smallest piece of this request's work; lower "
        "max_step_tokens, gpu_memory_share or kv_cache_memory, or free memory that other "
        "processes hold"
    )


def halved(items: Items) -> Sequence[Items]:
    """The two halves of a sequence, of its kind; nothing where it can't be cut."""
    middle = len(items) // 2
    return (cast(Items, items[:middle]), cast(Items, items[middle:])) if middle else ()


class Retries:
    """Runs work, and where memory is refused runs it again: first whole, then in smaller parts."""

    def __init__(self) -> None:
        self.num_refusals = 0  # since the start

    def run(
        self,
        part: Part,
        work: Callable[[Part], Result],
        cut: Callable[[Part], Sequence[Part]],
        give_up: Callable[[Part], None],
    ) -> list[Result]:
        """What the parts yielded, in their order.

        Args:
            part: the whole.
            work: may be called again for what it was refused memory for, so until its last
                allocation it must leave nothing behind that a second call would not overwrite.
            cut: a part's smaller parts, in order; none where there are no smaller ones.
            give_up: called with each part that is as small as can be and still finds no memory;
                the parts behind it run nevertheless.
        """
        results: list[Result] = []
        waiting, may_repeat = [part], True
        while waiting:
            part = waiting.pop()
            if self._attempt(part, work, results):
                continue
            smaller = [part] if may_repeat else cut(part)
            may_repeat = False
            waiting.extend(reversed(smaller))
            if not smaller:
                give_up(part)
        return results

    def _attempt(self, part: Part, work: Callable[[Part], Result], results: list[Result]) -> bool:
        try:
            results.append(work(part))
            return True
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        # Only now, since the error holds on to all that the work had allocated.
        self.num_refusals += 1
        release_memory()
        return False
