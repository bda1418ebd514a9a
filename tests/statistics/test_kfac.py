"""K-FAC and AdaBK: statistics match explicit computations, and hooks survive unusual passes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support import oracle
from support.layers import (
    after_a_failure,
    after_gradients_were_dropped,
    beside_evaluation,
    hooks,
    one_pass,
    output_gradients,
    patches,
    sgd,
    step,
    through_a_copy,
    with_one,
)
from support.numerics import angle, relative_error, slow
from support.ranks import run_on_ranks
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import kronbit
from kronbit import KFAC, AdaBK

# With these options, A is the M of the last update, in float32.
EXACT: dict[str, Any] = {"bits": 32, "beta": 0.0, "update_every": 1, "refresh_every": 100}


def statistics(optimizer: KFAC, weight: Tensor, block: int = 0) -> tuple[Tensor, Tensor]:
    """Return L and R of a layer."""
    factors = optimizer.state[weight][f"block_{block}"]
    return factors["left"]["matrix"], factors["right"]["matrix"]


def mean_square(rows: Tensor) -> Tensor:
    rows = rows.double()
    return rows.mT @ rows / rows.shape[-2]


def test_statistics_of_linear_layers_match_explicit_computations(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4, bias=False))
    x, target = torch.randn(30, 5), torch.randint(0, 4, (30,))
    y0, y2 = (
        output_gradients(model, name, lambda out: functional.cross_entropy(out, target), x)
        for name in "02"
    )
    h = torch.tanh(model[0].double()(x.double())).detach()
    model.float().to(device)
    optimizer = KFAC(sgd(model), model=model, **EXACT)
    device_target = target.to(device)
    step(model, optimizer, lambda out: functional.cross_entropy(out, device_target), x.to(device))
    for layer, y, rows in ((model[0], y0, with_one(x)), (model[2], y2, h)):
        L, R = statistics(optimizer, layer.weight)
        assert relative_error(L, mean_square(y)) < 1e-5
        assert relative_error(R, mean_square(rows)) < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": (0, 1), "bias": False},
        {"kernel_size": 3, "dilation": 2, "padding": "same", "groups": 2},
        {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
        {"kernel_size": 1, "groups": 4},
    ],
)
@pytest.mark.parametrize("shared", ["expand", "reduce"])
def test_statistics_of_convolutions_match_explicit_computations(
    shared: str, options: dict[str, Any], device: torch.device
) -> None:
    conv = nn.Conv2d(8, 12, **options)
    model = nn.Sequential(conv, nn.ReLU(inplace=True), nn.Flatten())
    x = torch.randn(6, 8, 7, 6)

    def loss(out: Tensor) -> Tensor:
        return out.square().sum(1).mean()

    y = output_gradients(model, "0", loss, x)
    rows = patches(conv, x)
    model.to(device)
    optimizer = KFAC(sgd(model), model=model, shared=shared, workspace_mb=0.005, **EXACT)
    step(model, optimizer, loss, x.to(device))
    by_group = y.flatten(2).unflatten(1, (conv.groups, -1))  # images, groups, outputs, positions
    for group in range(conv.groups):
        inputs, outputs = rows[group], by_group[:, group].mT.flatten(0, 1)
        if shared == "reduce":
            inputs = inputs.unflatten(0, (6, -1)).mean(1)
            outputs = outputs.unflatten(0, (6, -1)).sum(1)
        inputs = inputs if conv.bias is None else with_one(inputs)
        L, R = statistics(optimizer, conv.weight, group)
        assert relative_error(L, mean_square(outputs)) < 1e-5
        assert relative_error(R, mean_square(inputs)) < 1e-5


class Attention(nn.Module):
    """One head with a fused projection; tokens share the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(functional.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("shared", ["expand", "reduce"])
def test_statistics_of_attention_match_explicit_computations(
    shared: str, device: torch.device
) -> None:
    model = Attention()
    x = torch.randn(4, 5, 6)

    def loss(out: Tensor) -> Tensor:
        return out.square().sum((1, 2)).mean()

    y = output_gradients(model, "qkv", loss, x)
    inputs, outputs = x.double(), y
    if shared == "reduce":
        inputs, outputs = inputs.mean(1, keepdim=True), outputs.sum(1, keepdim=True)
    model.to(device)
    optimizer = AdaBK(sgd(model), model=model, shared=shared, **EXACT)
    step(model, optimizer, loss, x.to(device))
    L, R = statistics(optimizer, model.qkv.weight)
    assert relative_error(L, mean_square(outputs.flatten(0, 1))) < 1e-5
    assert relative_error(R, mean_square(with_one(inputs.flatten(0, 1)))) < 1e-5


def test_conv1d_of_transformers_is_a_transposed_linear_layer() -> None:
    transformers = pytest.importorskip("transformers.pytorch_utils")
    x = torch.randn(20, 6)
    plain, transposed = nn.Linear(6, 9), transformers.Conv1D(9, 6)
    with torch.no_grad():
        transposed.weight.copy_(plain.weight.T)
        transposed.bias.copy_(plain.bias)
    gradients = []
    for layer in (plain, transposed):
        model = nn.Sequential(layer)
        options = {**EXACT, "refresh_every": 1, "damping": 0.1}
        optimizer = KFAC(sgd(model), model=model, **options)
        step(model, optimizer, lambda out: out.pow(4).mean(), x)
        gradients.append((layer.weight.grad, layer.bias.grad))
    (W, b), (Wt, bt) = gradients
    assert relative_error(Wt.T, W) < 1e-5
    assert relative_error(bt, b) < 1e-5


def test_a_linear_network_with_a_squared_loss_has_the_exact_factors() -> None:
    """For ½ ‖W x - t‖² with residuals independent of x, the Fisher matrix is L ⊗ R."""
    model = nn.Linear(4, 3, bias=False)
    x = torch.randn(1, 4, dtype=torch.float64).float().repeat(50, 1)
    x *= torch.where(torch.rand(50, 1) < 0.5, -1.0, 1.0)  # the same x xᵀ everywhere
    noise = torch.randn(50, 3)
    target = (model(x) + noise).detach()
    optimizer = KFAC(sgd(model), model=model, **EXACT)
    step(model, optimizer, lambda out: 0.5 * (out - target).square().sum(), x)
    L, R = statistics(optimizer, model.weight)
    G = torch.einsum("ni,nj->nij", -noise, x).flatten(1).double()  # per example
    assert relative_error(torch.kron(L.double(), R.double()), G.T @ G / 50) < 1e-5


METHODS = [
    ("dense", 32, "paper"),
    ("eigen", 32, "paper"),
    ("eigen", 4, "paper"),
    ("eigen", 4, "compact"),
    ("naive", 8, "paper"),
    ("cholesky", 32, "paper"),
    ("cholesky", 8, "compact"),
    ("cholesky", 4, "compact"),
    ("cholesky", 3, "compact"),
]


def squared_error(target: Tensor, out: Tensor) -> Tensor:
    return (out - target.to(out)).square().sum(1).mean()


@pytest.mark.parametrize(
    ("kind", "method", "bits", "storage"),
    [
        # AdaBK differs only in its options.
        pytest.param(kind, *case, marks=slow if kind is AdaBK and case[1] != 4 else ())
        for case in METHODS
        for kind in (KFAC, AdaBK)
    ],
)
def test_training_matches_the_oracle(
    kind: type[KFAC], method: str, bits: int, storage: str, device: torch.device
) -> None:
    """Updates are at steps 2, 4, 6 and 8, refreshes at 4 and 8. Orders are around 64.

    Rounding may move a code across a threshold, and a code near a small eigenvalue changes a step
    by 5 %. For which seed this happens depends on the CPU, so one of three seeds may deviate.
    """
    tolerance = {32: 1e-3, 8: 1e-2, 4: 1e-2, 3: 3e-2}[bits]
    errors = (deviation(kind, method, bits, storage, device, seed) for seed in (1, 2, 3))
    exceeded = [error for error in errors if error >= tolerance]
    assert not exceeded if bits == 32 else len(exceeded) < 2, exceeded


def deviation(
    kind: type[KFAC], method: str, bits: int, storage: str, device: torch.device, seed: int
) -> float:
    """Return the largest relative error of a parameter's change against the oracle."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(70, 66), nn.Tanh(), nn.Linear(66, 70, bias=False))
    oracle_model = copy.deepcopy(model).double()
    model.to(device)
    schedule = {"update_every": 2, "refresh_every": 4, "bits": bits, "method": method}
    optimizer = kind(sgd(model), model=model, storage=storage, **schedule)
    c = optimizer.config
    names = ("damping", "beta", "start", "exponent")
    options = oracle.Options(
        storage=storage,
        update_rectify=0,
        refresh_rectify=0,
        qr_iterations=2,
        **schedule,
        **{name: getattr(c, name) for name in names},
    )
    first, second = oracle_model[0], oracle_model[2]
    reference = oracle.KFAC(
        [(first.weight, first.bias), (second.weight, None)], sgd(oracle_model), options
    )
    start = copy.deepcopy(oracle_model)
    for _ in range(9):
        x, target = torch.randn(300, 70), torch.randn(300, 70)
        loss = partial(squared_error, target)
        step(model, optimizer, loss, x.to(device))
        ys = [output_gradients(oracle_model, name, loss, x) for name in "02"]
        reference.first_order.zero_grad()
        hidden = oracle_model[1](first(x.double()))
        loss(second(hidden)).backward()
        rows = [(with_one(x.double()), ys[0]), (hidden.detach(), ys[1])]
        with torch.no_grad():
            reference.step(rows)
    return max(
        relative_error((p.detach().cpu().double() - w).detach(), (q - w).detach())
        for p, q, w in zip(
            model.parameters(), oracle_model.parameters(), start.parameters(), strict=True
        )
    )


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
    """Each loss is a mean over half of the batch, so y doubles. All else is as for one batch."""
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


@slow
def test_nonfinite_gradients_of_excluded_layers_become_zero(kernels: torch.device) -> None:
    """A layer above max_order is not preconditioned, but its gradients are still guarded."""
    results = []
    for zeroed in (True, False):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(70, 66), nn.Linear(66, 80), nn.Linear(80, 3)).to(kernels)
        every = {"update_every": 1, "refresh_every": 2, "max_order": 72}
        optimizer = KFAC(sgd(model), model=model, **every)
        for t in range(3):
            optimizer.zero_grad()
            model(torch.randn(90, 70).to(kernels)).square().mean().backward()
            if t == 2:
                model[1].weight.grad[-1, -1] = model[2].bias.grad[0] = torch.nan
                if zeroed:  # as the guard does
                    model[1].weight.grad.zero_()
                    model[2].bias.grad.zero_()
            optimizer.step()
        results.append([p.detach().cpu() for p in model.parameters()])
    for p, q in zip(*results, strict=True):
        assert torch.isfinite(p).all()
        assert torch.equal(p, q)


@pytest.mark.parametrize("bias", [True, False])
def test_memory_format_does_not_matter(bias: bool, kernels: torch.device) -> None:
    """Without a bias, the gradient of a convolution is preconditioned in place."""
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(5)
        layers = nn.Conv2d(4, 8, 3, groups=2, bias=bias), nn.Conv2d(8, 4, 2, bias=bias)
        model = nn.Sequential(*layers).to(kernels, memory_format=layout)
        optimizer = KFAC(sgd(model), model=model, update_every=1, refresh_every=2)
        route = partial(optimizer._statistics.route, config=optimizer.config)
        taps = [route(layer.weight).taps for layer in model]
        assert taps == ([1, 1] if bias else [9, 4])
        if kernels.type == "cpu":
            pytest.skip("interpreted kernels are slow")
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(5, 4, 8, 8).to(kernels)).square().mean().backward()
            assert model[0].weight.grad.is_contiguous(memory_format=layout)
            optimizer.step()
        (guard,) = optimizer._guards.values()
        assert all(guard._addresses.values)
        expected = {0, 1} if layout == torch.channels_last and not bias else set()
        assert guard._addresses.channels_last == expected
        results.append([p.detach().cpu() for p in model.parameters()])
    for p, q in zip(*results, strict=True):
        assert relative_error(p, q) < 1e-4


def test_layers_used_in_some_steps_miss_no_statistics() -> None:
    experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
    optimizer = KFAC(sgd(experts), model=experts, bits=32, update_every=3, refresh_every=100)
    for t in range(24):
        step(experts[t % 4], optimizer, lambda out: out.square().mean(), torch.randn(8, 6))
    assert optimizer.diagnostics()["missed_statistics"] == 0
    for expert in experts:
        assert optimizer.state[expert.weight]["step"] == 6
        assert statistics(optimizer, expert.weight)[0].any()


@pytest.mark.parametrize("shape", [(0, 6), (0, 3, 6)])
def test_empty_batches_add_no_rows(shape: tuple[int, ...]) -> None:
    model = nn.Linear(6, 5)
    optimizer = KFAC(sgd(model), model=model, **EXACT)
    optimizer.zero_grad()
    x = torch.randn(8, 6)
    (model(torch.randn(shape)).sum() + model(x).square().mean()).backward()
    optimizer.step()
    assert relative_error(statistics(optimizer, model.weight)[1], mean_square(with_one(x))) < 1e-6


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


@pytest.mark.parametrize("method", ["dense", "eigen", "naive", "cholesky"])
def test_fewer_rows_than_columns_still_give_roots(method: str) -> None:
    """With low-rank statistics at 8 bits, the update is closer to the exact one than G is."""
    torch.manual_seed(6)
    model = nn.Linear(99, 90)
    bits = 32 if method == "dense" else 8
    every = {"update_every": 1, "refresh_every": 1, "beta": 0.0, "qr_iterations": 4}
    every |= {} if method == "eigen" else {"qr_iterations": 2}
    optimizer = KFAC(sgd(model), model=model, method=method, bits=bits, **every)
    x = torch.randn(16, 99)
    y = output_gradients(model, "", lambda out: out.pow(4).mean(), x)
    optimizer.zero_grad()
    model(x).pow(4).mean().backward()
    G = with_bias(model)
    optimizer.step()
    factors = [mean_square(y), mean_square(with_one(x))]
    L, R = (A + 0.1 * torch.linalg.eigvalsh(A)[-1] * torch.eye(len(A)) for A in factors)
    exact = torch.linalg.inv(L) @ G @ torch.linalg.inv(R)
    assert angle(with_bias(model), exact) < 0.5 * angle(G, exact)


@pytest.mark.parametrize("method", ["dense", "eigen", "naive", "cholesky"])
def test_a_refresh_before_the_first_update_keeps_the_gradient(method: str) -> None:
    model = nn.Linear(70, 66)
    bits = 32 if method == "dense" else 4
    optimizer = KFAC(
        sgd(model), model=model, update_every=5, refresh_every=1, method=method, bits=bits
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 70)).square().mean().backward()
        expected = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        for p, grad in zip(model.parameters(), expected, strict=True):
            assert torch.equal(p.grad, grad)


def test_weight_and_bias_are_grafted_together() -> None:
    model = nn.Linear(6, 5)
    options = {**EXACT, "refresh_every": 1, "damping": 0.1}
    optimizer = KFAC(sgd(model), model=model, keep_gradients=False, **options)
    model(torch.randn(9, 6)).pow(4).mean().backward()
    G = with_bias(model)
    optimizer.step()
    L, R = (A.double() for A in statistics(optimizer, model.weight))
    damped = [A + 0.1 * torch.linalg.eigvalsh(A)[-1] * torch.eye(len(A)) for A in (L, R)]
    Ghat = torch.linalg.inv(damped[0]) @ G @ torch.linalg.inv(damped[1])
    assert relative_error(with_bias(model), Ghat * G.norm() / Ghat.norm()) < 1e-3


def with_bias(model: nn.Linear) -> Tensor:
    return torch.cat([model.weight.grad, model.bias.grad.unsqueeze(1)], 1).double()


def test_keep_gradients_restores_gradients() -> None:
    model = nn.Linear(6, 5)
    options = {**EXACT, "refresh_every": 1, "keep_gradients": True}
    optimizer = KFAC(sgd(model), model=model, **options)
    model(torch.randn(9, 6)).pow(4).mean().backward()
    before = with_bias(model)
    optimizer.step()
    assert torch.equal(with_bias(model), before)


def test_nonfinite_gradients_are_ignored(device: torch.device) -> None:
    model = nn.Linear(6, 5).to(device)
    optimizer = KFAC(sgd(model), model=model, **EXACT)
    x = torch.randn(9, 6, device=device)
    step(model, optimizer, lambda out: out.pow(2).mean(), x)
    before = [A.clone() for A in statistics(optimizer, model.weight)]
    weights = [p.detach().clone() for p in model.parameters()]
    step(model, optimizer, lambda out: out.pow(2).mean() * torch.inf, x)
    for old, new in zip(before, statistics(optimizer, model.weight), strict=True):
        assert torch.equal(old, new)
    for old, p in zip(weights, model.parameters(), strict=True):
        assert torch.equal(old, p)
    assert optimizer.diagnostics()["skipped_gradients"] > 0


def test_training_resumes_bit_identically(device: torch.device) -> None:
    def build() -> tuple[nn.Module, KFAC]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(70, 66), nn.ReLU(), nn.Linear(66, 3)).to(device)
        options = {"update_every": 2, "refresh_every": 4}
        return model, KFAC(sgd(model), model=model, **options)

    def run(model: nn.Module, optimizer: KFAC, steps: range) -> None:
        for t in steps:
            x = torch.randn(16, 70, generator=torch.Generator().manual_seed(t)).to(device)
            step(model, optimizer, lambda out: out.square().mean(), x)

    model, optimizer = build()
    run(model, optimizer, range(5))
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    run(model, optimizer, range(5, 10))
    again, resumed = build()
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    run(again, resumed, range(5, 10))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def test_statistics_of_other_algorithms_are_refused() -> None:
    """AdaBK loads statistics of K-FAC, whose roots differ in the exponent; Shampoo refuses them."""
    model = nn.Sequential(nn.Linear(70, 66, bias=False))
    every = {"update_every": 1, "refresh_every": 1}
    kfac = KFAC(sgd(model), model=model, **every)
    step(model, kfac, lambda out: out.square().mean(), torch.randn(80, 70))
    adabk = AdaBK(sgd(model), model=model, **every)
    adabk.load_state_dict(kfac.state_dict())
    loaded, saved = (optimizer.state[model[0].weight]["block_0"] for optimizer in (adabk, kfac))
    for side in ("left", "right"):
        assert torch.equal(loaded[side]["codes"], saved[side]["codes"])
    shampoo = kronbit.Shampoo(sgd(model), **every)
    with pytest.raises(ValueError, match=r"param_groups\[0\] has statistics of activations"):
        shampoo.load_state_dict(kfac.state_dict())
    assert not shampoo.state
    shampoo.load_state_dict(kfac.base.state_dict())
    assert shampoo.param_groups[0]["kronbit_statistics"] == "gradients"


@pytest.mark.parametrize("shape", [(6,), (8, 6), (2, 4, 6), (2, 2, 2, 6)])
def test_inputs_may_have_any_rank(shape: tuple[int, ...]) -> None:
    model = nn.Linear(6, 5)
    optimizer = KFAC(sgd(model), model=model, **EXACT)
    x = torch.randn(shape)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # statistics stay in float32
        step(model, optimizer, lambda out: out.float().square().mean(), x)
    _, R = statistics(optimizer, model.weight)
    assert relative_error(R, mean_square(with_one(x.reshape(-1, 6)))) < 1e-6


def test_an_optimizer_can_be_copied_with_its_model() -> None:
    model = nn.Linear(6, 5)
    optimizer = KFAC(sgd(model), model=model, **EXACT)
    twin, other = copy.deepcopy((model, optimizer))
    x = torch.randn(9, 6)
    step(twin, other, lambda out: out.pow(2).mean(), x)
    assert model.weight not in optimizer.state
    step(model, optimizer, lambda out: out.pow(2).mean(), x)
    for a, b in zip(
        statistics(optimizer, model.weight), statistics(other, twin.weight), strict=True
    ):
        assert torch.equal(a, b)


def test_the_summary_gives_reasons_for_excluded_parameters() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
            self.head.weight = self.embedding.weight
            self.large = nn.Linear(200, 6)
            self.attention = nn.MultiheadAttention(6, 2)
            self.depthwise = nn.Conv2d(4, 4, 3, groups=4)
            self.norm = nn.LayerNorm(6)

    model = Model()
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    text = KFAC(named, model=model, max_order=150).summary()
    for reason in (
        "shared by embedding, head",
        "a side of 201 is above max_order=150",
        "nn.MultiheadAttention does not call it",
        "not a matrix",
        "no weight of a linear layer or convolution",
        "goes with large.weight",
    ):
        assert reason in text, reason


@pytest.mark.parametrize("options", [{"bits": 32}, {}, {"method": "eigen", "storage": "paper"}])
def test_memory_equals_the_estimate(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Conv2d(8, 70, 3), nn.Flatten(), nn.Linear(70, 65), nn.LayerNorm(65))
    optimizer = KFAC(torch.optim.AdamW(model.parameters()), model=model, **options)
    step(model, optimizer, lambda out: out.square().mean(), torch.randn(4, 8, 3, 3))
    assert kronbit.estimate_memory(model, optimizer=KFAC, **options) == optimizer.memory()
    with pytest.raises(TypeError, match="KFAC needs layers, not shapes: pass a module"):
        kronbit.estimate_memory([(3, 4)], optimizer=KFAC)


def test_4_bits_take_a_seventh_or_a_fourteenth_of_32_bits() -> None:
    """Layers have the widths of Swin-Tiny's stages. The number of layers hardly matters."""
    layers = []
    for width in (96, 192, 384, 768):
        layers += [nn.Linear(width, 3 * width), nn.Linear(width, width)]
        layers += [nn.Linear(width, 4 * width), nn.Linear(4 * width, width)]
    model = nn.Sequential(*layers)
    paper = {"method": "eigen", "storage": "paper"}
    full_bytes, paper_bytes, compact_bytes = (
        kronbit.estimate_memory(model, optimizer=KFAC, base=None, **options)["total"]
        for options in ({"bits": 32}, paper, {})
    )
    assert full_bytes / paper_bytes > 7.0
    assert full_bytes / compact_bytes > 14.0


def train_on_rank(rank: int) -> list[Any]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(70, 66), nn.Tanh(), nn.Linear(66, 65), nn.Linear(65, 3))
    parallel = DistributedDataParallel(model)
    optimizer = KFAC(sgd(model), model=parallel, bits=32, update_every=2, refresh_every=4)
    for _ in range(5):
        x = torch.randn(32, 70)[rank::2]
        step(parallel, optimizer, lambda out: out.square().mean(), x)
    return [p.detach().numpy() for p in model.parameters()]


def test_ranks_average_their_statistics() -> None:
    """Two ranks with half of the batch each match one process with the whole batch."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(70, 66), nn.Tanh(), nn.Linear(66, 65), nn.Linear(65, 3))
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = KFAC(sgd(model), model=model, bits=32, update_every=2, refresh_every=4)
    for _ in range(5):
        step(model, optimizer, lambda out: out.square().mean(), torch.randn(32, 70))
    results = [torch.from_numpy(p) for p in run_on_ranks(2, train_on_rank)[0]]
    # The loss of a rank is a mean over half of the examples, so y is twice as large; x is not.
    for p, q, w in zip(model.parameters(), results, start, strict=True):
        assert relative_error(q - w, p.detach() - w) < 1e-3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": [1]}, TypeError, "model must be an nn.Module; got list"),
        ({"shared": "sum"}, ValueError, "shared must be one of .*; got 'sum'"),
        ({"grad_scaler": 65536.0}, TypeError, "grad_scaler must be a .*GradScaler; got 65536.0"),
        (
            {"batch_dims": 1},
            ValueError,
            "batch_dims=1: matrices of layers are neither cut nor divided among ranks; omit",
        ),
        ({"split": "even"}, ValueError, "split='even': matrices of layers are neither cut"),
        ({"model": nn.Linear(3, 3)}, ValueError, "model has none of the parameters"),
        ({"start": -1.0}, ValueError, "start must be"),
        ({"qr_iterations": 1}, ValueError, "qr_iterations=1 is for method='eigen'"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(error, match=message):
        KFAC(sgd(model), **{"model": model, **arguments})
    group = {"params": list(model.parameters()), "split_sizes": (2, 1)}
    with pytest.raises(
        ValueError, match=r"split_sizes=\(2, 1\): matrices of layers are neither cut"
    ):
        KFAC([group], model=model, lr=0.1)
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="0 does not know its shape yet"):
        KFAC(sgd(lazy), model=lazy)
    with pytest.raises(TypeError, match=r"optimizer must be Shampoo, .* got 'kfac'"):
        kronbit.estimate_memory(model, optimizer="kfac")


def test_defaults_are_those_of_the_paper() -> None:
    model = nn.Linear(3, 3)
    kfac, adabk = KFAC(sgd(model), model=model).config, AdaBK(sgd(model), model=model).config
    assert (kfac.exponent, kfac.damping) == (-1.0, 0.1)
    assert (adabk.exponent, adabk.damping) == (-0.5, 1e-3)
    for config in (kfac, adabk):
        assert (config.beta, config.update_every, config.refresh_every) == (0.9, 200, 2000)
        assert (config.update_rectify, config.refresh_rectify, config.qr_iterations) == (0, 0, 2)
        assert (config.start, config.max_order, config.bits) == (0.0, 16384, 4)
