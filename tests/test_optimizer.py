"""What the optimizer does around the algorithm: groups, gradients, shapes, devices, closures."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import oracle
import pytest
import torch
from conftest import no_host_sync, relative_error
from torch import Tensor, nn

from kronbit import CASPR, Shampoo

FAST: dict[str, Any] = {"update_every": 2, "refresh_every": 4}


def network(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Linear, convolution, norm, a scalar, experts, and layers that never get a gradient."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 70, 3)
            self.norm = nn.BatchNorm2d(70)
            self.linear = nn.Linear(70, 65)
            self.experts = nn.Parameter(torch.randn(3, 65, 9) / 8)
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.empty = nn.Parameter(torch.empty(0, 4))
            self.dead = nn.Linear(5, 66)
            self.frozen = nn.Linear(65, 67).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.conv(x)).relu().mean((2, 3))
            h = self.linear(h).tanh() * self.scale
            return torch.einsum("bi,eij->bej", h, self.experts).sum((1, 2)) + self.empty.sum()

    torch.manual_seed(0)
    return Network().to(device=device, dtype=dtype)


def backward(model: nn.Module, seed: int) -> Tensor:
    p = next(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 6, 6, generator=generator).to(device=p.device, dtype=p.dtype)
    loss = model(x).float().square().mean()
    loss.backward()
    return loss


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for t in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, t)
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("options", [{"bits": 32}, {"bits": 4}, {"bits": 4, "method": "naive"}])
def test_before_the_first_refresh_a_run_is_the_bases_to_the_bit(
    dtype: torch.dtype, make: Any, options: dict[str, Any], device: torch.device
) -> None:
    plain, wrapped = network(device, dtype), network(device, dtype)
    plain_optimizer = make(plain.parameters(), lr=1e-4)
    run(plain, plain_optimizer, 7)
    optimizer = Shampoo(
        make(wrapped.parameters(), lr=1e-4), update_every=2, refresh_every=8, **options
    )
    run(wrapped, optimizer, 7)
    assert same(weights(plain), weights(wrapped))
    run(plain, plain_optimizer, 1, first=7)
    run(wrapped, optimizer, 1, first=7)
    assert not same(weights(plain), weights(wrapped))


def test_32_bit_eigen_with_many_qr_iterations_converges_to_dense() -> None:
    """And `dense` needs more than the paper's ten Newton steps for that."""
    preconditioned = {}
    for name, options in {
        "eigen": {"method": "eigen", "qr_iterations": 300},
        "dense": {"newton_steps": 30},
        "dense 10": {},
    }.items():
        p = nn.Parameter(torch.zeros(40, 40))
        optimizer = Shampoo(
            torch.optim.SGD([p], lr=1.0),
            bits=32,
            update_every=1,
            refresh_every=4,
            damping=1e-5,
            **options,
        )
        generator = torch.Generator().manual_seed(0)
        left, right = (
            torch.linalg.qr(torch.randn(40, 40, generator=generator))[0] for _ in range(2)
        )
        spectrum = torch.logspace(0, -2, 40)  # so L and R have condition 1e4
        for _ in range(4):
            noise = 0.1 * torch.randn(40, 40, generator=generator)
            p.grad = (left * spectrum) @ (torch.eye(40) + noise) @ (spectrum[:, None] * right.T)
            optimizer.step()
        preconditioned[name] = p.grad
    assert relative_error(preconditioned["eigen"], preconditioned["dense"]) < 1e-3
    assert relative_error(preconditioned["dense 10"], preconditioned["dense"]) > 0.02


def test_gradients_become_preconditioned_in_place_or_stay(device: torch.device) -> None:
    for keep in (False, True):
        model = network(device)
        base = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = Shampoo(base, keep_gradients=keep, **FAST)
        run(model, optimizer, 4)
        optimizer.zero_grad()
        backward(model, 4)
        held = {p: p.grad for p in model.parameters()}
        before = {p: g.clone() for p, g in held.items() if g is not None}
        optimizer.step()
        for p, grad in before.items():
            assert p.grad is held[p]
            assert torch.equal(p.grad, grad) == (keep or p.dim() < 2 or p.numel() == 0)
            if p.numel():
                assert p.grad.norm().item() == pytest.approx(grad.norm().item(), rel=1e-5)


def test_keeping_gradients_changes_nothing_else() -> None:
    final = []
    for keep in (False, True):
        model = network()
        run(model, Shampoo(model.parameters(), lr=1e-2, keep_gradients=keep, **FAST), 6)
        final.append(weights(model))
    assert same(*final)


def test_kept_gradients_come_back_when_the_base_fails() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise MemoryError

    p = nn.Parameter(torch.zeros(4, 4))
    optimizer = Shampoo(Failing([p], lr=1.0), keep_gradients=True, update_every=1, refresh_every=1)
    p.grad = grad = torch.randn(4, 4)
    before = grad.clone()
    with pytest.raises(MemoryError):
        optimizer.step()
    assert p.grad is grad
    assert torch.equal(grad, before)


@pytest.mark.parametrize("workspace_mb", [256, 1, 0.05, 0])
def test_the_workspace_bounds_memory_not_results(workspace_mb: float) -> None:
    """Chunks may end anywhere, and a parameter may be larger than the workspace."""
    shapes = [(64, 64), (200, 150), (5, 70, 66), (64, 64), (130, 64)]
    final = []
    for size in (256, workspace_mb):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        groups = [{"params": params[:2] + params[3:]}, {"params": params[2:3], "batch_dims": 1}]
        optimizer = Shampoo(
            groups,
            base="sgd",
            lr=0.1,
            max_order=64,
            workspace_mb=size,
            update_every=1,
            refresh_every=2,
            damping=0.1,
        )
        for _ in range(4):
            for p in params:
                p.grad = torch.randn(p.shape) * 0.1
            optimizer.step()
        final.append([p.detach() for p in params])
    assert max(relative_error(a, b) for a, b in zip(*final, strict=True)) < 1e-5


def test_same_shape_blocks_are_one_tensor() -> None:
    params = [nn.Parameter(torch.randn(128, 64)) for _ in range(3)]
    params.append(nn.Parameter(torch.randn(64, 64)))
    optimizer = Shampoo(params, lr=0.1, max_order=64)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    codes = [
        block["left"]["codes"]
        for p in params
        for key, block in optimizer.state[p].items()
        if key.startswith("block")
    ]
    assert len(codes) == 7
    assert len({leaf.untyped_storage().data_ptr() for leaf in codes}) == 1


def test_state_keys_are_the_documented_ones() -> None:
    expected = {
        ("eigen", 4): [
            "eigenvalues",
            "codes",
            "scales",
            "root_diagonal",
            "root_codes",
            "root_scales",
        ],
        ("naive", 4): ["diagonal", "codes", "scales", "root_diagonal", "root_codes", "root_scales"],
        ("dense", 32): ["matrix", "root"],
        ("eigen", 32): ["eigenvalues", "eigenvectors", "root"],
    }
    for (method, bits), names in expected.items():
        p = nn.Parameter(torch.randn(64, 130))
        optimizer = Shampoo([p], lr=0.1, method=method, bits=bits, max_order=70)
        p.grad = torch.randn_like(p)
        optimizer.step()
        assert list(optimizer.state[p]) == ["step", "base", "block_0", "block_1"]
        assert list(optimizer.state[p]["base"]) == ["step", "exp_avg", "exp_avg_sq"]
        for side in ("left", "right"):
            assert list(optimizer.state[p]["block_0"][side]) == names


def test_grafting_is_per_parameter_over_all_blocks() -> None:
    """Blocks of very different size: per-block grafting would keep their ratio."""
    p = nn.Parameter(torch.zeros(20, 40))
    optimizer = Shampoo(
        torch.optim.SGD([p], lr=1.0), max_order=20, update_every=1, refresh_every=1, damping=1e-4
    )
    G = torch.randn(20, 40)
    G[:, 20:] *= 100
    p.grad = G.clone()
    optimizer.step()
    assert p.grad.norm().item() == pytest.approx(G.norm().item(), rel=1e-5)
    ratio = float(p.grad[:, 20:].norm() / p.grad[:, :20].norm())
    assert ratio < 20


@pytest.mark.parametrize("make", [Shampoo, CASPR])
def test_zero_gradients_leave_weights_where_they_are(make: Any) -> None:
    p = nn.Parameter(torch.randn(8, 70))
    optimizer = make(torch.optim.SGD([p], lr=1.0), update_every=1, refresh_every=1)
    before = p.detach().clone()
    for _ in range(3):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(p.detach(), before)
    p.grad = torch.randn_like(p)
    optimizer.step()
    assert torch.isfinite(p).all()


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_memory_format_of_convolutions_does_not_matter(memory_format: torch.memory_format) -> None:
    start = torch.randn(66, 70, 3, 3)
    grads = [torch.randn(66, 70, 3, 3) for _ in range(3)]
    results = []
    for layout in (torch.contiguous_format, memory_format):
        p = nn.Parameter(start.clone(memory_format=layout))
        optimizer = Shampoo([p], base="sgd", lr=0.1, max_order=100, update_every=1, refresh_every=2)
        for grad in grads:
            p.grad = grad.clone(memory_format=layout)
            optimizer.step()
            assert p.grad.is_contiguous(memory_format=layout)
        results.append(p.detach())
    assert relative_error(*results) < 1e-6


def test_transposed_and_expanded_gradients_are_read_by_value() -> None:
    start, grad = torch.randn(70, 66), torch.randn(66, 70)
    results = []
    for transpose in (True, False):
        p = nn.Parameter(start.clone())
        optimizer = Shampoo([p], base="sgd", lr=0.1, update_every=1, refresh_every=1)
        p.grad = grad.clone().t() if transpose else grad.t().contiguous()
        optimizer.step()
        results.append(p.detach())
    assert relative_error(*results) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_parameter_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """State is float32 whatever the parameter is; the result is that of float32 gradients."""
    start, grads = torch.randn(70, 66), [torch.randn(70, 66).to(dtype) for _ in range(3)]
    results = []
    for own in (dtype, torch.float32):
        p = nn.Parameter(start.clone().to(device=device, dtype=own))
        base = torch.optim.SGD([p], lr=1e-2)
        optimizer = Shampoo(base, damping=0.1, update_every=1, refresh_every=2)
        for grad in grads:
            p.grad = grad.to(device=device, dtype=own, copy=True)
            optimizer.step()
        results.append(p.grad)
        leaves = optimizer.state[p]["block_0"]["left"]
        assert {leaf.dtype for leaf in leaves.values()} == {torch.float32, torch.uint8}
    rounding = {torch.bfloat16: 4e-3, torch.float16: 5e-4}.get(dtype, 1e-6)
    assert relative_error(*results) < rounding


@pytest.mark.gpu
def test_mixed_devices_in_one_optimizer() -> None:
    start, grads = torch.randn(2, 70, 66), [torch.randn(2, 70, 66) * 0.1 for _ in range(4)]
    results = []
    for devices in (("cpu", "cuda"), ("cpu", "cpu")):
        params = [nn.Parameter(w.to(d)) for w, d in zip(start, devices, strict=True)]
        optimizer = Shampoo(params, base="sgd", lr=0.1, damping=0.1, **FAST)
        for grad in grads:
            for p, g in zip(params, grad, strict=True):
                p.grad = g.to(p.device)
            optimizer.step()
        results.append([p.detach().cpu() for p in params])
        assert {group["device"] for group in optimizer.diagnostics()["groups"]} == {
            str(p.device) for p in params
        }
    assert max(relative_error(a, b) for a, b in zip(*results, strict=True)) < 1e-3


def test_parameters_without_gradient_keep_their_own_time() -> None:
    """A parameter that missed steps is where it would be had it been alone."""
    missing, always = nn.Parameter(torch.ones(70, 66)), nn.Parameter(torch.ones(70, 66))
    alone = nn.Parameter(torch.ones(70, 66))
    together = Shampoo([missing, always], base="sgd", lr=0.1, **FAST)
    single = Shampoo([alone], base="sgd", lr=0.1, **FAST)
    for t in range(10):
        grad = torch.randn(70, 66)
        missing.grad = grad.clone() if t % 2 else None
        always.grad = torch.randn(70, 66)
        together.step()
        if t % 2:
            alone.grad = grad.clone()
            single.step()
    assert together.state[missing]["step"] == 5
    assert together.state[always]["step"] == 10
    assert torch.equal(missing, alone)


def test_groups_added_later_train_like_those_from_the_start() -> None:
    first, late = nn.Parameter(torch.ones(66, 64)), nn.Parameter(torch.ones(66, 64))
    alone = nn.Parameter(torch.ones(66, 64))
    optimizer = Shampoo([first], base="sgd", lr=0.1, **FAST)
    for _ in range(5):
        first.grad = torch.randn(66, 64)
        optimizer.step()
    before = {k: v.clone() for k, v in optimizer.state[first]["block_0"]["left"].items()}
    optimizer.add_param_group({"params": [late], "lr": 0.2, "bits": 8})
    assert optimizer.param_groups[1]["update_every"] == 2
    reference = Shampoo([alone], base="sgd", lr=0.2, bits=8, **FAST)
    for t in range(6):
        first.grad = torch.randn(66, 64)
        late.grad = torch.randn(66, 64)
        alone.grad = late.grad.clone()
        optimizer.step()
        reference.step()
        if t == 0:  # step 6 of `first` updates its statistics; its roots have been carried over
            after = optimizer.state[first]["block_0"]["left"]
            assert torch.equal(after["root_codes"], before["root_codes"])
            assert not torch.equal(after["codes"], before["codes"])
    assert torch.equal(late, alone)


def test_unfreezing_and_freezing() -> None:
    model = nn.Sequential(nn.Linear(64, 66), nn.Linear(66, 64))
    model[0].requires_grad_(False)
    optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
    for t in range(12):
        if t == 4:
            model[0].requires_grad_(True)
        if t == 8:
            model[1].requires_grad_(False)
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    assert optimizer.state[model[0].weight]["step"] == 8
    assert optimizer.state[model[1].weight]["step"] == 8
    assert set(optimizer.state[model[0].weight]) == {"step", "base", "block_0"}


def test_precondition_may_be_switched_on_later_but_not_off() -> None:
    p, q = nn.Parameter(torch.ones(64, 66)), nn.Parameter(torch.ones(64, 66))
    optimizer = Shampoo(torch.optim.SGD([p], lr=0.1), update_every=1, refresh_every=1)
    plain = torch.optim.SGD([q], lr=0.1)
    optimizer.param_groups[0]["precondition"] = False
    for t in range(4):
        p.grad, q.grad = (torch.full((64, 66), float(t)) for _ in range(2))
        optimizer.step()
        plain.step()
    assert torch.equal(p, q)
    optimizer.param_groups[0]["precondition"] = True
    p.grad = torch.randn(64, 66)
    optimizer.step()
    assert "block_0" in optimizer.state[p]
    optimizer.param_groups[0]["precondition"] = False
    with pytest.raises(ValueError, match="precondition was changed from True to False"):
        optimizer.step()


def test_a_reset_state_is_a_fresh_start() -> None:
    """`optimizer.state.clear()` and the like: F's moments and ours are gone, times start at 1."""
    model, twin = network(), network()
    optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
    run(model, optimizer, 5)
    twin.load_state_dict(model.state_dict())
    optimizer.state.clear()
    fresh = Shampoo(twin.parameters(), lr=1e-2, **FAST)
    run(model, optimizer, 5, first=5)
    run(twin, fresh, 5, first=5)
    assert same(weights(model), weights(twin))


def test_options_that_do_not_suit_a_parameter_are_refused_at_once() -> None:
    p = nn.Parameter(torch.ones(64, 66))
    with pytest.raises(ValueError, match=r"split_sizes \(3, 3\) sums up to 6"):
        Shampoo([{"params": [p], "split_sizes": (3, 3)}], lr=0.1)
    optimizer = Shampoo([nn.Parameter(torch.ones(4, 4))], lr=0.1)
    with pytest.raises(ValueError, match=r"split_sizes"):
        optimizer.add_param_group({"params": p, "split_sizes": (3, 3)})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": (q for q in [p])})
    assert optimizer.param_groups[1]["params"] == [p]


def test_group_numbers_are_read_at_every_step() -> None:
    p = nn.Parameter(torch.ones(64, 66))
    optimizer = Shampoo([p], base="sgd", lr=0.1, update_every=100)
    root = optimizer.config.refresh_every
    for t in range(3):
        optimizer.param_groups[0]["refresh_every"] = 1 if t == 2 else root
        p.grad = torch.randn(64, 66)
        before = p.grad.clone()
        optimizer.step()
    # a root of the start value is a multiple of the identity: grafted, the gradient is unchanged
    assert relative_error(p.grad, before) < 1e-5
    optimizer.param_groups[0]["beta"] = 2.0
    p.grad = torch.randn(64, 66)
    with pytest.raises(ValueError, match=r"beta must be a number in \[0, 1\]; got 2.0"):
        optimizer.step()


def test_storage_options_are_fixed_once_there_is_state() -> None:
    p = nn.Parameter(torch.ones(64, 66))
    optimizer = Shampoo([("weight", p)], base="sgd", lr=0.1)
    optimizer.param_groups[0]["bits"] = 8  # before the first step: fine
    p.grad = torch.randn(64, 66)
    optimizer.step()
    optimizer.param_groups[0]["bits"] = 4
    before = p.detach().clone()
    with pytest.raises(ValueError, match="bits was changed from 8 to 4 in the group of weight"):
        optimizer.step()
    assert torch.equal(p, before)


def test_groups_may_differ_in_numbers_within_one_stack() -> None:
    """Equal shapes share stacks; their options may differ, neighbours or not."""
    dampings = [1e-1, 1e-3, 1e-1]
    params = [nn.Parameter(torch.ones(128, 64)) for _ in dampings]
    alone = [nn.Parameter(torch.ones(128, 64)) for _ in dampings]
    groups = [{"params": [p], "damping": d} for p, d in zip(params, dampings, strict=True)]
    together = Shampoo(groups, base="sgd", lr=0.1, **FAST)
    singles = [
        Shampoo([p], base="sgd", lr=0.1, damping=d, **FAST)
        for p, d in zip(alone, dampings, strict=True)
    ]
    for _ in range(5):
        for p, q, single in zip(params, alone, singles, strict=True):
            q.grad = torch.randn(128, 64)
            p.grad = q.grad.clone()
            single.step()
        together.step()
    assert same([p.detach() for p in params], [p.detach() for p in alone])


def test_experts_and_fused_projections_are_preconditioned_one_by_one() -> None:
    stacked, fused = nn.Parameter(torch.zeros(3, 20, 30)), nn.Parameter(torch.zeros(60, 30))
    grads = torch.randn(2, 3, 20, 30)
    groups = [
        {"params": [stacked], "batch_dims": 1},
        {"params": [fused], "split_sizes": (20, 20, 20)},
    ]
    optimizer = Shampoo(groups, base="sgd", lr=1.0, momentum=0.0, update_every=1, refresh_every=1)
    for grad in grads:
        stacked.grad, fused.grad = grad.clone(), grad.reshape(60, 30).clone()
        optimizer.step()
    # by hand: each matrix has its own L and R; one grafting factor for all
    roots = []
    for e in range(3):
        pair = [oracle.Factor(n, oracle.Options(bits=32), torch.float64) for n in (20, 30)]
        for grad in grads[:, e].double():
            pair[0].update(grad @ grad.T)
            pair[1].update(grad.T @ grad)
        for factor in pair:
            factor.refresh()
        roots.append([factor.inverse_root() for factor in pair])
    Ghat = torch.stack([L @ g @ R for (L, R), g in zip(roots, grads[1].double(), strict=True)])
    Gtilde = Ghat * grads[1].norm() / Ghat.norm()
    assert relative_error(stacked.grad, Gtilde) < 0.02
    assert relative_error(fused.grad, Gtilde.reshape(60, 30)) < 0.02
    assert torch.equal(stacked.detach().reshape(60, 30), fused.detach())


def test_closures_run_once_with_gradients_enabled() -> None:
    model = network()
    optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        return backward(model, 0)

    loss = optimizer.step(closure)
    assert calls == [True]
    assert float(loss.detach()) > 0
    assert optimizer.step() is None


def test_a_closures_exception_leaves_everything_as_it_was() -> None:
    model = network()
    optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
    run(model, optimizer, 3)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())

    def closure() -> float:
        raise KeyError("inside")

    with pytest.raises(KeyError):
        optimizer.step(closure)
    assert same(before, weights(model))
    assert str(state) == str(optimizer.state_dict())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_either_way(set_to_none: bool) -> None:
    model = network()
    optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
    for t in range(5):
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(model, t)
        optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    grads = [p.grad for p in model.parameters()]
    assert all(grad is None or (not set_to_none and not grad.any()) for grad in grads)


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_learning_rates_may_be_tensors_and_schedulers_work(kind: Any) -> None:
    results = []
    for make in (torch.optim.AdamW, lambda ps, lr: Shampoo(torch.optim.AdamW(ps, lr=lr))):
        model = network()
        optimizer = make(model.parameters(), lr=kind(1e-2))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        for t in range(5):
            optimizer.zero_grad()
            backward(model, t)
            optimizer.step()
            scheduler.step()
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(1e-2 / 4)
        results.append(weights(model))
    assert same(*results)
    momenta = torch.optim.lr_scheduler.OneCycleLR(
        Shampoo(network().parameters(), lr=1e-2), max_lr=0.1, total_steps=10
    )
    assert momenta.optimizer.param_groups[0]["betas"][0] == pytest.approx(0.95)


def test_param_groups_are_the_bases_own_list() -> None:
    model = network()
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = Shampoo(base)
    assert optimizer.param_groups is base.param_groups
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is base.param_groups
    optimizer.param_groups = [dict(group, lr=0.0) for group in optimizer.param_groups]
    before = weights(model)
    run(model, optimizer, 1)
    assert optimizer.param_groups is base.param_groups
    assert same(before, weights(model))


def test_swapped_parameters_are_looked_up_at_the_step() -> None:
    """As Accelerate does: the group's list is refilled with other objects."""
    old, new = nn.Parameter(torch.ones(64, 66)), nn.Parameter(torch.ones(64, 66))
    optimizer = Shampoo([old], base="sgd", lr=0.1)
    optimizer.param_groups[0]["params"] = [new]
    new.grad = torch.randn(64, 66)
    optimizer.step()
    assert torch.equal(old, torch.ones(64, 66))
    assert not torch.equal(new, torch.ones(64, 66))


def test_sparse_and_complex_gradients_say_what_to_do() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = Shampoo(embedding.named_parameters(), base="sgd", lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"gradient of weight is sparse.*sparse=False"):
        optimizer.step()
    assert torch.equal(embedding.weight, before)
    optimizer.param_groups[0]["precondition"] = False
    optimizer.step()
    assert not torch.equal(embedding.weight, before)

    p = nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))
    optimizer = Shampoo([p], base="sgd", lr=0.1)
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"group 0, parameter 0 is complex.*view_as_real"):
        optimizer.step()
    optimizer.param_groups[0]["precondition"] = False
    optimizer.step()
    assert not torch.equal(p.detach(), torch.ones(4, 4, dtype=torch.complex64))


def test_a_parameter_of_another_shape_is_refused() -> None:
    p = nn.Parameter(torch.ones(64, 66))
    optimizer = Shampoo([p], base="sgd", lr=0.1)
    p.grad = torch.randn(64, 66)
    optimizer.step()
    p.data = torch.ones(66, 64)
    p.grad = torch.randn(66, 64)
    with pytest.raises(ValueError, match=r"has changed from \(64, 66\) to \(66, 64\)"):
        optimizer.step()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_as_the_original(how: str) -> None:
    model = network()
    optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
    run(model, optimizer, 5)
    both = (model, optimizer)
    if how == "deepcopy":
        twin, twin_optimizer = copy.deepcopy(both)
    else:
        twin = copy.deepcopy(model)
        params, state = pickle.loads(pickle.dumps((list(model.parameters()), optimizer)))
        twin_optimizer = state
        for p, q in zip(twin.parameters(), params, strict=True):
            assert torch.equal(p, q)
        # the pickled optimizer owns its own parameters: point the model at them
        for (name, _), q in zip(list(twin.named_parameters()), params, strict=True):
            module, _, leaf = name.rpartition(".")
            setattr(twin.get_submodule(module), leaf, q)
    assert twin_optimizer.param_groups is twin_optimizer.base.param_groups
    run(model, optimizer, 5, first=5)
    run(twin, twin_optimizer, 5, first=5)
    assert same(weights(model), weights(twin))


def test_replaced_state_is_noticed_and_taken_over() -> None:
    """As device moves and offloading do: every tensor of the state is another one."""
    results = []
    for replaced in (False, True):
        model = network()
        optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
        run(model, optimizer, 5)
        if replaced:
            for p in list(optimizer.state):
                optimizer.state[p] = copy.deepcopy(optimizer.state[p])
        run(model, optimizer, 5, first=5)
        results.append(weights(model))
    assert same(*results)
    leaf = optimizer.state[model.linear.weight]["block_0"]["left"]
    leaf["eigenvalues"] = torch.full_like(leaf["eigenvalues"], 7.0)
    backward(model, 0)
    optimizer.step()
    assert (optimizer.state[model.linear.weight]["block_0"]["left"]["eigenvalues"] == 7.0).all()
    leaf = optimizer.state[model.linear.weight]["block_0"]["left"]
    leaf["eigenvalues"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"block_0.left.eigenvalues has shape \(3,\)"):
        optimizer.step()


@pytest.mark.gpu
def test_a_model_may_move_to_another_device_between_steps() -> None:
    p = nn.Parameter(torch.ones(70, 66))
    optimizer = Shampoo([p], base="sgd", lr=0.1, **FAST)
    for t in range(8):
        if t == 5:
            p.data = p.data.cuda()
            for state in optimizer.base.state.values():
                for key, value in state.items():
                    state[key] = value.cuda()
        p.grad = torch.randn(70, 66).to(p.device)
        optimizer.step()
    assert optimizer.state[p]["block_0"]["left"]["codes"].is_cuda
    assert torch.isfinite(p).all()


def test_reduced_precision_settings_do_not_change_the_run() -> None:
    results = []
    for reduced in (False, True):
        model = network()
        optimizer = Shampoo(model.parameters(), lr=1e-2, **FAST)
        for t in range(6):
            optimizer.zero_grad()
            backward(model, t)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=reduced):
                optimizer.step()
        results.append(weights(model))
    assert same(*results)


def test_default_dtype_and_rng_are_not_touched() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        p = nn.Parameter(torch.ones(64, 66, dtype=torch.float32))
        optimizer = Shampoo([p], base="sgd", lr=0.1, update_every=1, refresh_every=1)
        p.grad = torch.randn(64, 66, dtype=torch.float32)
        state = torch.get_rng_state()
        optimizer.step()
        assert torch.equal(torch.get_rng_state(), state)
        leaves = optimizer.state[p]["block_0"]["left"].values()
        assert {leaf.dtype for leaf in leaves} == {torch.float32, torch.uint8}
    finally:
        torch.set_default_dtype(torch.float32)


def test_first_refresh_brings_the_first_preconditioned_step_forward() -> None:
    p = nn.Parameter(torch.zeros(64, 66))
    optimizer = Shampoo(torch.optim.SGD([p], lr=0.0), first_refresh=3)
    changed = []
    for t in range(1, 15):
        p.grad = torch.randn(64, 66)
        before, roots = p.grad.clone(), copy.deepcopy(optimizer.state.get(p))
        optimizer.step()
        if not torch.equal(p.grad, before):
            changed.append(t)
        now = optimizer.state[p]["block_0"]["left"]["root_codes"]
        moved = roots is not None and not torch.equal(now, roots["block_0"]["left"]["root_codes"])
        assert moved == (t in (3, 6, 12))
    assert changed == list(range(3, 15))


def test_step_hooks_and_warnings() -> None:
    seen = []
    p = nn.Parameter(torch.zeros(64, 66))
    optimizer = Shampoo([p], base="sgd", lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    p.grad = torch.randn(64, 66)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert seen == ["pre", "post"]


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
def test_grad_scaler_and_fused_bases(fused: bool) -> None:
    """The scaler unscales before our step and skips it on overflow; t does not advance then."""
    model = network("cuda")
    optimizer = Shampoo(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused), **FAST)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=2)
    taken = 0
    for t in range(60):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(t)).cuda()
            loss = model(x).float().square().mean()
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        taken += scaler.get_scale() >= before
    assert 0 < taken < 60
    assert optimizer.state[model.linear.weight]["step"] == taken
    assert optimizer.diagnostics()["skipped_gradients"] == 0
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_ordinary_step_never_waits_for_the_device(dtype: torch.dtype) -> None:
    model = network("cuda", dtype)
    base = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    optimizer = Shampoo(base, update_every=3, refresh_every=3)
    run(model, optimizer, 4)
    for t in (4, 6):  # steps 5 and 7; step 6 updates and refreshes
        optimizer.zero_grad()
        backward(model, t)
        with no_host_sync():
            optimizer.step()
        run(model, optimizer, 1, first=t + 1)
