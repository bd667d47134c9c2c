"""Muon for the matrices inside layers, AdamW for everything else, under one learning rate.

Knows nothing of schedules, losses or the model's structure beyond parameter names and shapes.

Sources: Muon (K. Jordan, 2024) for the orthogonalised momentum and its polynomial; Moonlight (arXiv
2502.16982, section 2.2) for the scale that makes its steps as large as AdamW's; AdamW (1711.05101).
"""

import collections
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
WEIGHT_DECAY = 0.1
STEP_RMS = 0.2  # of an AdamW step in units of the learning rate, as seen in practice
POLYNOMIAL = (3.4445, -4.7750, 2.0315)
MAX_GRADIENT_NORM = 1.0


class MuonAdam:
    """Steps all parameters of a model from their `.grad`."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "layers." in name]
        inside = {id(p) for p in matrices}
        self._others = [p for _, p in named if id(p) not in inside]
        self._all = [p for _, p in named]
        self._groups: dict[tuple[int, ...], list[nn.Parameter]] = collections.defaultdict(list)
        for parameter in matrices:  # those of one shape are orthogonalised in one go
            self._groups[tuple(parameter.shape)].append(parameter)
        self._momentum = {
            shape: torch.zeros(len(group), *shape, device=group[0].device)
            for shape, group in self._groups.items()
        }
        self._adam = torch.optim.AdamW(self._others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def step(self, learning_rate: float) -> Tensor:
        """One step; returns the gradient's norm before it was clipped, float32 []."""
        norm = nn.utils.clip_grad_norm_(self._all, MAX_GRADIENT_NORM, foreach=True)
        for shape, group in self._groups.items():
            self._step_matrices(group, self._momentum[shape], learning_rate)
        self._adam.param_groups[0]["lr"] = learning_rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        for parameter in self._all:
            parameter.grad = None
        return norm

    def state_dict(self) -> dict[str, Any]:
        momentum = {str(shape): buffer for shape, buffer in self._momentum.items()}
        return {"momentum": momentum, "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for shape, buffer in self._momentum.items():
            buffer.copy_(state["momentum"][str(shape)])
        self._adam.load_state_dict(state["adam"])

    def _step_matrices(
        self, group: list[nn.Parameter], momentum: Tensor, learning_rate: float
    ) -> None:
        gradients = torch.stack([_gradient(p) for p in group])  # [num_matrices, rows, columns]
        momentum.lerp_(gradients, 1 - MOMENTUM)
        ahead = gradients.lerp_(momentum, MOMENTUM)  # Nesterov's
        rows, columns = ahead.shape[1:]
        scale = learning_rate * STEP_RMS * max(rows, columns) ** 0.5
        steps = orthogonalize(ahead).float().mul_(scale).unbind()
        torch._foreach_mul_(group, 1 - learning_rate * WEIGHT_DECAY)
        torch._foreach_sub_(group, steps)


def orthogonalize(matrices: Tensor, num_rounds: int = 5) -> Tensor:
    """About U V^T of each matrix U S V^T: all singular values come near 1.

    matrices: [num_matrices, rows, columns]; returns the same shape, in bfloat16 on a card and in
    float32 elsewhere. Muon's quintic iteration; its values end between about 0.7 and 1.2.
    """
    dtype = torch.bfloat16 if matrices.is_cuda else torch.float32
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if is_tall else matrices).to(dtype)  # [num_matrices, short, long]
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = POLYNOMIAL
    for _ in range(num_rounds):
        square = x @ x.mT  # [num_matrices, short, short]
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "a matrix took no part in the loss"
    return parameter.grad
