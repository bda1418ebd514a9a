"""An algorithm with its own direction and its own step plugs into two methods."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from kronbit import Shampoo
from kronbit.step.step_plan import DevicePlan

LR = 0.1


class Orthogonal(Shampoo):
    """Replaces the gradient of every matrix by its polar factor."""

    def _rewrite(self, device: DevicePlan) -> None:
        for member in range(len(device.stacks.members)):
            grad = device.param(member).grad
            assert grad is not None
            U, _, Vh = torch.linalg.svd(grad, full_matrices=False)
            grad.copy_(U @ Vh)


class Sign(Shampoo):
    """Steps matrices by the sign of G̃. F sees and steps only the other parameters."""

    def _step_base(self) -> None:
        hidden: dict[Tensor, Tensor | None] = {}
        for p in (p for group in self.param_groups for p in group["params"] if p.dim() == 2):
            hidden[p] = p.grad
            assert p.grad is not None
            p.sub_(LR * p.grad.sign())
            p.grad = None
        super()._step_base()
        for p, grad in hidden.items():
            p.grad = grad


def gradients(model: nn.Module, t: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(t)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_a_direction_takes_the_place_of_the_preconditioned_gradient() -> None:
    model = nn.Sequential(nn.Linear(70, 66), nn.Linear(66, 8))
    expected = [p.detach().double() for p in model.parameters()]
    optimizer = Orthogonal(torch.optim.SGD(model.parameters(), lr=LR), update_every=1)
    for t in range(3):
        for W, G in zip(expected, gradients(model, t), strict=True):
            direction = G.double()
            if W.dim() == 2:
                lam, V = torch.linalg.eigh(direction @ direction.mT)
                direction = (V * lam.clamp(min=1e-12) ** -0.5) @ V.mT @ direction
            W -= LR * direction
        optimizer.step()
    for p, W in zip(model.parameters(), expected, strict=True):
        assert (p.double() - W).norm() < 1e-4 * W.norm()


def test_an_algorithm_steps_matrices_and_the_base_the_rest() -> None:
    model = nn.Sequential(nn.Linear(70, 66), nn.Linear(66, 8))
    reference = deepcopy(model)
    optimizer = Sign(torch.optim.AdamW(model.parameters(), lr=LR), refresh_every=100)
    biases = [p for p in reference.parameters() if p.dim() == 1]
    adamw = torch.optim.AdamW(biases, lr=LR)
    for t in range(3):
        gradients(model, t)
        for p, G in zip(reference.parameters(), gradients(reference, t), strict=True):
            if p.dim() == 2:
                with torch.no_grad():
                    p.sub_(LR * G.sign())
        optimizer.step()
        adamw.step()
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    dims = {p.dim() for p, state in optimizer.base.state.items() if state}
    assert dims == {1}
    assert {entry["step"] for entry in optimizer.state.values()} == {3}
