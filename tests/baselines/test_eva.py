"""EVA matches a dense inverse in float64, and its hooks collect the means of a step."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from support import layers
from support.baselines import eva
from support.layers import hooks, one_pass, output_gradients, sgd, with_one
from support.networks import assert_same_state, tensors, weights
from support.numerics import angle, relative_error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kronbit.baselines import EVA


class Conv1D(nn.Module):
    """A linear layer with a weight of shape (inputs, outputs), as in transformers."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def rows_of(layer: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of inputs and of output gradients, (E, rows, ...), one per position.

    E is the number of groups of a convolution, or 1.
    """
    if isinstance(layer, nn.Conv2d):
        Y = y.flatten(2).unflatten(1, (layer.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
        X = layers.patches(layer, x)
    else:
        X, Y = (rows.double().reshape(1, -1, rows.shape[-1]) for rows in (x, y))
    return (X if layer.bias is None else with_one(X)), Y


def dense_inverse(G: Tensor, a: Tensor, b: Tensor, damping: float) -> Tensor:
    """Return C⁻¹ G with a dense C = (b bᵀ) ⊗ (a aᵀ) + γ I for each matrix of G.

    a and b are the mean inputs and output gradients, and γ is the damping.
    """
    products = []
    for matrix, ai, bi in zip(G, a, b, strict=True):
        C = torch.kron(torch.outer(bi, bi), torch.outer(ai, ai))
        C += damping * torch.eye(len(C), dtype=C.dtype)
        products.append(torch.linalg.solve(C, matrix.flatten()).view_as(matrix))
    return torch.stack(products)


def gradient_of(layer: nn.Module, outputs: int) -> Tensor:
    """Return the gradient of [W | b], (E, outputs, inputs)."""
    E = getattr(layer, "groups", 1)
    W = layer.weight.grad.double().cpu()
    W = W.T if isinstance(layer, Conv1D) else W
    W = W.reshape(E, outputs, -1)
    if layer.bias is None:
        return W
    return torch.cat([W, layer.bias.grad.double().cpu().view(E, outputs, 1)], -1)


@pytest.fixture
def _exact_convolutions() -> Iterator[None]:
    """Disable TF32 in convolutions on a GPU."""
    convolutions = torch.backends.cudnn.conv
    before, convolutions.fp32_precision = convolutions.fp32_precision, "ieee"
    yield
    convolutions.fp32_precision = before


@pytest.mark.usefixtures("_exact_convolutions")
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Linear(5, 4), (30, 5)),
        (lambda: nn.Linear(5, 4, bias=False), (30, 5)),
        (lambda: nn.Linear(6, 3), (4, 5, 6)),  # tokens x features
        (lambda: Conv1D(3, 6), (4, 5, 6)),
        (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (3, 4, 5, 6)),
        (lambda: nn.Conv2d(2, 3, (3, 2), stride=2, bias=False), (3, 2, 6, 5)),
        (lambda: nn.Conv2d(4, 4, 3, padding="same", padding_mode="circular"), (2, 4, 5, 5)),
        (lambda: nn.Conv2d(4, 4, 2, groups=4, dilation=2), (2, 4, 5, 5)),
    ],
)
def test_eva_matches_the_dense_inverse_of_explicit_means(
    layer: Callable[[], nn.Module],
    shape: tuple[int, ...],
    grafting: Callable[[Tensor, Tensor], Tensor],
    device: torch.device,
) -> None:
    """The means are running averages over three steps, with bias correction."""
    beta, damping = 0.8, 0.05
    model = nn.Sequential(layer(), nn.Softplus()).to(device)
    optimizer = eva(model, sgd(model, lr=1e-3), beta=beta, damping=damping)
    a = b = torch.zeros((), dtype=torch.float64)

    def loss(out: Tensor) -> Tensor:
        return out.square().sum()

    for t in range(1, 4):
        x = torch.randn(shape) + 1
        cpu = copy.deepcopy(model).cpu()
        X, Y = rows_of(cpu[0], x, output_gradients(cpu, "0", loss, x))
        optimizer.zero_grad()
        loss(model(x.to(device))).backward()
        optimizer.step()
        a, b = beta * a + (1 - beta) * X.mean(1), beta * b + (1 - beta) * Y.mean(1)
        state = optimizer.state[model[0].weight]
        assert int(state["step"]) == t
        assert relative_error(state["input_mean"], a) < 1e-5
        assert relative_error(state["output_mean"], b) < 1e-5
        G = Y.mT @ X
        unbiased = 1 - beta**t
        expected = grafting(G, dense_inverse(G, a / unbiased, b / unbiased, damping))
        assert relative_error(gradient_of(model[0], Y.shape[-1]), expected) < 1e-4
        assert angle(expected, G) > 5  # the direction changes


def test_eva_grafts_all_matrices_of_a_layer_together() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(24, 3))
    optimizer = eva(model)
    model(torch.rand(5, 4, 4, 4)).square().sum().backward()
    before = [gradient_of(model[0], 3), gradient_of(model[2], 3)]
    optimizer.step()
    for G, layer in zip(before, (model[0], model[2]), strict=True):
        new = gradient_of(layer, 3)
        assert abs(new.norm() / G.norm() - 1) < 1e-5
        if len(G) > 1:
            # The norms of single matrices change.
            assert abs(new[0].norm() / G[0].norm() - 1) > 1e-3


def test_eva_leaves_other_parameters_to_the_base() -> None:
    model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.LayerNorm(6), nn.Linear(6, 4))
    optimizer = eva(model)
    before = weights(model)
    model(torch.randint(0, 9, (5, 3))).square().sum().backward()
    norm = model[1].weight.grad.clone()
    optimizer.step()
    assert torch.equal(model[1].weight.grad, norm)
    assert list(optimizer.state) == [model[2].weight]
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def means(
    passes: Callable[[nn.Module, EVA, Tensor], None], model: nn.Module | None = None
) -> tuple[Tensor, Tensor]:
    """Return the means of the first linear layer after one step."""
    torch.manual_seed(2)
    model = model or nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = eva(model, beta=0.0)
    x = torch.randn(8, 6)
    optimizer.zero_grad()
    passes(model, optimizer, x)
    optimizer.step()
    first = next(module for module in model.modules() if isinstance(module, nn.Linear))
    state = optimizer.state[first.weight]
    return state["input_mean"], state["output_mean"]


def after_gradients_were_zeroed(model: nn.Module, optimizer: EVA, x: Tensor) -> None:
    model(x * 3).square().mean().backward()
    optimizer.zero_grad(set_to_none=False)
    one_pass(model, optimizer, x)


def before_a_copy(model: nn.Module, optimizer: EVA, x: Tensor) -> None:
    one_pass(model, optimizer, x)
    twin = copy.deepcopy(model)
    for other in (twin, pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(twin))):
        other(x * 3).square().mean().backward()


def with_a_keyword(model: nn.Module, optimizer: EVA, x: Tensor) -> None:
    model[2](model[1](model[0](input=x))).square().mean().backward()


def checkpointed(model: nn.Module, optimizer: EVA, x: Tensor) -> None:
    checkpoint(model, x, use_reentrant=False).square().mean().backward()


def checkpointed_reentrantly(model: nn.Module, optimizer: EVA, x: Tensor) -> None:
    checkpoint(model, x.requires_grad_(), use_reentrant=True).square().mean().backward()


@pytest.mark.parametrize(
    "passes",
    [
        layers.after_a_failure,
        layers.after_gradients_were_dropped,
        layers.beside_evaluation,
        layers.through_a_copy,
        after_gradients_were_zeroed,
        before_a_copy,
        with_a_keyword,
        checkpointed,
        checkpointed_reentrantly,
    ],
)
def test_passes_that_do_not_contribute_to_the_gradient_are_ignored(
    passes: Callable[..., None],
) -> None:
    for actual, expected in zip(means(passes), means(one_pass), strict=True):
        assert torch.equal(actual, expected)


def test_several_backward_passes_are_one_batch() -> None:
    """Means are weighted by the number of rows, so an empty batch has no weight."""

    def at_once(model: nn.Module, optimizer: EVA, x: Tensor) -> None:
        model(x).square().sum().backward()

    def in_three(model: nn.Module, optimizer: EVA, x: Tensor) -> None:
        for part in (x[:2], x[:0], x[2:]):
            model(part).square().sum().backward()

    for actual, expected in zip(means(in_three), means(at_once), strict=True):
        assert relative_error(actual, expected) < 1e-6


class Twice(nn.Module):
    """A layer that is called twice, with or without activation checkpointing."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.layer, self.recompute = nn.Linear(6, 6), recompute

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.once, x, use_reentrant=False) if self.recompute else self.once(x)
        return x

    def once(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


def test_a_layer_that_is_called_twice_averages_rows_of_both_calls() -> None:
    model = Twice(recompute=False)
    seen: list[Tensor] = []

    def passes(model: nn.Module, optimizer: EVA, x: Tensor) -> None:
        seen.extend([x, model.layer(x).tanh().detach()])
        one_pass(model, optimizer, x)

    a, _ = means(passes, model)
    assert relative_error(a[0], with_one(torch.cat(seen)).mean(0)) < 1e-5
    # The second call's gradient arrives before the first call is recomputed.
    again = Twice(recompute=True)
    twin = copy.deepcopy(again)
    twin.recompute = False
    for actual, expected in zip(means(one_pass, again), means(one_pass, twin), strict=True):
        assert torch.equal(actual, expected)


def test_hooks_stay_until_the_optimizer_is_closed() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), nn.Linear(3, 2))
    optimizer = EVA([*model[0].parameters()], base="sgd", lr=0.1, model=model)
    assert hooks(model) == 1
    optimizer.add_param_group({"params": model[2].parameters()})
    assert hooks(model) == 2
    x = torch.randn(8, 6)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        assert hooks(model) == 2
    optimizer.close()
    assert hooks(model) == 0
    before = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.zero_grad()
    model(x).square().sum().backward()
    grad = model[0].weight.grad.clone()
    optimizer.step()
    assert_same_state(optimizer.state_dict()["state"], before)
    assert not torch.equal(model[0].weight.grad, grad)  # it is still preconditioned


def test_layers_without_rows_keep_their_means_and_are_named() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = eva(model)
    model[0].eval()
    model(torch.randn(8, 6)).square().sum().backward()
    grad = model[0].weight.grad.clone()
    with pytest.warns(
        RuntimeWarning, match=r"1 layer.s., such as '0', have a gradient, but"
    ) as seen:
        optimizer.step()
    assert seen[0].filename == __file__
    assert torch.equal(model[0].weight.grad, grad)
    assert model[0].weight not in optimizer.state
    assert optimizer.diagnostics() == {"skipped_steps": 0, "missed_statistics": 1}
    optimizer.zero_grad()
    model(torch.randn(0, 6)).square().sum().backward()
    optimizer.step()
    assert int(optimizer.state[model[2].weight]["step"]) == 1
    assert optimizer.diagnostics() == {"skipped_steps": 0, "missed_statistics": 3}


def test_gradients_are_unchanged_before_the_first_mean() -> None:
    model = nn.Linear(6, 5)
    optimizer = eva(model, sgd(model, lr=0.0))
    model(torch.randn(8, 6)).square().sum().backward()
    model.bias.grad[0] = torch.nan
    optimizer.step()
    nn.init.zeros_(model.bias)
    optimizer.zero_grad()
    model.eval()(torch.randn(8, 6)).square().sum().backward()
    grad = model.weight.grad.clone()
    with pytest.warns(RuntimeWarning, match="1 layer"):
        optimizer.step()
    assert torch.equal(model.weight.grad, grad)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(6, 5)
    optimizer = eva(model)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match=r"over processes, and there are 2: .*kronbit.KFAC"):
        optimizer.step()


def test_nonfinite_means_are_discarded() -> None:
    """The mean input overflows while the gradient is zero."""
    model = nn.Linear(6, 5)
    optimizer = eva(model)
    (model(torch.full((4, 6), 3e38)) * 0).sum().backward()
    assert not model.weight.grad.any()
    optimizer.step()
    assert optimizer.diagnostics()["skipped_steps"] == 1
    assert not any(tensor.any() for tensor in tensors(optimizer.state_dict()["state"]).values())
