"""Draws and scores line by line, each in memory of its own: no line knows of the others.

Knows nothing of requests, rows or which settings a caller may choose.
"""

import torch
from torch import Tensor

from zipage_lang.kernels.backend import RowSettings
from zipage_lang.kernels.reference import sampling


def draw_rows(logits: Tensor, rows: Tensor, settings: RowSettings, max_top_k: int) -> Tensor:
    """As `sampling.draw_rows`: int64 [2, num_lines], token ids and whether the logits are bad."""
    lines = [
        sampling.pick_tokens(line.clone(), row, settings, max_top_k)
        for line, row in zip(logits.split(1), rows.split(1), strict=True)
    ]
    drawn = torch.cat(lines, dim=1)  # [2, num_lines]
    sampling.move_rows_on(rows, drawn[0], settings)
    return drawn


def score_tokens(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `sampling.score_tokens`: logprobs, ranks, top ids and their logprobs of every line."""
    scores = [
        sampling.score_tokens(line.clone(), token_id, num_top)
        for line, token_id in zip(logits.split(1), token_ids.split(1), strict=True)
    ]
    logprobs, ranks, top_ids, top_logprobs = zip(*scores, strict=True)
    return torch.cat(logprobs), torch.cat(ranks), torch.cat(top_ids), torch.cat(top_logprobs)
