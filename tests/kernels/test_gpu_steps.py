"""Steps with kernels on a GPU: CUDA graphs, resuming, and training as with torch."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from support.networks import assert_same_state
from support.numerics import PAPER, no_host_sync, relative_error
from torch import Tensor, nn

from kronbit import Shampoo
from kronbit.kernels import guard
from kronbit.linalg.precision import FLOAT32, HALF

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.bf16_products,
]


def build(
    graph: bool,
    dtype: torch.dtype = torch.float32,
    workspace_mb: float = 256,
    method: dict[str, Any] = PAPER,
) -> tuple[list[nn.Parameter], Shampoo]:
    torch.manual_seed(0)
    shapes = [(300, 200), (128, 128), (40,), (64, 700)]
    params = [nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype)) for shape in shapes]
    base = torch.optim.AdamW(params, lr=1e-2, fused=True)
    every = {"update_every": 4, "refresh_every": 8}
    options = {"max_order": 256, "cuda_graph": graph, "workspace_mb": workspace_mb, **every}
    return params, Shampoo(base, **options, **method)


def feed(params: list[nn.Parameter], t: int) -> list[Tensor]:
    """Set new gradients. The returned ballast moves them to other addresses at every step."""
    generator = torch.Generator("cuda").manual_seed(t)
    ballast = [torch.empty(1000 * (t % 3 + 1), device="cuda")]
    for p in params:
        p.grad = torch.randn(p.shape, device="cuda", dtype=p.dtype, generator=generator)
    return ballast


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("workspace_mb", "waves"), [(256, 1), (0.35, 2), (0.15, 3)])
def test_a_graph_changes_nothing_if_gradients_move(
    workspace_mb: float, waves: int, dtype: torch.dtype
) -> None:
    """The workspace decides whether the parameters take one, two or three waves."""
    a, with_graph = build(True, dtype, workspace_mb)
    b, without = build(False, dtype, workspace_mb)
    for t in range(30):
        for params, optimizer in ((a, with_graph), (b, without)):
            keep = feed(params, t)
            if t == 20:
                params[0].grad = None
            if t == 22:
                params[1].grad[0, 0] = torch.nan
            optimizer.step()
            del keep
    for p, q in zip(a, b, strict=True):
        assert torch.equal(p, q)
    assert_same_state(with_graph.state_dict()["state"], without.state_dict()["state"])
    actual = with_graph.diagnostics()
    assert actual["kernels"] == {"cuda:0": "used"}
    assert actual["cuda_graph"] == {"cuda:0": "not refused"}
    assert actual["products"] == {HALF: 3}
    (preconditioner,) = with_graph._keeper.plan.preconditioners.values()
    (guard,) = with_graph._guards.values()
    for replay in (preconditioner.products._replay, guard._replay):
        assert any(graph is not None for graph in replay._graphs.values())
    # Right after a parameter's first refresh, its products may have been more precise.
    grouped = preconditioner.products._grouped
    half = {key: tables for key, tables in grouped.items() if not key[0].precise}
    assert max(len(tables._tables.waves) for tables in half.values()) == waves
    assert {precision.direct for precision, *_ in half} == {dtype == torch.bfloat16}


@pytest.mark.gpu
def test_a_graph_follows_the_memory_order_of_gradients() -> None:
    """The order changes after the steps in which a graph is captured."""
    results = []
    for graph in (True, False):
        torch.manual_seed(0)
        shapes = [(64, 32, 3, 3), (96, 16, 2, 2), (128, 128)]
        params = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
        every = {"update_every": 4, "refresh_every": 8}
        base = torch.optim.SGD(params, lr=1e-2)
        optimizer = Shampoo(base, max_order=256, cuda_graph=graph, **every)
        for t in range(40):
            generator = torch.Generator("cuda").manual_seed(t)
            for p in params:
                p.grad = torch.randn(p.shape, device="cuda", generator=generator)
                if p.dim() == 4 and t // 10 % 2 == int(graph):
                    p.grad = p.grad.to(memory_format=torch.channels_last)
            optimizer.step()
        assert optimizer.diagnostics()["cuda_graph"] == {"cuda:0": "not refused"}
        assert optimizer.diagnostics()["products"] == {HALF: 3}
        results.append(params)
    for p, q in zip(*results, strict=True):
        assert relative_error(p, q) < 1e-4


@pytest.mark.gpu
def test_a_step_inside_a_capture_is_refused() -> None:
    params, optimizer = build(True)
    kept = feed(params, 0)
    with (
        pytest.raises(RuntimeError, match="cannot be part of a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    assert not optimizer.state
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 1
    del kept


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False])
def test_the_default_runs_on_kernels(graph: bool) -> None:
    """Graphs change no bit of the result."""
    results = []
    for captured in (graph, False):
        params, optimizer = build(captured, method={})
        for t in range(30):
            keep = feed(params, t)
            optimizer.step()
            del keep
        results.append((params, optimizer.state_dict()["state"]))
        actual = optimizer.diagnostics()
        assert actual["kernels"] == {"cuda:0": "used"}
        assert actual["cuda_graph"] == {"cuda:0": "not refused"}
        assert FLOAT32 not in actual["products"]
        assert actual["discarded_roots"] == actual["discarded_statistics"] == 0
    for p, q in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(p, q)
    assert_same_state(results[0][1], results[1][1])


@pytest.mark.gpu
@pytest.mark.parametrize("method", [PAPER, {}], ids=str)
@pytest.mark.parametrize("when", [10, 17])
def test_resuming_is_exact_with_kernels(when: int, method: dict[str, Any]) -> None:
    params, optimizer = build(True, method=method)
    for t in range(26):
        if t == when:
            saved = copy.deepcopy(optimizer.state_dict())
            again, resumed = build(True, method=method)
            with torch.no_grad():
                for p, q in zip(params, again, strict=True):
                    q.copy_(p)
            resumed.load_state_dict(saved)
        feed(params, t)
        optimizer.step()
        if t >= when:
            feed(again, t)
            resumed.step()
    for p, q in zip(params, again, strict=True):
        assert torch.equal(p, q)
    assert_same_state(optimizer.state_dict()["state"], resumed.state_dict()["state"])


@pytest.mark.gpu
@pytest.mark.parametrize("method", [PAPER, {}], ids=str)
def test_ordinary_steps_neither_synchronise_nor_compile(method: dict[str, Any]) -> None:
    from kronbit.kernels.launch import _COMPILED

    params, optimizer = build(True, method=method)
    for t in range(20):
        feed(params, t)
        optimizer.step()
    before = len(_COMPILED)
    for t in range(20, 23):
        feed(params, t)
        with no_host_sync():
            optimizer.step()
    for t in range(23, 41):
        feed(params, t)
        optimizer.step()
    assert len(_COMPILED) == before


@pytest.mark.gpu
def test_kernels_and_torch_train_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 32 bits, there are no codes to round differently. Products may differ by 0.5°, or 0.9 %.

    Gradients are square, so both factors have full rank. Otherwise one factor is singular up to
    rounding, and its small eigenvalues differ between any two float32 products.
    """
    results = []
    for why in (None, "a test"):
        monkeypatch.setattr(guard, "why_not", lambda device, why=why: why)
        torch.manual_seed(0)
        params = [
            nn.Parameter(torch.randn(shape, device="cuda")) for shape in ((300, 300), (64, 64))
        ]
        base = torch.optim.SGD(params, lr=0.1)
        optimizer = Shampoo(base, bits=32, method="eigen", update_every=2, refresh_every=4)
        for t in range(12):
            feed(params, t)
            optimizer.step()
        results.append([p.detach().clone() for p in params])
    for one, other in zip(*results, strict=True):
        assert relative_error(one, other) < 1e-2
        assert math.isfinite(float(one.sum()))
