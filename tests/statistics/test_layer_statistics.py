"""Statistics of layers match explicit computations, for any shape of inputs and several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.layers import (
    EXACT,
    mean_square,
    output_gradients,
    patches,
    sgd,
    statistics,
    step,
    with_one,
)
from support.numerics import relative_error
from support.ranks import run_on_ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from kronbit import KFAC, AdaBK


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


@pytest.mark.parametrize("shape", [(0, 6), (0, 3, 6)])
def test_empty_batches_add_no_rows(shape: tuple[int, ...]) -> None:
    model = nn.Linear(6, 5)
    optimizer = KFAC(sgd(model), model=model, **EXACT)
    optimizer.zero_grad()
    x = torch.randn(8, 6)
    (model(torch.randn(shape)).sum() + model(x).square().mean()).backward()
    optimizer.step()
    assert relative_error(statistics(optimizer, model.weight)[1], mean_square(with_one(x))) < 1e-6


@pytest.mark.parametrize("shape", [(6,), (8, 6), (2, 4, 6), (2, 2, 2, 6)])
def test_inputs_may_have_any_number_of_axes(shape: tuple[int, ...]) -> None:
    model = nn.Linear(6, 5)
    optimizer = KFAC(sgd(model), model=model, **EXACT)
    x = torch.randn(shape)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # statistics stay in float32
        step(model, optimizer, lambda out: out.float().square().mean(), x)
    _, R = statistics(optimizer, model.weight)
    assert relative_error(R, mean_square(with_one(x.reshape(-1, 6)))) < 1e-6


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
    # The loss of a rank is a mean over half of the examples. This doubles the output gradients and
    # multiplies L by 4, which grafting undoes.
    for p, q, w in zip(model.parameters(), results, start, strict=True):
        assert relative_error(q - w, p.detach() - w) < 1e-3
