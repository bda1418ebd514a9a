"""Hooks of layers collect the rows of a step and no others, and exist only before updates."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.layers import (
    EXACT,
    after_a_failure,
    after_gradients_were_dropped,
    beside_evaluation,
    hooks,
    mean_square,
    one_pass,
    sgd,
    statistics,
    step,
    through_a_copy,
    with_one,
)
from support.numerics import relative_error
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from kronbit import KFAC


def after_one_update(
    passes: Callable[[nn.Module, KFAC, Tensor], None],
    model: nn.Module | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return L and R of the first layer after one update."""
    torch.manual_seed(2)
    model = model or nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = KFAC(sgd(model), model=model, **{**EXACT, **options})
    x = torch.randn(8, 6)
    optimizer.zero_grad()
    passes(model, optimizer, x)
    optimizer.step()
    first = next(module for module in model.modules() if isinstance(module, nn.Linear))
    L, R = statistics(optimizer, first.weight)
    return L.clone(), R.clone()


def in_two_passes(model: nn.Module, optimizer: KFAC, x: Tensor) -> None:
    for half in x.chunk(2):
        model(half).square().mean().backward()


@pytest.mark.parametrize(
    "passes",
    [after_a_failure, after_gradients_were_dropped, beside_evaluation, through_a_copy],
)
def test_passes_that_do_not_contribute_to_the_gradient_are_ignored(
    passes: Callable[[nn.Module, KFAC, Tensor], None],
) -> None:
    for result, expected in zip(after_one_update(passes), after_one_update(one_pass), strict=True):
        assert torch.equal(result, expected)


def test_several_backward_passes_are_one_batch() -> None:
    """Each loss is a mean over half of the batch, so output gradients double, and inputs do not."""
    (L, R), (L2, R2) = after_one_update(one_pass), after_one_update(in_two_passes)
    assert relative_error(R2, R) < 1e-6
    assert relative_error(L2, 4 * L) < 1e-6


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_does_not_count_twice(reentrant: bool) -> None:
    def checkpointed(model: nn.Module, optimizer: KFAC, x: Tensor) -> None:
        out = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
        out.square().mean().backward()

    for result, expected in zip(
        after_one_update(checkpointed), after_one_update(one_pass), strict=True
    ):
        assert torch.equal(result, expected)


def test_a_layer_in_two_checkpoints_has_the_rows_of_both() -> None:
    def checkpointed(model: nn.Module, optimizer: KFAC, x: Tensor) -> None:
        hidden = checkpoint(model[0], x.requires_grad_(), use_reentrant=False)
        checkpoint(model[0], hidden, use_reentrant=False).square().mean().backward()

    def twice(model: nn.Module, optimizer: KFAC, x: Tensor) -> None:
        model[0](model[0](x)).square().mean().backward()

    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 6))
    twin = copy.deepcopy(model)
    for result, expected in zip(
        after_one_update(checkpointed, model), after_one_update(twice, twin), strict=True
    ):
        assert torch.equal(result, expected)


def test_inputs_are_saved_like_tensors_of_autograd() -> None:
    """Saved-tensor hooks (checkpointing, offloading) also apply to the inputs kronbit keeps."""
    model = nn.Linear(6, 5)
    x = torch.randn(8, 6)
    packed: list[Tensor] = []

    def pack(saved: Tensor) -> Tensor:
        packed.append(saved)
        return saved * 2 if saved.data_ptr() == x.data_ptr() else saved

    optimizer = KFAC(sgd(model), model=model, **EXACT)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss = model(x).square().mean()
    assert sum(saved.data_ptr() == x.data_ptr() for saved in packed) == 2
    loss.backward()
    optimizer.step()
    _, R = statistics(optimizer, model.weight)
    assert relative_error(R, mean_square(with_one(2 * x))) < 1e-6


def test_statistics_are_unscaled() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)

    def scaled(model: nn.Module, optimizer: KFAC, x: Tensor) -> None:
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)

    for result, expected in zip(
        after_one_update(scaled, grad_scaler=scaler), after_one_update(one_pass), strict=True
    ):
        assert relative_error(result, expected) < 1e-6


def test_steps_skipped_by_a_scaler_leave_no_rows() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = KFAC(sgd(model), model=model, grad_scaler=scaler, **EXACT)
    x = torch.randn(8, 6)
    for factor in (torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    for result, expected in zip(
        statistics(optimizer, model[0].weight), after_one_update(one_pass), strict=True
    ):
        assert relative_error(result, expected) < 1e-6


def test_a_module_that_is_called_twice_has_the_rows_of_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    model = Twice()
    x = torch.randn(8, 6)
    hidden = model.layer(x).detach()
    optimizer = KFAC(sgd(model), model=model, **EXACT)
    step(model, optimizer, lambda out: out.square().mean(), x)
    _, R = statistics(optimizer, model.layer.weight)
    assert relative_error(R, mean_square(with_one(torch.cat([x, hidden])))) < 1e-5


def test_frozen_and_unused_layers_are_skipped() -> None:
    model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)])
    model[1].requires_grad_(False)
    model[3].bias.requires_grad_(False)
    optimizer = KFAC(sgd(model), model=model, **EXACT)
    model[3](model[1](model[0](torch.randn(8, 6)))).square().mean().backward()
    optimizer.step()
    L, R = statistics(optimizer, model[0].weight)
    assert L.any()
    assert R.shape == (7, 7)
    assert statistics(optimizer, model[3].weight)[1].shape == (6, 6)
    assert model[1].weight not in optimizer.state
    assert not statistics(optimizer, model[2].weight)[0].any()
    assert optimizer.diagnostics()["missed_statistics"] == 0


def test_hooks_are_present_only_before_updates() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = KFAC(sgd(model), model=model, bits=32, update_every=3, refresh_every=6)
    for t in range(1, 10):
        assert hooks(model) == (2 if t % 3 == 0 else 0)
        step(model, optimizer, lambda out: out.square().mean(), torch.randn(8, 6))
    step(model, optimizer, lambda out: out.square().mean(), torch.randn(8, 6))
    step(model, optimizer, lambda out: out.square().mean(), torch.randn(8, 6))
    assert hooks(model) == 2
    optimizer.close()
    assert hooks(model) == 0
    before = [A.clone() for A in statistics(optimizer, model[0].weight)]
    with pytest.warns(RuntimeWarning, match="2 layer.s., such as '0', have a gradient, but were"):
        step(model, optimizer, lambda out: out.square().mean(), torch.randn(8, 6))
    assert optimizer.diagnostics()["missed_statistics"] == 2
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.diagnostics()["missed_statistics"] == 0
    for old, new in zip(before, statistics(optimizer, model[0].weight), strict=True):
        assert torch.equal(old, new)


def test_excluded_layers_have_no_hooks() -> None:
    model = nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 5), nn.Conv2d(3, 3, 1, groups=3))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
    groups[1]["precondition"] = False
    optimizer = KFAC(
        [*groups, {"params": model[2].parameters()}], model=model, lr=0.1, max_order=30, **EXACT
    )
    assert hooks(model) == 0
    step(nn.Sequential(model[0], model[1]), optimizer, lambda out: out.sum(), torch.randn(2, 6))
    assert hooks(model) == 0


def test_layers_used_in_some_steps_miss_no_statistics() -> None:
    experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
    optimizer = KFAC(sgd(experts), model=experts, bits=32, update_every=3, refresh_every=100)
    for t in range(24):
        step(experts[t % 4], optimizer, lambda out: out.square().mean(), torch.randn(8, 6))
    assert optimizer.diagnostics()["missed_statistics"] == 0
    for expert in experts:
        assert optimizer.state[expert.weight]["step"] == 6
        assert statistics(optimizer, expert.weight)[0].any()


@pytest.mark.parametrize("foreign", [True, False])
def test_biases_left_to_others_are_unchanged(foreign: bool) -> None:
    """A bias of another optimizer, or with precondition=False, keeps its gradient."""
    model = nn.Linear(6, 5)
    groups: list[dict[str, Any]] = [{"params": [model.weight]}]
    if not foreign:
        groups.append({"params": [model.bias], "precondition": False})
    options = {**EXACT, "refresh_every": 1}
    optimizer = KFAC(groups, base="sgd", lr=0.1, model=model, **options)
    model(torch.randn(9, 6)).pow(4).mean().backward()
    before = model.bias.grad.clone()
    optimizer.step()
    assert torch.equal(model.bias.grad, before)
    assert statistics(optimizer, model.weight)[1].shape == (6, 6)


def test_layers_added_later_have_hooks_at_once() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    optimizer = KFAC(model[0].parameters(), base="sgd", lr=0.1, model=model, **EXACT)
    step(model, optimizer, lambda out: out.square().mean(), torch.randn(8, 6))
    optimizer.add_param_group({"params": list(model[1].parameters())})
    assert "goes with 1.weight" in optimizer.summary()
    step(model, optimizer, lambda out: out.square().mean(), torch.randn(8, 6))
    assert statistics(optimizer, model[1].weight)[1].shape == (7, 7)
    assert optimizer.diagnostics()["missed_statistics"] == 0


def test_staggered_layers_miss_no_statistics_if_copied_at_every_step() -> None:
    model = nn.Sequential(*(nn.Linear(6 + i, 7 + i) for i in range(6)))
    optimizer = KFAC(
        sgd(model), model=model, bits=32, update_every=4, refresh_every=8, stagger=True
    )
    for _ in range(20):
        step(model, optimizer, lambda out: out.square().mean(), torch.randn(8, 6))
        model, optimizer = copy.deepcopy((model, optimizer))
        assert optimizer.diagnostics()["missed_statistics"] == 0
    for layer in model:
        assert all(A.any() for A in statistics(optimizer, layer.weight))


def test_functional_calls_and_changed_inputs_are_ignored() -> None:
    def with_others(model: nn.Module, optimizer: KFAC, x: Tensor) -> None:
        others = {name: p.detach() * 2 for name, p in model.named_parameters()}
        functional_call(model, others, (x.clone().requires_grad_(),)).sum().backward()
        torch.func.vmap(lambda row: model(row))(x)
        one_pass(model, optimizer, x)

    def with_another_pass(model: nn.Module, optimizer: KFAC, x: Tensor) -> None:
        overwritten = x * 3
        with torch.autocast("cpu", dtype=torch.bfloat16):  # autograd saves a bf16 copy
            out = model[0](overwritten)
            overwritten.zero_()
        out.sum().backward()
        model[2](torch.relu(model[0](x))).square().mean().backward()

    expected = after_one_update(one_pass)
    for result, reference in zip(after_one_update(with_others), expected, strict=True):
        assert torch.equal(result, reference)
    for result, reference in zip(after_one_update(with_another_pass), expected, strict=True):
        assert torch.equal(result, reference)


def test_hooks_do_not_keep_an_optimizer_alive() -> None:
    model = nn.Linear(6, 5)
    optimizer = KFAC(sgd(model), model=model, **EXACT)
    reference = weakref.ref(optimizer._statistics)
    del optimizer
    gc.collect()
    assert reference() is None
    model(torch.randn(2, 6)).sum().backward()
