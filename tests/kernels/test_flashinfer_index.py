"""The index that FlashInfer is given, against a loop over sequences and blocks. Needs no card."""

import random

import pytest
import torch

from zipage_lang.kernels.backend import AttentionBatch
from zipage_lang.kernels.flashinfer_module import (
    DECODE_TILE_ROWS,
    Heads,
    PlanInfo,
    releases_early,
)
from zipage_lang.kernels.host_rows import HostRows


def make_batch(rng, q_lens, block_size):
    """Random slots before each sequence's queries; tables with room to spare."""
    kv_lens = [q_len + rng.randrange(90) for q_len in q_lens]
    widths = [-(-kv_len // block_size) for kv_len in kv_lens]
    tables = torch.full((len(q_lens), max(widths) + 2), -1, dtype=torch.int32)
    for row, width in enumerate(widths):
        tables[row, :width] = torch.tensor([rng.randrange(1, 999) for _ in range(width)])
    starts = torch.tensor([0, *q_lens]).cumsum(0).int()
    return AttentionBatch(starts, torch.tensor(kv_lens, dtype=torch.int32), tables)


def looped_index(batch, block_size):
    q_starts, block_starts, last_lens, block_ids = [0], [0], [], []
    for row, kv_len in enumerate(batch.kv_lens.tolist()):
        count = -(-kv_len // block_size)
        q_starts.append(int(batch.q_starts[row + 1]))
        block_starts.append(block_starts[-1] + count)
        last_lens.append(kv_len - (count - 1) * block_size)
        block_ids += batch.block_tables[row, :count].tolist()
    return [q_starts, block_starts, last_lens, block_ids]


def written(rows, block_size):
    """The index as lists, and the kv_lens; every entry must have been written."""
    heads = Heads(8, 2, 64, block_size)
    entries = torch.full((rows.num_index_entries(heads) + 3,), -9, dtype=torch.int32)
    index, kv_lens = rows.write(entries, block_size)
    assert entries[:-3].min() >= 0
    assert entries[-3:].tolist() == [-9, -9, -9]
    seen_by_device = rows.views(entries, heads)
    assert [part.tolist() for part in seen_by_device] == [part.tolist() for part in index]
    return [part.tolist() for part in index], kv_lens.tolist()


@pytest.mark.parametrize("block_size", [1, 2, 16, 64])
def test_index_equals_the_loop(block_size):
    rng = random.Random(block_size)
    for _ in range(30):
        batch = make_batch(
            rng, [rng.choice([1, 1, 7]) for _ in range(rng.randrange(1, 9))], block_size
        )
        index, kv_lens = written(HostRows.of(batch), block_size)
        assert index == looped_index(batch, block_size)
        assert kv_lens == batch.kv_lens.tolist()


def test_leading_decodes_end_at_the_first_longer_sequence():
    rows = HostRows.of(make_batch(random.Random(0), [1, 1, 1, 4, 1], 16))
    assert rows.num_leading_decodes == 3
    assert rows.sliced(3, 5).q_lens.tolist() == [4, 1]


def test_a_part_of_the_batch_starts_at_zero():
    batch = make_batch(random.Random(1), [1, 5, 2], 16)
    index, _ = written(HostRows.of(batch).sliced(1, 3), 16)
    assert index[0] == [0, 5, 7]
    assert index[3] == looped_index(batch, 16)[3][-len(index[3]) :]


def test_padding_rows_read_one_slot_of_the_dummy_block():
    batch = make_batch(random.Random(2), [1, 1], 16)
    index, kv_lens = written(HostRows.of(batch).padded(5), 16)
    assert index[0] == [0, 1, 2, 3, 4, 5]
    assert index[2][2:] == [1, 1, 1]
    assert index[3][-3:] == [0, 0, 0]
    assert kv_lens[2:] == [1, 1, 1]


def test_a_bucket_smaller_than_the_batch_is_refused():
    batch = make_batch(random.Random(3), [1, 1, 1], 16)
    with pytest.raises(AssertionError, match="3 rows in a bucket of 2"):
        HostRows.of(batch).padded(2)


def test_a_table_too_short_for_its_length_is_refused():
    batch = make_batch(random.Random(4), [1], 16)
    short = batch._replace(block_tables=torch.full_like(batch.block_tables, -1))
    with pytest.raises(AssertionError, match="shorter than its kv_len"):
        written(HostRows.of(short), 16)


@pytest.mark.parametrize(
    ("change", "releases"),
    [
        ({}, True),
        ({"total_num_rows": 16}, False),  # 128 pairs: fewer than multiprocessors
        ({"total_num_rows": 17}, True),
        ({"total_num_rows": 192}, True),
        ({"total_num_rows": 193}, False),
        ({"split_kv": 1}, False),
        ({"cta_tile_q": 64}, False),
    ],
)
def test_whole_decodes_that_more_than_fill_the_card_let_the_next_kernel_start(change, releases):
    info = PlanInfo(*[0] * 15)._replace(total_num_rows=64, cta_tile_q=DECODE_TILE_ROWS)
    assert releases_early(info._replace(**change), num_kv_heads=8) is releases
