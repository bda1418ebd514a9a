"""M-FAC matches a dense inverse in float64, for parameters of any shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.baselines import mfac
from support.layers import sgd
from support.networks import network, run, weights
from support.numerics import angle, relative_error
from torch import Tensor, nn

from kronbit.baselines import MFAC


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


def test_mfac_accepts_parameters_of_any_shape_and_groups_added_later(device: torch.device) -> None:
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
