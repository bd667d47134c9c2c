"""The Hopper scoring kernel against its twin: on a card, and its source run by a stand-in for one.

The stand-in (`hopper_stand_in`) runs the kernel's own source on the CPU, 256 threads of a CTA in
turn, in any order that its barriers allow; instructions of the card are functions there. It finds
wrong indices, fragments, swizzles, misaligned addresses (those of ordinary loads and stores by the
compiler's checks) and missing barriers, not what only the card can tell.
Which keys count as similar is a hard decision, so thresholds lie in the widest gap of cosines.
"""

import ctypes
import math
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from test_support.stand_in_build import FLAGS, compiler

from zipage_lang.kernels import hopper
from zipage_lang.kernels.backend import TailQueries, choose_backend
from zipage_lang.kernels.hopper import scoring
from zipage_lang.kernels.reference import scores as reference

SCALE, FIRST_POSITION = 0.3, 10
SOURCES = Path(hopper.__file__).resolve().parent
STAND_IN = Path(__file__).resolve().parent / "hopper_stand_in"
KERNEL_PARTS = ("params", "load", "products", "rows", "kernel")


class World:
    """Rows on scattered slots, some of them holes; all else in pool and ring is NaN."""

    def __init__(self, tail_lens, *, heads=2, group=4, head_dim=128, num_queries=16, block_size=16):
        self.generator = torch.Generator().manual_seed(sum(tail_lens) + group)
        num_rows, max_tail = len(tail_lens), max(tail_lens)
        num_blocks = 2 + -(-sum(tail_lens) // block_size)
        order = torch.randperm(num_blocks * block_size, generator=self.generator)
        self.kv = torch.full((num_blocks, 2, block_size, heads, head_dim), math.nan).bfloat16()
        self.slots = torch.full((num_rows, max_tail), -1)
        for row, own in enumerate(order[: sum(tail_lens)].split(tail_lens)):
            self.slots[row, : len(own)] = own
        shape = (num_rows, heads, max_tail)
        shuffled = torch.rand(shape, generator=self.generator).argsort(-1).int()
        self.positions = (shuffled + FIRST_POSITION).contiguous()
        self.queries = self._draw_queries(tail_lens, heads * group, head_dim, num_queries)

    def _draw_queries(self, tail_lens, num_q_heads, head_dim, num_queries):
        num_rows, num_entries = len(tail_lens), len(tail_lens) * num_queries + 5
        ring = torch.randn(num_entries, num_q_heads, head_dim, generator=self.generator)
        lse = torch.randn(num_entries, num_q_heads, generator=self.generator) + 5
        drawn = torch.randperm(num_entries, generator=self.generator)[: num_rows * num_queries]
        entries = drawn.view(num_rows, num_queries).clone()
        newest = FIRST_POSITION + torch.tensor(tail_lens)[:, None] - num_queries
        at = newest + torch.arange(num_queries)
        entries[0, -1], at[0, -1] = -1, -1
        if num_rows > 1:
            entries[-1], at[-1] = -1, -1  # a row without queries
        return TailQueries(ring.bfloat16(), lse, entries, at)

    def draw_keys(self, *, shared=0.0, families=()):
        """shared: weight of a direction of all keys; families: slots of keys that are alike."""
        num_rows, max_tail = self.slots.shape
        _, _, block_size, heads, head_dim = self.kv.shape
        shape = (num_rows, max_tail, heads, head_dim)
        keys = torch.randn(shape, generator=self.generator)
        keys += shared * torch.randn(num_rows, 1, heads, head_dim, generator=self.generator)
        for family in families:
            keys[:, list(family)] = keys[:, family[0], None] * (
                torch.rand(num_rows, len(family), heads, 1, generator=self.generator) + 0.5
            )
        real = self.slots >= 0
        at = self.slots[real]
        self.kv[at // block_size, 0, at % block_size] = keys[real].bfloat16()

    def threshold(self, chunk):
        unit = F.normalize(reference.gather_keys(self.kv, self.slots).double(), dim=-1)
        parts = [part @ part.mT for part in unit.split(chunk, dim=2)]
        cosine = torch.cat([part.flatten() for part in parts])
        near = cosine[(cosine > 0.4) & (cosine < 0.6)]
        near = torch.cat([near, near.new_tensor([0.4, 0.6])]).sort().values
        widest = near.diff().argmax()
        return float(near[widest] + near.diff()[widest] / 2)


def barely_aligned(tensor, num_bytes):
    """A copy at an odd multiple of `num_bytes`, itself one of the element's size."""
    step = num_bytes // tensor.element_size()
    room = tensor.new_empty(tensor.numel() + 2 * step)
    first = step * (1 + room.data_ptr() // num_bytes % 2)
    copy = room[first : first + tensor.numel()].view(tensor.shape)
    assert copy.data_ptr() % (2 * num_bytes) == num_bytes, (copy.data_ptr(), num_bytes)
    return copy.copy_(tensor)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """mass_and_similarity by the stand-in; num_ctas and a seed of the threads' order follow."""
    folder = tmp_path_factory.mktemp("stand_in")
    for part in KERNEL_PARTS:
        shutil.copy(SOURCES / f"scoring_{part}.cuh", folder)
    for source in STAND_IN.iterdir():
        shutil.copy(source, folder)
    shutil.copy(STAND_IN.parent / "slim_product.h", folder)
    flags = [*FLAGS, "-fsanitize=alignment"]
    compile_it = [compiler(), *flags, "-c", "-x", "c++", "emulate.cpp"]
    # Linked without the sanitizer's own library, whose function emulate.cpp has.
    link_it = [compiler(), "-shared", "emulate.o", "-o", "emulated.so"]
    for command in (compile_it, link_it):
        subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "emulated.so"))

    def run(world, chunk, threshold, num_ctas, seed):
        unset = torch.full(world.positions.shape, math.nan)
        results = [barely_aligned(unset, unset.element_size()) for _ in range(2)]
        given = (world.kv, world.slots, world.positions, *world.queries)
        copied = (world.kv, world.queries.ring)  # 16 bytes at a time
        tensors = [
            barely_aligned(part, 16 if any(part is own for own in copied) else part.element_size())
            for part in given
        ]
        num_rows, heads, max_tail = world.positions.shape
        group, num_queries = world.queries.ring.shape[1] // heads, world.queries.ring_slots.shape[1]
        sizes = (num_rows, heads, world.kv.shape[4], group, num_queries, max_tail, chunk)
        code = library.emulate(
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (*tensors, *results)),
            *sizes,
            world.kv.shape[2],
            *(ctypes.c_float(value) for value in (SCALE * math.log2(math.e), threshold)),
            num_ctas,
            seed,
        )
        assert code != 1, "the kernel's threads wait for each other, or end with work left"
        assert code != 2, "an address is misaligned, see stderr"
        return results

    return run


def on_card(world):
    """kv, slots, positions and queries."""
    queries = TailQueries(*(part.cuda() for part in world.queries))
    return world.kv.cuda(), world.slots.cuda(), world.positions.cuda(), queries


def run_on_card(world, chunk, threshold, *_):
    tail = on_card(world)
    assert scoring.takes(tail[0], tail[3], chunk)
    results = scoring.mass_and_similarity(*tail, SCALE, chunk, threshold)
    return [part.cpu() for part in results]


@pytest.fixture(params=["stand-in", pytest.param("card", marks=pytest.mark.gpu)])
def run(request):
    return run_on_card if request.param == "card" else request.getfixturevalue("emulated")


def assert_equals_twin(run, world, chunk, threshold, num_ctas=2, seed=0):
    found = run(world, chunk, threshold, num_ctas, seed)
    tail = (world.kv, world.slots, world.positions)
    wanted = reference.mass_and_similarity(*tail, world.queries, SCALE, chunk, threshold)
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=2e-5)


CASES = [  # tail_lens, chunk, sizes
    ((300, 17), 256, {}),
    ((256,), 256, {"heads": 3, "group": 3, "num_queries": 5}),
    ((70, 255), 100, {"group": 1, "head_dim": 64, "block_size": 48}),
    ((90,), 33, {"heads": 1, "group": 8, "num_queries": 8, "block_size": 1}),
    ((260, 3), 256, {"heads": 1, "group": 2, "num_queries": 32}),
]


@pytest.mark.parametrize("shared", [0.0, 0.8, 3.0])
@pytest.mark.parametrize(("tail_lens", "chunk", "sizes"), CASES)
def test_scores_equal_their_twin(run, tail_lens, chunk, sizes, shared):
    world = World(tail_lens, **sizes)
    world.slots[0, 5:9] = -1  # holes
    world.draw_keys(shared=shared)
    assert_equals_twin(run, world, chunk, world.threshold(chunk))


FAMILIES = {  # indices in a chunk of 256, in tiles of 64, of keys that are alike; others are not
    "none": [],
    "all": [range(256)],
    "across the tiles' borders": [(63, 64), (127, 128), (191, 192), (0, 255)],
    "old ones": [(5, 9), (20, 100), (70, 150, 230)],
    "in every two tiles": [(1, 66), (2, 131), (3, 195), (70, 140), (71, 210), (150, 220)],
    "many small ones": [range(first, 240, 24) for first in range(24)],
}


@pytest.mark.parametrize("step", [1, 8_000_000])
@pytest.mark.parametrize("families", FAMILIES)
def test_newest_similar_key_is_found_wherever_it_lies(run, families, step):
    world = World((256,), heads=1)
    world.draw_keys(families=FAMILIES[families])
    world.positions *= step
    assert_equals_twin(run, world, 256, 0.7)


@pytest.mark.parametrize("shared", [1.0, 3.0])
@pytest.mark.parametrize("order", ["shuffled", "in order"])
def test_chunks_after_chunks_full_of_similar_keys_equal_their_twin(run, order, shared):
    """In the third and fifth chunk some keys have no similar one, and must not inherit any."""
    world = World((5 * 256 + 100,), heads=1)
    world.draw_keys(shared=shared)
    if order == "in order":
        world.positions[:] = torch.arange(5 * 256 + 100).int() + FIRST_POSITION
    for index in (2 * 256 + 50, 4 * 256, 4 * 256 + 130):  # keys that are similar to none
        slot = world.slots[0, index]
        world.kv[slot // 16, 0, slot % 16] *= -1
    assert_equals_twin(run, world, 256, world.threshold(256), num_ctas=1)


def test_newest_similar_keys_beside_the_newest_of_all_are_found(run):
    """Every 8th slot of the second chunk is newer than the others; the newest four are of a family
    of their own, so that the newest of the others' family is none of the newest of all.
    """
    world = World((512,), heads=1)
    apart = [256 + 8 * index for index in range(28, 32)]
    world.draw_keys(families=[range(256), apart, sorted(set(range(256, 512)) - set(apart))])
    index = torch.arange(512).int()
    world.positions[:] = index + FIRST_POSITION + torch.where(index % 8 == 0, 1000, 0)
    assert_equals_twin(run, world, 256, 0.7, num_ctas=1)


def test_zero_keys_are_similar_to_none(run):
    world = World((200,), heads=1)
    world.draw_keys(shared=1.0)
    own = world.slots[0, ::5]
    world.kv[own // 16, 0, own % 16] = 0
    assert_equals_twin(run, world, 256, world.threshold(256))


@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_threads_changes_a_bit(emulated, seed):
    world = World((256, 256))
    world.draw_keys(shared=1.0)
    threshold = world.threshold(256)
    one = emulated(world, 256, threshold, 1, seed)
    two = emulated(world, 256, threshold, 4, seed + 100)
    assert all(torch.equal(left, right) for left, right in zip(one, two, strict=True))


def made_for(*, dtype=torch.bfloat16, head_dim=128, group=4, num_queries=16, chunk=256, cuda=True):
    """Whether the kernel takes these sizes on a card that has it."""
    kv = SimpleNamespace(dtype=dtype, shape=(9, 2, 16, 2, head_dim), is_cuda=cuda)
    ring = SimpleNamespace(shape=(99, 2 * group, head_dim))
    queries = SimpleNamespace(ring=ring, ring_slots=SimpleNamespace(shape=(5, num_queries)))
    return scoring.takes(kv, queries, chunk)


TAKEN = [{}, {"head_dim": 64, "group": 3}, {"group": 8, "num_queries": 8}, {"chunk": 1}]
NOT_TAKEN = [
    {"dtype": torch.float16},
    {"head_dim": 80},
    {"group": 16, "num_queries": 4},
    {"group": 3, "num_queries": 17},  # 68 columns when padded
    {"chunk": 257},
    {"cuda": False},
]


def test_only_sizes_that_the_kernel_is_made_for_are_taken(monkeypatch):
    monkeypatch.setattr(scoring, "_is_there", lambda: True)
    assert [made_for(**sizes) for sizes in TAKEN] == [True] * len(TAKEN)
    assert [made_for(**sizes) for sizes in NOT_TAKEN] == [False] * len(NOT_TAKEN)
    monkeypatch.setattr(scoring, "_is_there", lambda: False)
    assert not made_for()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [128, 96])
def test_the_backend_scores_in_this_kernel_what_it_takes(monkeypatch, head_dim):
    world = World((300, 77), head_dim=head_dim)
    world.draw_keys(shared=0.8)
    threshold, calls, call = world.threshold(256), [], scoring.mass_and_similarity
    monkeypatch.setattr(
        scoring, "mass_and_similarity", lambda *args: (calls.append(args), call(*args))[1]
    )
    backend = choose_backend("cuda", torch.bfloat16)
    found = backend.mass_and_similarity(*on_card(world), SCALE, 256, threshold)
    assert len(calls) == (head_dim == 128)
    tail = (world.kv, world.slots, world.positions)
    wanted = reference.mass_and_similarity(*tail, world.queries, SCALE, 256, threshold)
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), two, atol=2e-6, rtol=2e-5)


@pytest.mark.gpu
def test_keys_past_two_to_the_31_elements_are_found():
    world = World((300,), heads=8)
    world.draw_keys(shared=0.8)
    kv, slots, *rest = on_card(world)
    num_far = 2**31 // kv[0].numel() + 1
    pool = torch.cat([torch.zeros((num_far, *kv.shape[1:]), dtype=kv.dtype, device=kv.device), kv])
    far = torch.where(slots < 0, slots, slots + num_far * kv.shape[2])
    near = scoring.mass_and_similarity(kv, slots, *rest, SCALE, 256, 0.5)
    found = scoring.mass_and_similarity(pool, far, *rest, SCALE, 256, 0.5)
    assert all(torch.equal(one, two) for one, two in zip(found, near, strict=True))


@pytest.mark.gpu
def test_the_kernel_never_waits_for_the_device():
    world = World((300, 77))
    world.draw_keys()
    tail = on_card(world)
    try:
        torch.cuda.set_sync_debug_mode("error")
        scoring.mass_and_similarity(*tail, SCALE, 256, 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
