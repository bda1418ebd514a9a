"""An algorithm may supply the direction, and may step some parameters instead of the base."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.faults import interrupted_at
from torch import Tensor, nn

import kronbit
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

    def _params_not_for_base(self) -> Sequence[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.dim() == 2]

    def _step_params(self, params: Sequence[Tensor]) -> None:
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


def sign_model(**options: Any) -> tuple[nn.Module, Sign]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 66), nn.Linear(66, 8))
    adamw = torch.optim.AdamW(model.parameters(), lr=LR)
    return model, Sign(adamw, refresh_every=100, **options)


def grads_of(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def steps_of(optimizer: Sign) -> set[int]:
    return {entry["step"] for entry in optimizer.state.values()}


@pytest.mark.parametrize("keep", [False, True])
def test_an_algorithm_steps_matrices_and_the_base_the_rest(keep: bool) -> None:
    model, optimizer = sign_model(keep_gradients=keep)
    reference = deepcopy(model)
    biases = [p for p in reference.parameters() if p.dim() == 1]
    adamw = torch.optim.AdamW(biases, lr=LR)
    for t in range(4):
        given = gradients(model, t)
        for p, G in zip(reference.parameters(), gradients(reference, t), strict=True):
            if p.dim() == 2 and not (t == 3 and G.shape == (8, 66)):
                with torch.no_grad():
                    p.sub_(LR * G.sign())
        if t == 3:
            model[1].weight.grad = None
        optimizer.step()
        adamw.step()
        for p, G in zip(model.parameters(), given, strict=True):
            assert p.grad is None if t == 3 and G.shape == (8, 66) else torch.equal(p.grad, G)
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    assert {p.dim() for p, state in optimizer.base.state.items() if state} == {1}
    assert steps_of(optimizer) == {3, 4}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("hook", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_failed_step_of_the_base_does_not_count(error: type[BaseException], hook: str) -> None:
    """The algorithm has not stepped, all gradients are there, and the step can be repeated."""
    model, optimizer = sign_model()
    gradients(model, 0)
    optimizer.step()
    before = deepcopy(list(model.parameters()))
    given = gradients(model, 1)

    def fail(*_: object) -> None:
        raise error

    handle = getattr(optimizer.base, hook)(fail)
    with pytest.raises(error):
        optimizer.step()
    handle.remove()
    assert steps_of(optimizer) == {1}
    matrices = zip(model.parameters(), before, strict=True)
    assert all(torch.equal(p, q) for p, q in matrices if p.dim() == 2)
    assert all(map(torch.equal, grads_of(model), given))
    optimizer.step()
    assert steps_of(optimizer) == {2}
    assert not any(map(torch.equal, model.parameters(), before))


def test_a_failed_step_of_the_algorithm_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = sign_model()
    given = gradients(model, 0)

    def fail(self: Sign, params: Sequence[Tensor]) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Sign, "_step_params", fail)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    assert steps_of(optimizer) == {0}
    assert all(map(torch.equal, grads_of(model), given))
    optimizer.step()
    assert steps_of(optimizer) == {1}


@pytest.mark.parametrize("where", [contextlib.__file__, *kronbit.__path__])
def test_gradients_are_restored_before_an_interrupt_is_raised(where: str) -> None:
    model, optimizer = sign_model()
    gradients(model, 0)
    with interrupted_at(0, where) as lines:
        optimizer.step()
    assert lines[0] > 60
    interrupted = 0
    for nth in range(lines[0] // 2, lines[0], 2):
        gradients(model, 1)
        try:
            with interrupted_at(nth, where):
                optimizer.step()
        except KeyboardInterrupt:
            interrupted += 1
            assert None not in grads_of(model)
    assert interrupted > 10
