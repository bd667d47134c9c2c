"""The grouped launch, carried out item by item as FlashInfer's kernel would. Needs no card."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_support.flashinfer_stand_in import stand_in_module

from zipage_lang.kernels.flashinfer_module import Heads
from zipage_lang.kernels.grouped_launch import GroupedLayout, sequences_of
from zipage_lang.kernels.reference.merge import merge_parts
from zipage_lang.kernels.shared_prefix import PrefixGroup, shared_blocks

HEAD_DIM, SCALE = 4, 0.7


@st.composite
def worlds(draw):
    """Rows that continue from the row before, padding behind them, and some groups of them."""
    block_size = draw(st.sampled_from([1, 2, 16, 64]))
    group_size = draw(st.sampled_from([1, 3, 4, 8]))
    fresh, rows = itertools.count(1), []
    for _ in range(draw(st.integers(1, 20))):
        kept = rows[-1][: draw(st.integers(0, len(rows[-1])))] if rows else []
        rows.append(kept + list(itertools.islice(fresh, draw(st.integers(0, 3)))) or [next(fresh)])
    kv_lens = [(len(row) - 1) * block_size + draw(st.integers(1, block_size)) for row in rows]
    num_padding = draw(st.integers(0, 3))
    tables = np.full((len(rows) + num_padding, max(map(len, rows)) + 1), -1, dtype=np.int32)
    for table, row in zip(tables, rows, strict=False):
        table[: len(row)] = row
    tables[len(rows) :] = 0
    lens = np.array(kv_lens + [1] * num_padding, dtype=np.int32)
    groups = draw(groups_of(shared_blocks(tables, lens, block_size).tolist()))
    return tables, lens, groups, Heads(2 * group_size, 2, HEAD_DIM, block_size), next(fresh)


@st.composite
def groups_of(draw, shared):
    """Any disjoint groups, not only those worth it."""
    groups, row = [], 0
    while row < len(shared):
        end = row + draw(st.integers(0, 9))
        most = min(shared[row:end], default=0)
        if most > 0 and end <= len(shared):
            groups.append(PrefixGroup(row, end + 1, draw(st.integers(1, most)), 0))
            row = end
        row += 1
    return groups


def carry_out(layout, numbers, num_blocks, q, pool):
    """Outputs and log-sum-exps of all output rows, NaN where none was written; blocks read."""
    arrays, module = layout.arrays(numbers, num_blocks), stand_in_module()
    out = torch.empty((2 * len(q), *q.shape[1:]), dtype=q.dtype)
    lse = torch.empty(out.shape[:2], dtype=q.dtype)
    shown_lse = lse[: len(q)]
    index = sequences_of(arrays)
    module.run((numbers, numbers), layout.launch, q, pool, index, out, shown_lse, SCALE)
    return out, lse, arrays.has_shared, module._module.blocks_read


def dense(tables, kv_lens, q, pool, heads):
    group_size = heads.num_q_heads // heads.num_kv_heads
    outs, lses = [], []
    for row, kv_len in enumerate(kv_lens.tolist()):
        blocks = torch.from_numpy(tables[row, : -(-kv_len // heads.block_size)]).long()
        keys, values = (
            part.flatten(0, 1)[:kv_len].repeat_interleave(group_size, 1)
            for part in pool[blocks].unbind(1)
        )  # [kv_len, num_q_heads, HEAD_DIM] each
        scores = torch.einsum("hd,khd->hk", q[row], keys) * SCALE
        outs.append(torch.einsum("hk,khd->hd", scores.softmax(1), values))
        lses.append(scores.logsumexp(1) / np.log(2))
    return torch.stack(outs), torch.stack(lses)


def random_tensors(num_rows, num_blocks, heads):
    generator = torch.Generator().manual_seed(num_rows)
    kind = {"dtype": torch.float64, "generator": generator}
    q = torch.randn(num_rows, heads.num_q_heads, HEAD_DIM, **kind)
    shape = (num_blocks, 2, heads.block_size, heads.num_kv_heads, HEAD_DIM)
    return q, torch.randn(shape, **kind)


def written(layout, tables, kv_lens, groups):
    """A buffer with what earlier steps may have left in it, and the number of block ids."""
    num_blocks = layout.num_blocks(kv_lens, groups)
    numbers = torch.full((layout.num_fixed + num_blocks + 3,), -77, dtype=torch.int32)
    layout.write(numbers, tables, kv_lens, groups)
    assert numbers[:-3].min() >= 0, "a number was not written"
    assert numbers[-3:].tolist() == [-77] * 3
    return numbers, num_blocks


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_items_and_merge_equal_dense_attention(world):
    tables, kv_lens, groups, heads, num_pool_blocks = world
    layout = GroupedLayout(len(tables), heads)
    if sum(group.num_tiles(heads) for group in groups) > layout.max_tiles:
        groups = groups[:1]
    numbers, num_blocks = written(layout, tables, kv_lens, groups)
    q, pool = random_tensors(len(tables), num_pool_blocks, heads)
    out, lse, has_shared, blocks_read = carry_out(layout, numbers, num_blocks, q, pool)

    is_grouped = torch.zeros(len(tables), dtype=torch.bool)
    for group in groups:
        is_grouped[group.first_row : group.end_row] = True
    assert torch.equal(has_shared.bool(), is_grouped)
    # every row's own part is there, and the shared part of grouped rows only
    is_there = torch.cat([torch.ones_like(is_grouped), is_grouped])
    assert torch.equal(~lse.isnan().any(1), is_there)
    assert torch.equal(~lse.isnan().all(1), is_there)
    row_blocks = -(-kv_lens // heads.block_size)
    not_read = sum(
        (group.end_row - group.first_row - group.num_tiles(heads)) * group.num_blocks
        for group in groups
    )
    assert blocks_read == row_blocks.sum() - not_read

    merged_lse = torch.empty_like(lse[: len(tables)])
    merge_parts(out, lse, has_shared, merged_lse)
    wanted = dense(tables, kv_lens, q, pool, heads)
    torch.testing.assert_close(out[: len(tables)], wanted[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merged_lse, wanted[1], rtol=1e-12, atol=1e-12)


def samples_of_a_prompt(num_prompts, num_samples, shared, own):
    """Tables of one-slot blocks: so many shared ones, then own ones."""
    fresh = itertools.count(num_prompts * shared + 1)
    tables = []
    for row in range(num_prompts * num_samples):
        prompt = row // num_samples * shared + 1
        tables.append([*range(prompt, prompt + shared), *itertools.islice(fresh, own)])
    groups = [
        PrefixGroup(num_samples * i, num_samples * (i + 1), shared, 0) for i in range(num_prompts)
    ]
    kv_lens = np.full(len(tables), shared + own, dtype=np.int32)
    return np.array(tables, dtype=np.int32), kv_lens, groups


def test_the_launch_and_its_places_depend_on_the_bucket_alone():
    heads = Heads(8, 2, HEAD_DIM, 1)
    tables, kv_lens, groups = samples_of_a_prompt(4, 8, 5, 3)
    layout = GroupedLayout(32, heads)
    places = []
    for chosen in ([], groups[:1], groups):
        numbers, num_blocks = written(layout, tables, kv_lens, chosen)
        arrays = layout.arrays(numbers, num_blocks)
        places.append([part.data_ptr() - numbers.data_ptr() for part in arrays])
        assert [len(part) for part in arrays][:-1] == [
            len(part) for part in layout.arrays(numbers, 0)
        ][:-1]
    assert places[0] == places[1] == places[2]
    assert GroupedLayout(32, heads).launch == layout.launch


def test_long_items_come_first_and_idle_ones_last():
    heads = Heads(8, 2, HEAD_DIM, 1)
    tables, kv_lens, groups = samples_of_a_prompt(2, 8, 9, 4)
    numbers, num_blocks = written(layout := GroupedLayout(16, heads), tables, kv_lens, groups)
    arrays = layout.arrays(numbers, num_blocks)
    slots = arrays.block_starts.diff()[arrays.item_entries.long()].tolist()
    num_idle = layout.max_tiles - 4  # two tiles of 16 rows for each group of 8 x 4
    assert slots == [9] * 4 + [4] * 16 + [0] * num_idle
    assert arrays.item_tiles[:4].tolist() == [0, 1, 0, 1]


def test_a_group_that_leaves_a_row_nothing_is_refused():
    heads = Heads(8, 2, HEAD_DIM, 1)
    tables, kv_lens, groups = samples_of_a_prompt(1, 8, 5, 0)
    numbers = torch.zeros(1000, dtype=torch.int32)
    with pytest.raises(AssertionError, match="nothing of its own"):
        GroupedLayout(8, heads).write(numbers, tables, kv_lens, groups)


def test_more_tiles_than_the_launch_has_are_refused():
    heads = Heads(16, 1, HEAD_DIM, 1)  # a tile a row
    tables, kv_lens, groups = samples_of_a_prompt(1, 8, 5, 1)
    layout = GroupedLayout(8, heads)
    layout.max_tiles = layout._num_items = 8
    numbers = torch.zeros(1000, dtype=torch.int32)
    with pytest.raises(AssertionError, match="of 8"):
        layout.write(numbers, tables, kv_lens, groups)
