"""EVA and M-FAC match dense inverses in float64, and work as optimizers with hooks."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import layers
from support.layers import hooks, one_pass, output_gradients, sgd, with_one
from support.networks import assert_same_state, network, run, same, tensors, weights
from support.numerics import angle, no_host_sync, relative_error
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from kronbit import Shampoo
from kronbit.baselines import EVA, MFAC
from kronbit.baselines.rewriter import Rewriter, graft

Build = Callable[..., Rewriter]


def eva(model: nn.Module, base: Optimizer | None = None, **options: Any) -> EVA:
    return EVA(base or sgd(model), model=model, **options)


def mfac(model: nn.Module, base: Optimizer | None = None, **options: Any) -> MFAC:
    return MFAC(base or sgd(model), **{"gradients": 3, **options})


both = pytest.mark.parametrize("build", [eva, mfac])


def grafted(G: Tensor, Ghat: Tensor) -> Tensor:
    return Ghat * G.norm() / Ghat.norm()


@pytest.fixture(params=["grafted", "plain"])
def grafting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the grafting function, or one that returns Ĝ: grafting would hide a wrong scale."""
    if request.param == "grafted":
        return grafted
    for module in ("eva", "mfac"):
        monkeypatch.setattr(f"kronbit.baselines.{module}.graft", lambda G, Ghat, dtype: Ghat)
    return lambda G, Ghat: Ghat


# ----------------------------------------------------------------------------------------- EVA


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
    """Return the rows of inputs and of output gradients, (E, rows, ...), one per position."""
    if isinstance(layer, nn.Conv2d):
        Y = y.flatten(2).unflatten(1, (layer.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
        X = layers.patches(layer, x)
    else:
        X, Y = (rows.double().reshape(1, -1, rows.shape[-1]) for rows in (x, y))
    return (X if layer.bias is None else with_one(X)), Y


def dense_inverse(G: Tensor, a: Tensor, b: Tensor, damping: float) -> Tensor:
    """Return C⁻¹ G with a dense C = (b bᵀ) ⊗ (a aᵀ) + γ I for each matrix of G."""
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
    twins = copy.deepcopy(again)
    twins.recompute = False
    for actual, expected in zip(means(one_pass, again), means(one_pass, twins), strict=True):
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


# --------------------------------------------------------------------------------------- M-FAC


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
def test_mfac_matches_the_dense_inverse(
    dtype: torch.dtype,
    tolerance: float,
    grafting: Callable[[Tensor, Tensor], Tensor],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ring buffer of gradients wraps around, and a bias has no gradient at some steps."""
    monkeypatch.setattr("kronbit.baselines.mfac._PIECE", 64)
    m, damping = 4, 0.05
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(device, dtype)
    optimizer = mfac(model, sgd(model, lr=1e-2), gradients=m, damping=damping)
    rows: list[Tensor] = []
    for t in range(11):
        optimizer.zero_grad()
        model(torch.randn(20, 6).to(device, dtype)).float().square().sum(1).mean().backward()
        if t in (3, 6):
            model[0].bias.grad = None
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        g = torch.cat([grad.double().cpu().flatten() for grad in grads])
        rows.append(g)
        optimizer.step()
        G = torch.stack(rows[-m:])
        fisher = damping * torch.eye(len(g), dtype=torch.float64) + G.T @ G / m
        Ghat = torch.linalg.solve(fisher, g)
        sizes = [p.numel() for p in model.parameters()]
        for p, part, hat in zip(model.parameters(), g.split(sizes), Ghat.split(sizes), strict=True):
            if p.grad is not None:
                actual = p.grad.cpu().double().flatten()
                assert relative_error(actual, grafting(part, hat)) < tolerance
                assert p.grad.dtype == optimizer.state[p]["gradients"].dtype == dtype
        assert (model[0].bias.grad is None) == (t in (3, 6))
        if t >= m:
            assert angle(Ghat, g) > 5  # the direction changes
            K = optimizer.common["gram"].cpu()
            order = [(t - m + 1 + i) % m for i in range(m)]
            assert relative_error(K[order][:, order], G @ G.T) < 1e-5
    assert int(optimizer.common["stored"]) == 11


def test_mfac_takes_parameters_of_any_shape_and_added_later(device: torch.device) -> None:
    model = network(device)
    first, *rest = [p for p in model.parameters() if p.requires_grad]
    optimizer = MFAC([first], base="sgd", lr=1e-3, gradients=2)
    run(model, optimizer, 2)
    optimizer.add_param_group({"params": rest})
    before = weights(model)
    run(model, optimizer, 3, first=2)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    moved = {
        name
        for (name, p), old in zip(model.named_parameters(), before, strict=True)
        if not torch.equal(p, old)
    }
    assert {"conv.weight", "experts", "scale", "linear.bias"} <= moved
    assert model.dead.weight not in optimizer.state
    stored = optimizer.state[model.experts]["gradients"]
    assert stored.shape == (2, *model.experts.shape)


def test_mfac_refuses_several_devices_and_sparse_gradients() -> None:
    on_cpu, on_meta = nn.Linear(3, 3), nn.Linear(3, 3, device="meta")
    base = torch.optim.SGD([*on_cpu.parameters(), *on_meta.parameters()], lr=0.1)
    with pytest.raises(ValueError, match="MFAC needs all parameters on one device; got cpu, meta"):
        MFAC(base)
    assert len(base.param_groups[0]["params"]) == 4
    model = nn.Sequential(nn.Linear(6, 6), nn.Embedding(9, 6, sparse=True))
    optimizer = mfac(model)
    model[0](model[1](torch.tensor([1, 2]))).sum().backward()
    with pytest.raises(RuntimeError, match=r"shape \(9, 6\) is sparse .*sparse=False"):
        optimizer.step()
    assert not optimizer.state


# ---------------------------------------------------------------------------------------- both


@both
@pytest.mark.parametrize("base", ["sgd", "adamw"])
def test_bases_by_name_match_constructed_ones(build: Build, base: str) -> None:
    make = {
        "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
        "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    }[base]
    results = []
    for named in (True, False):
        model = network()
        params = model.parameters()
        options: dict[str, Any] = {"model": model} if build is eva else {"gradients": 3}
        kind = EVA if build is eva else MFAC
        optimizer = (
            kind(params, base=base, lr=1e-2, **options) if named else kind(make(params), **options)
        )
        run(model, optimizer, 4)
        results.append(weights(model))
    assert same(*results)
    plain = network()
    run(plain, make(plain.parameters()), 4)
    assert not same(results[0], weights(plain))


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_runs_resume_bit_for_bit(
    build: Build, kind: type[Optimizer], dtype: torch.dtype, device: torch.device
) -> None:
    def start() -> tuple[nn.Module, Rewriter]:
        model = network(device, dtype)
        return model, build(model, kind(model.parameters(), lr=1e-3))

    model, optimizer = start()
    run(model, optimizer, 5)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    run(model, optimizer, 4, first=5)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, resumed = start()
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for (path, leaf), loaded in zip(
        tensors(saved[1]).items(), tensors(resumed.state_dict()).values(), strict=True
    ):
        assert leaf.dtype == loaded.dtype, path
        assert torch.equal(leaf, loaded), path
        assert leaf.data_ptr() != loaded.data_ptr() or not leaf.numel() or path.startswith("/base")
    run(again, resumed, 4, first=5)
    assert same(weights(model), weights(again))
    assert_same_state(optimizer.state_dict()["state"], resumed.state_dict()["state"])
    assert_same_state(optimizer.state_dict()["common"], resumed.state_dict()["common"])
    assert_same_state(optimizer.base.state_dict()["state"], resumed.base.state_dict()["state"])


def without(*path: Any) -> Callable[[dict[str, Any]], None]:
    def remove(saved: Any) -> None:
        for key in path[:-1]:
            saved = saved[key]
        del saved[path[-1]]

    return remove


def shortened(*path: Any) -> Callable[[dict[str, Any]], None]:
    def shorten(saved: Any) -> None:
        for key in path[:-1]:
            saved = saved[key]
        saved[path[-1]] = saved[path[-1]][:-1]

    return shorten


REFUSED = [
    (eva, without("state"), "'state' is missing: this is not a state dict of EVA"),
    (mfac, without("common"), "'common' is missing: this is not a state dict of MFAC"),
    (mfac, without("base"), "'base' is missing"),
    (mfac, without("base", "state"), r"base\.state is missing"),
    (eva, shortened("param_groups"), "checkpoint has 0 param groups, the optimizer has 1"),
    (eva, shortened("param_groups", 0, "params"), r"groups\[0\] has 3 parameters in the checkp"),
    (mfac, shortened("base", "param_groups", 0, "params"), r"base.param_groups\[0\] has 3 para"),
    (eva, without("state", 0, "output_mean"), r"state\[0\]\['output_mean'\] is missing"),
    (eva, shortened("state", 0, "input_mean"), r"input_mean'\] has shape \(0, 7\); expected"),
    (mfac, shortened("state", 2, "gradients"), r"state\[2\]\['gradients'\] has shape \(2, 3, 5\)"),
    (mfac, shortened("common", "gram"), r"gram'\] has shape \(2, 3\); .*options that the checkp"),
    (mfac, lambda saved: saved["common"].clear(), r"common\['stored'\] is missing"),
    (eva, lambda saved: saved["state"][0].update(step=3), "is int; expected a tensor of torch.int"),
    (
        eva,
        lambda saved: saved["state"].update({1: saved["state"][0]}),
        r"state\[1\] belongs to a param",
    ),
    (mfac, lambda saved: saved["state"].update({9: {"a": 1}}), r"state\[9\] belongs to no param"),
    (eva, without("base", "state", 0, "exp_avg"), r"base\['state'\]\[0\]\['exp_avg'\] is missing"),
    (eva, shortened("base", "state", 0, "exp_avg"), r"\['exp_avg'\] has shape \(4, 6\); expected"),
]


@pytest.mark.parametrize(("build", "damage", "message"), REFUSED)
def test_incompatible_checkpoints_change_nothing(
    build: Build, damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    def start() -> tuple[nn.Module, Rewriter]:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        optimizer = build(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        return model, optimizer

    saved = copy.deepcopy(start()[1].state_dict())
    _, optimizer = start()
    before = copy.deepcopy(optimizer.state_dict())
    damage(saved)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    now = optimizer.state_dict()
    assert before["param_groups"] == now["param_groups"]
    for key in ("state", "common", "base"):
        assert_same_state(now[key], before[key])


@both
def test_schedulers_and_closures_work_as_in_torch(build: Build) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = build(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    x, calls = torch.randn(8, 6), []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return float(loss.detach())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = []
        for _ in range(3):
            losses.append(optimizer.step(closure))
            scheduler.step()
    assert calls == [True] * 3
    assert losses[0] > losses[1] > losses[2]
    assert optimizer.base.param_groups[0]["lr"] == 0.1 / 8
    assert optimizer.param_groups is optimizer.base.param_groups
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.param_groups is optimizer.base.param_groups
    optimizer.zero_grad()
    assert optimizer.step() is None


@both
@pytest.mark.parametrize("bad", [0, 2, 5])
@pytest.mark.parametrize("factor", [torch.inf, torch.nan])
def test_steps_with_nonfinite_gradients_leave_no_trace(
    build: Build, bad: int, factor: float, device: torch.device
) -> None:
    """Either the first step or a later one has a non-finite gradient."""

    def states(skip: bool) -> dict[str, Any]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(device)
        optimizer = build(model, sgd(model, lr=0.0))
        start = copy.deepcopy(model.state_dict())
        for t in range(8):
            x = torch.randn(8, 6).to(device)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            if t == bad:
                if skip:
                    continue
                model[2].bias.grad[1] *= factor
                before = [p.grad.clone() for p in model.parameters()]
                stored = tensors(copy.deepcopy(optimizer.state_dict()))
                optimizer.step()
                for p, grad in zip(model.parameters(), before, strict=True):
                    assert torch.equal(p.grad.nan_to_num(7), grad.nan_to_num(7))
                for path, tensor in tensors(optimizer.state_dict()).items():
                    assert torch.equal(tensor, stored.get(path, torch.zeros_like(tensor))), path
                model.load_state_dict(start)  # undo F's step
            else:
                optimizer.step()
        assert optimizer.diagnostics()["skipped_steps"] == (not skip)
        return {**optimizer.state_dict(), "base": {}}

    actual, expected = states(skip=False), states(skip=True)
    assert tensors(actual)
    assert_same_state(actual, expected)


def test_nonfinite_means_are_discarded() -> None:
    """The mean input overflows while the gradient is zero."""
    model = nn.Linear(6, 5)
    optimizer = eva(model)
    (model(torch.full((4, 6), 3e38)) * 0).sum().backward()
    assert not model.weight.grad.any()
    optimizer.step()
    assert optimizer.diagnostics()["skipped_steps"] == 1
    assert not any(tensor.any() for tensor in tensors(optimizer.state_dict()["state"]).values())


@both
def test_optimizers_can_be_copied_and_pickled_with_their_model(build: Build) -> None:
    model = network()
    optimizer = build(model, sgd(model, lr=1e-3))
    run(model, optimizer, 3)
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    expected = copy.deepcopy(optimizer.state_dict()["state"])
    for twin, other in copies:
        run(twin, other, 4, first=3)
    assert_same_state(optimizer.state_dict()["state"], expected)  # the copies have separate state
    run(model, optimizer, 4, first=3)
    for twin, other in copies:
        assert same(weights(twin), weights(model))
        assert_same_state(other.state_dict()["state"], optimizer.state_dict()["state"])


@both
def test_both_solve_a_regression(build: Build, device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)).to(device)
    x = torch.randn(64, 8, device=device) * torch.logspace(0, -1, 8, device=device)
    target = torch.stack([x[:, 0].sin(), x.square().sum(1)], 1)
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = build(model, base)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


@both
def test_schedule_free_bases_switch_modes(build: Build) -> None:
    pytest.importorskip("schedulefree")
    model = network()
    kind, options = (EVA, {"model": model}) if build is eva else (MFAC, {})
    optimizer = kind(model.parameters(), base="schedulefree-sgd", lr=0.1, **options)
    optimizer.train()
    run(model, optimizer, 3)
    training = weights(model)
    optimizer.eval()
    assert not same(weights(model), training)
    plain = build(network())
    plain.train()
    plain.eval()


@both
def test_gradients_that_share_memory_are_copied(build: Build) -> None:
    model = nn.Linear(6, 5)
    optimizer = build(model)
    model(torch.randn(8, 6)).sum().backward()
    model.bias.grad = torch.ones(1).expand(5)
    optimizer.step()
    assert model.bias.grad.is_contiguous()


def test_a_gradient_in_half_precision_saturates() -> None:
    G, Ghat = torch.full((4,), 6e4), torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert graft(G, Ghat, torch.float16).tolist() == [65504.0, 0.0, 0.0, 0.0]
    assert graft(G, Ghat, torch.float32)[0] == G.norm()
    assert not graft(G * 0, Ghat, torch.float32).any()


@both
def test_wrapping_an_optimizer_twice_is_refused(build: Build) -> None:
    model = nn.Linear(6, 5)
    optimizer = build(model)
    with pytest.raises(TypeError, match=f"{type(optimizer).__name__} rewrites gradients already"):
        build(model, optimizer)
    with pytest.raises(TypeError, match="already wrapped in a kronbit optimizer"):
        build(model, Shampoo(sgd(model)))


@pytest.mark.parametrize(
    ("build", "options", "error", "message"),
    [
        (eva, {"model": [1]}, TypeError, "model must be an nn.Module; got list"),
        (eva, {"model": nn.Linear(3, 3)}, ValueError, "none of the parameters is the weight of"),
        (eva, {"beta": 1.0}, ValueError, r"beta must be a number in \[0, 1\); got 1.0"),
        (eva, {"beta": -0.1}, ValueError, "beta must be .* got -0.1"),
        (eva, {"beta": "0.9"}, ValueError, "beta must be .* got '0.9'"),
        (eva, {"damping": 0.0}, ValueError, "damping must be a finite number above 0; got 0.0"),
        (mfac, {"damping": -1}, ValueError, "damping must be a finite number above 0; got -1"),
        (mfac, {"damping": torch.inf}, ValueError, "damping must be .* got inf"),
        (mfac, {"gradients": 0}, ValueError, "gradients must be an integer >= 1; got 0"),
        (mfac, {"gradients": 2.0}, ValueError, "gradients must be an integer >= 1; got 2.0"),
        (mfac, {"lr": 0.1}, TypeError, "no option 'lr'.*constructor of SGD"),
    ],
)
def test_bad_arguments_change_nothing(
    build: Build, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = nn.Linear(6, 5)
    base = sgd(model)
    with pytest.raises(error, match=message):
        EVA(base, **{"model": model, **options}) if build is eva else MFAC(base, **options)
    assert hooks(model) == 0
    assert len(base.param_groups[0]["params"]) == 2
    with pytest.raises(TypeError, match="model"):
        EVA(base)  # type: ignore[call-arg]


@pytest.mark.gpu
@both
def test_a_step_does_not_wait_for_the_gpu(build: Build) -> None:
    model = nn.Sequential(nn.Linear(70, 66), nn.Tanh(), nn.Linear(66, 3)).cuda()
    optimizer = build(model)
    for t in range(4):
        model(torch.randn(8, 70, device="cuda")).square().sum().backward()
        if t:
            with no_host_sync():
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
