"""What counts as a refusal of memory, and how work is tried again in smaller parts."""

import gc
import weakref

import numpy as np
import pytest
import torch

from zipage_lang.runtime.out_of_memory import (
    Retries,
    explained_out_of_memory,
    halved,
    is_out_of_memory,
)

CPU = torch.device("cpu")


def broken_capture(cause):
    try:
        try:
            raise cause
        finally:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        broken_capture(torch.OutOfMemoryError("1 GiB")),
    ],
)
def test_refusals_of_memory_are_recognised(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        None,
        ValueError("out of memory"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        broken_capture(RuntimeError("a wrong stream")),
        AssertionError("out of blocks"),
    ],
)
def test_other_errors_are_none(error):
    assert not is_out_of_memory(error)


def test_what_the_cpu_allocators_really_say_is_recognised():
    with pytest.raises(RuntimeError) as torch_error:
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(MemoryError) as numpy_error:
        np.empty(2**60, dtype=np.uint8)
    assert is_out_of_memory(torch_error.value)
    assert is_out_of_memory(numpy_error.value)


def refuse(_part=None):
    raise MemoryError("no more")


def run(items, work):
    """(results, those given up, refusals)."""
    retries, lost = Retries(), []
    return retries.run(items, work, halved, lost.extend), lost, retries.num_refusals


def test_without_a_refusal_the_work_is_done_once():
    assert run([1, 2, 3], tuple) == ([(1, 2, 3)], [], 0)


def test_one_refusal_is_cured_by_trying_the_whole_again():
    answers = iter([refuse, tuple])
    assert run([1, 2, 3], lambda part: next(answers)(part)) == ([(1, 2, 3)], [], 1)


def test_parts_keep_their_order_and_only_what_does_not_fit_is_cut():
    def up_to_two(part):
        return refuse() if len(part) > 2 else tuple(part)

    results, lost, num_refusals = run(list(range(7)), up_to_two)
    assert [item for part in results for item in part] == list(range(7))
    assert max(map(len, results)) == 2
    assert lost == []
    assert num_refusals == 4  # twice the whole, the part of four, the part of three


def test_what_never_fits_is_given_up_and_the_rest_is_done():
    results, lost, _ = run(list(range(8)), lambda part: refuse() if 5 in part else part)
    assert lost == [5]
    assert sorted(item for part in results for item in part) == [0, 1, 2, 3, 4, 6, 7]


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="illegal"):
        run([1], lambda _: (_ for _ in ()).throw(RuntimeError("illegal memory access")))


def test_what_refused_work_had_allocated_is_free_before_it_is_tried_again():
    held, alive = [], []

    def work(part):
        alive.extend(ref() is not None for ref in held)
        tensor = torch.zeros(10)
        held.append(weakref.ref(tensor))
        return refuse() if len(held) < 3 else tensor.sum()

    gc.disable()
    try:
        run([1, 2], work)
    finally:
        gc.enable()
    assert held
    assert not any(alive)


def test_a_refusal_at_the_start_says_what_did_not_fit_and_what_to_change():
    with (
        pytest.raises(
            ValueError, match=r"a pool of 3 GiB did not fit this machine.*lower kv_cache"
        ),
        explained_out_of_memory("a pool of 3 GiB", CPU),
    ):
        torch.empty(2**60, dtype=torch.uint8)


def test_other_errors_at_the_start_stay_what_they_are():
    with pytest.raises(RuntimeError, match=r"^illegal$"), explained_out_of_memory("a pool", CPU):
        raise RuntimeError("illegal")
