"""Muon's parts do what they say."""

import copy

import torch
from optimizer import STEP_RMS, MuonAdam, orthogonalize


def test_orthogonalizing_brings_all_singular_values_near_one_and_keeps_directions():
    matrices = torch.randn(3, 20, 12, generator=torch.Generator().manual_seed(1))
    for one, result in zip(matrices, orthogonalize(matrices), strict=True):
        assert result.shape == (20, 12)
        values = torch.linalg.svdvals(result)
        assert values.min() > 0.6
        assert values.max() < 1.3
        u, _, v = torch.linalg.svd(one, full_matrices=False)
        aligned = (u * result.matmul(v.T)).sum(0)  # u_i . result v_i
        assert aligned.min() > 0.6


def test_a_step_has_the_promised_size_and_changes_every_parameter(model):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens = torch.randint(4, 99, (100,), generator=torch.Generator().manual_seed(1))
    starts = torch.tensor([0, 50, 100], dtype=torch.int32)
    model.token_losses(model(tokens, starts), tokens.roll(-1)).mean().backward()
    MuonAdam(model).step(0.01)
    for name, parameter in model.named_parameters():
        step = (parameter - before[name]).detach()
        assert step.abs().max() > 0, name
        assert parameter.grad is None
        if name.endswith("q_proj.weight"):
            rms = float((step + 0.001 * before[name]).square().mean().sqrt())
            shortest_by_longest = min(step.shape) / max(step.shape)
            assert 0.6 < rms / (0.01 * STEP_RMS * shortest_by_longest**0.5) < 1.3


def test_a_restored_optimizer_goes_on_as_the_first_would(model):
    def gradients(seed):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)

    first = MuonAdam(model)
    gradients(1)
    first.step(0.01)
    saved = {name: p.detach().clone() for name, p in model.state_dict().items()}
    second = MuonAdam(model)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    gradients(2)
    first.step(0.01)
    expected = {name: p.detach().clone() for name, p in model.state_dict().items()}
    model.load_state_dict(saved)
    gradients(2)
    second.step(0.01)
    torch.testing.assert_close(dict(model.state_dict()), expected)
