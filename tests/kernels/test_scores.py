"""Scoring kernels against double-precision loops, on sizes past one chunk and one tile."""

import math

import pytest
import torch

from zipage_lang.kernels.backend import AttentionBatch, TailQueries, choose_backend
from zipage_lang.kernels.reference import scores

NUM_ROWS, NUM_KV_HEADS, HEAD_DIM = 2, 2, 8


class Tail:
    """Two rows of different length on scattered slots of a pool full of NaN."""

    def __init__(self, tail_lens, *, group=2, num_queries=3, block_size=4, dtype=torch.float32):
        generator = torch.Generator().manual_seed(sum(tail_lens))
        self.lens, self.group = torch.tensor(tail_lens), group
        max_tail, used = max(tail_lens), sum(tail_lens)
        num_blocks = 3 + used // block_size
        order = torch.randperm(num_blocks * block_size, generator=generator)
        shape = (num_blocks, 2, block_size, NUM_KV_HEADS, HEAD_DIM)
        self.kv = torch.full(shape, math.nan, dtype=dtype)
        self.slots = torch.full((NUM_ROWS, max_tail), -1)
        self.positions = torch.full((NUM_ROWS, NUM_KV_HEADS, max_tail), 55, dtype=torch.int32)
        self.keys = []  # per row, float64 [num_kv_heads, tail_len, head_dim]
        for row, tail_len in enumerate(tail_lens):
            self.slots[row, :tail_len] = order[row * max_tail :][:tail_len]
            for head in range(NUM_KV_HEADS):
                shuffled = torch.randperm(tail_len, generator=generator).int() + 10
                self.positions[row, head, :tail_len] = shuffled
            drawn = torch.randn(2, NUM_KV_HEADS, tail_len, HEAD_DIM, generator=generator).to(dtype)
            blocks, offsets = (
                order[row * max_tail :][:tail_len] // block_size,
                (order[row * max_tail :][:tail_len] % block_size),
            )
            self.kv[blocks, :, offsets] = drawn.permute(2, 0, 1, 3)
            self.keys.append(drawn[0].double())
        self.queries = self._draw_queries(num_queries, generator, dtype)

    def _draw_queries(self, num_queries, generator, dtype):
        num_q_heads = NUM_KV_HEADS * self.group
        ring = torch.full((20, num_q_heads, HEAD_DIM), math.nan, dtype=dtype)
        lse = torch.full((20, num_q_heads), math.nan)
        entries = torch.randperm(20, generator=generator)[: NUM_ROWS * num_queries]
        ring[entries] = torch.randn(len(entries), num_q_heads, HEAD_DIM, generator=generator).to(
            dtype
        )
        lse[entries] = torch.randn(len(entries), num_q_heads, generator=generator) + 5
        newest = self.lens[:, None] + 10 - num_queries + torch.arange(num_queries)
        return TailQueries(ring, lse, entries.view(NUM_ROWS, num_queries), newest)

    @property
    def args(self):
        return self.kv, self.slots, self.positions

    def row_positions(self, row, head):
        return self.positions[row, head, : self.lens[row]].tolist()


def slow_mass(tail, row, head, index, scale):
    position, key = tail.row_positions(row, head)[index], tail.keys[row][head, index]
    total, count = 0.0, 0
    for entry, at in zip(
        tail.queries.ring_slots[row].tolist(), tail.queries.positions[row].tolist(), strict=True
    ):
        if entry < 0:
            continue
        count += 1
        if position > at:
            continue
        heads = range(head * tail.group, (head + 1) * tail.group)
        total += max(
            math.exp(
                (tail.queries.ring[entry, q].double() @ key).item() * scale
                - tail.queries.ring_lse[entry, q].item() * math.log(2)
            )
            for q in heads
        )
    return total / count


def slow_similarity(keys, positions, threshold):
    """Row means of one group of keys that are compared with each other."""
    unit = keys / keys.norm(dim=-1, keepdim=True)
    cosine = (unit @ unit.T).tolist()
    for j in range(len(positions)):
        cosine[j][j] = 0.0
        similar = [i for i in range(len(positions)) if cosine[i][j] > threshold]
        if similar:
            cosine[max(similar, key=lambda i: positions[i])][j] = 0.0
    return [sum(row) / len(positions) for row in cosine]


def check_rows(tail, result, slow):
    """`slow(row, head)` lists what the real slots of a row and head must hold; padding holds 0."""
    assert result.dtype == torch.float32
    for row in range(NUM_ROWS):
        tail_len = int(tail.lens[row])
        assert (result[row, :, tail_len:] == 0).all()
        for head in range(NUM_KV_HEADS):
            expected = torch.tensor(slow(row, head), dtype=torch.float64)
            torch.testing.assert_close(
                result[row, head, :tail_len].double(), expected, atol=2e-6, rtol=2e-5
            )


def check_mass(tail):
    check_rows(
        tail,
        scores.attention_mass(*tail.args, tail.queries, 0.3),
        lambda row, head: [slow_mass(tail, row, head, i, 0.3) for i in range(int(tail.lens[row]))],
    )


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_mass_is_the_mean_over_queries_of_the_groups_largest_share(group, dtype):
    tail = Tail([37, 12], group=group, dtype=dtype)
    check_mass(tail)


def test_attention_mass_averages_over_the_queries_that_exist():
    tail = Tail([9, 6])
    ring_slots, at = tail.queries.ring_slots.clone(), tail.queries.positions.clone()
    ring_slots[1, 1:], at[1, 1:] = -1, -1
    tail.queries = tail.queries._replace(ring_slots=ring_slots, positions=at)
    check_mass(tail)


def test_attention_mass_of_a_query_over_all_it_saw_is_one():
    tail = Tail([20, 20], group=1, num_queries=1)
    for row in range(NUM_ROWS):
        entry = tail.queries.ring_slots[row, 0]
        for head in range(NUM_KV_HEADS):
            logits = tail.keys[row][head] @ tail.queries.ring[entry, head].double() * 0.5
            tail.queries.ring_lse[entry, head] = logits.logsumexp(0) / math.log(2)
    mass = scores.attention_mass(*tail.args, tail.queries, 0.5)
    torch.testing.assert_close(mass.sum(-1), torch.ones(NUM_ROWS, NUM_KV_HEADS))


def test_attention_mass_reads_the_log_sum_exp_that_attention_writes():
    backend, num_keys, scale = choose_backend("cpu"), 21, HEAD_DIM**-0.5
    kv = torch.randn(9, 2, 4, NUM_KV_HEADS, HEAD_DIM)
    table = torch.tensor([[7, 2, 5, 1, 8, 3]])
    q = torch.randn(1, NUM_KV_HEADS, HEAD_DIM)  # the newest token, one query head per KV head
    batch = AttentionBatch(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([num_keys], dtype=torch.int32),
        table.int(),
    )
    plan = backend.plan_attention(batch, NUM_KV_HEADS, NUM_KV_HEADS, HEAD_DIM, 4)
    out, lse = backend.attention(q, kv, plan, scale, True)
    index = torch.arange(num_keys)
    slots = table[:, index // 4] * 4 + index % 4  # [1, num_keys]
    positions = index.int().expand(1, NUM_KV_HEADS, num_keys)
    queries = TailQueries(q, lse, torch.tensor([[0]]), torch.tensor([[num_keys - 1]]))
    mass = scores.attention_mass(kv, slots, positions, queries, scale)
    weighted = mass[..., None] * scores.gather_values(kv, slots)
    torch.testing.assert_close(weighted.sum(2), out)


@pytest.mark.parametrize("chunk", [1, 7, 16, 40])
def test_lightning_compares_keys_of_one_chunk_and_divides_by_its_size(chunk):
    tail = Tail([40, 23])

    def slow(row, head):
        means = []
        for start in range(0, int(tail.lens[row]), chunk):
            own = slice(start, start + chunk)
            positions = tail.row_positions(row, head)[own]
            means += slow_similarity(tail.keys[row][head, own], positions, 0.5)
        return means

    check_rows(tail, scores.lightning_similarity(*tail.args, chunk, 0.5), slow)


def test_flash_compares_keys_of_the_whole_tail_across_tiles():
    tail = Tail([300, 270])
    check_rows(
        tail,
        scores.flash_similarity(*tail.args, 0.5),
        lambda row, head: slow_similarity(tail.keys[row][head], tail.row_positions(row, head), 0.5),
    )


def test_one_lightning_chunk_over_the_whole_tail_is_flash():
    tail = Tail([280, 100])
    lightning = scores.lightning_similarity(*tail.args, 400, 0.5)
    torch.testing.assert_close(lightning, scores.flash_similarity(*tail.args, 0.5))


def test_newest_of_three_duplicates_looks_least_redundant():
    tail = Tail([3, 3])
    tail.kv[:, 0] = 1.0  # every key alike
    similarity = scores.lightning_similarity(*tail.args, 256, 0.5)
    newest = tail.positions[..., :3].argmax(-1)
    assert torch.equal(similarity.argmin(-1), newest)
    torch.testing.assert_close(similarity.amin(-1), torch.zeros(NUM_ROWS, NUM_KV_HEADS))


def test_one_pass_gives_what_the_two_passes_give():
    tail = Tail([33, 20])
    mass, similarity = scores.mass_and_similarity(*tail.args, tail.queries, 0.3, 16, 0.5)
    assert torch.equal(mass, scores.attention_mass(*tail.args, tail.queries, 0.3))
    assert torch.equal(similarity, scores.lightning_similarity(*tail.args, 16, 0.5))


def test_gathered_values_are_the_values_of_the_named_slots():
    tail = Tail([10, 4])
    values = scores.gather_values(tail.kv, tail.slots)
    slot = tail.slots[1, 3].item()
    assert torch.equal(values[1, :, 3], tail.kv[slot // 4, 1, slot % 4])
    assert (values[1, :, 4:] == 0).all()


def test_max_pool_reaches_two_slots_and_never_into_padding():
    score = torch.tensor([[[5.0, 0.0, 0.0, 1.0, 0.0, 99.0]]])
    pooled = scores.max_pool(score, torch.tensor([5]), 5)
    assert pooled[0, 0, :5].tolist() == [5.0, 5.0, 5.0, 1.0, 1.0]


def test_even_pooling_kernel_is_an_error():
    with pytest.raises(AssertionError, match="must be odd"):
        scores.max_pool(torch.zeros(1, 1, 4), torch.tensor([4]), 4)


def test_history_counts_when_its_decayed_value_is_higher():
    mass, history = torch.tensor([[[0.5, 0.1, 0.3]]]), torch.tensor([[[0.5, 0.5, 0.0]]])
    assert scores.global_score(mass, history, 0.8).tolist() == [[pytest.approx([0.5, 0.4, 0.3])]]


def test_redundancy_sums_to_one_over_the_real_slots():
    similarity = torch.rand(2, 3, 10)
    share = scores.redundancy_share(similarity, torch.tensor([10, 4]), 0.4)
    torch.testing.assert_close(share.sum(-1), torch.ones(2, 3))
    assert (share[1, :, 4:] == 0).all()
    ratio = share[0, 0, 0] / share[0, 0, 1]
    torch.testing.assert_close(ratio, ((similarity[0, 0, 0] - similarity[0, 0, 1]) / 0.4).exp())


def test_combination_pools_only_rows_in_order_and_stores_the_unpooled_score():
    mass = torch.tensor([[[0.4, 0.0, 0.0, 0.0, 0.0]]]).repeat(2, 1, 1)
    flat = torch.zeros(2, 1, 5)
    keep, history = scores.combine_scores(
        mass,
        flat,
        flat,
        torch.tensor([5, 5]),
        torch.tensor([True, False]),
        decay=0.8,
        pool_kernel=5,
        temperature=0.4,
        mass_weight=0.25,
    )
    redundancy = 0.75 / 5
    assert keep[0, 0].tolist() == pytest.approx([0.1 - redundancy] * 3 + [-redundancy] * 2)
    assert keep[1, 0].tolist() == pytest.approx([0.1 - redundancy] + [-redundancy] * 4)
    assert torch.equal(history, mass)
