"""The choice of an attention: what is wrong is not chosen."""

import torch
from attention import attend_by_document, choose_attention, difference_from_documents


def test_attention_by_document_is_causal_attention_with_shared_heads():
    q, k, v = (torch.randn(9, heads, 8) for heads in (4, 2, 2))
    attended = attend_by_document(q, k, v, torch.tensor([0, 4, 4, 9]), 9)
    scores = torch.einsum("qhd,khd->hqk", q[4:], k[4:].repeat_interleave(2, dim=1)) / 8**0.5
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, v[4:].repeat_interleave(2, dim=1))
    torch.testing.assert_close(attended[4:], expected)


def test_the_check_sees_attention_that_looks_into_another_document():
    def careless(q, k, v, starts, max_len):
        return attend_by_document(q, k, v, torch.tensor([0, q.shape[0]]), max_len)

    cpu = torch.device("cpu")
    assert difference_from_documents(careless, cpu, torch.float32) > 0.1
    assert difference_from_documents(attend_by_document, cpu, torch.float32) == 0


def test_without_a_card_attention_is_by_document():
    assert choose_attention(torch.device("cpu"), print) is attend_by_document
