"""An algorithm may write its own direction, and step the parameters that it names itself."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from kronbit import Shampoo
from kronbit.step.step_plan import DevicePlan

LR = 0.1


class Orthogonal(Shampoo):
    """Replaces the gradient of every matrix by its polar factor."""

    def _rewrite(self, device: DevicePlan) -> None:
        for grad in device.measured.grads[: len(device.stacks.members)]:
            if grad is not None:
                U, _, Vh = torch.linalg.svd(grad, full_matrices=False)
                grad.copy_(U @ Vh)


class Sign(Shampoo):
    """Steps matrices by the sign of G̃."""

    def _stepped_here(self) -> Collection[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.dim() == 2]

    def _step_here(self, params: Collection[Tensor]) -> None:
        for p in params:
            if p.grad is not None:
                p.sub_(LR * p.grad.sign())


def gradients(model: nn.Module, t: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(t)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_a_direction_takes_the_place_of_the_preconditioned_gradient() -> None:
    model = nn.Sequential(nn.Linear(70, 66), nn.Linear(66, 8))
    expected = [p.detach().double() for p in model.parameters()]
    optimizer = Orthogonal(torch.optim.SGD(model.parameters(), lr=LR), update_every=1)
    for t in range(4):
        given = gradients(model, t)
        for i, (W, G) in enumerate(zip(expected, given, strict=True)):
            if t == 3 and i == 0:
                model[0].weight.grad = None
                continue
            direction = G.double()
            if W.dim() == 2:
                lam, V = torch.linalg.eigh(direction @ direction.mT)
                direction = (V * lam.clamp(min=1e-12) ** -0.5) @ V.mT @ direction
            W -= LR * direction
        optimizer.step()
    for p, W in zip(model.parameters(), expected, strict=True):
        assert (p.double() - W).norm() < 1e-4 * W.norm()


def sign_model() -> tuple[nn.Module, Sign]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 66), nn.Linear(66, 8))
    return model, Sign(torch.optim.AdamW(model.parameters(), lr=LR), refresh_every=100)


def test_an_algorithm_steps_matrices_and_the_base_the_rest() -> None:
    model, optimizer = sign_model()
    reference = deepcopy(model)
    biases = [p for p in reference.parameters() if p.dim() == 1]
    adamw = torch.optim.AdamW(biases, lr=LR)
    for t in range(3):
        given = gradients(model, t)
        for p, G in zip(reference.parameters(), gradients(reference, t), strict=True):
            if p.dim() == 2:
                with torch.no_grad():
                    p.sub_(LR * G.sign())
        optimizer.step()
        adamw.step()
        assert all(map(torch.equal, [p.grad for p in model.parameters()], given))
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    dims = {p.dim() for p, state in optimizer.base.state.items() if state}
    assert dims == {1}
    assert {entry["step"] for entry in optimizer.state.values()} == {3}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("late", [False, True])
def test_a_failed_step_of_the_base_does_not_count(error: type[BaseException], late: bool) -> None:
    """The algorithm has not stepped, all gradients are there, and the step can be repeated."""
    model, optimizer = sign_model()
    gradients(model, 0)
    optimizer.step()
    before = deepcopy(list(model.parameters()))
    given = gradients(model, 1)

    def fail(*_: object) -> None:
        raise error

    register = optimizer.base.register_step_pre_hook
    if late:
        register = optimizer.base.register_step_post_hook
    handle = register(fail)
    with pytest.raises(error):
        optimizer.step()
    handle.remove()
    assert {entry["step"] for entry in optimizer.state.values()} == {1}
    matrices = zip(model.parameters(), before, strict=True)
    assert all(torch.equal(p, q) for p, q in matrices if p.dim() == 2)
    assert all(map(torch.equal, [p.grad for p in model.parameters()], given))
    optimizer.step()
    assert {entry["step"] for entry in optimizer.state.values()} == {2}
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
