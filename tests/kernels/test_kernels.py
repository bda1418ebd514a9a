"""Kernels match the torch reference, interpreted on the CPU and compiled on a GPU."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.networks import assert_same_state
from support.numerics import PAPER, no_host_sync, relative_error, slow
from torch import Tensor, nn
from torch.nn import functional

from kronbit import Shampoo
from kronbit.gpu.product_precision import HALF
from kronbit.kernels import guard
from kronbit.linalg.backend import backend, padded_by_identity
from kronbit.linalg.orthogonal import orthogonality_error, shifted_cholesky_qr
from kronbit.linalg.products import multiply, operand
from kronbit.linalg.roots import power_iteration
from kronbit.quantization import Quantizer

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.bf16_products,
]

QUANTISERS = [
    (4, "linear2", 64, 67),
    (3, "dt", 16, 5),
    pytest.param(4, "linear2", 48, 100, marks=slow),
    pytest.param(4, "dt", 64, 65, marks=slow),
    (8, "linear2", 64, 70),
    pytest.param(6, "linear", 16, 33, marks=slow),
    pytest.param(3, "linear2", 64, 67, marks=slow),
]


@pytest.mark.parametrize(("bits", "mapping", "block_size", "n"), QUANTISERS)
def test_codes_and_values_are_bitwise_equal(
    bits: int, mapping: str, block_size: int, n: int, kernels: torch.device
) -> None:
    from kronbit.kernels import quantization as quantiser

    X = torch.randn(2, n, n)
    X[0, 0] = 0
    X[1, 0, 0] = 1e-40
    reference = Quantizer(bits, mapping, block_size)
    for stack in (X, X.mT):
        expected = reference.encode(stack)
        actual = quantiser.encode(stack.to(kernels), False, bits, mapping, block_size)
        assert torch.equal(actual[0].cpu(), expected.codes)
        assert torch.equal(actual[1].cpu(), expected.scales)
        back = quantiser.decode(actual[0], actual[1], None, bits, mapping, block_size)
        assert torch.equal(back.cpu(), reference.decode(expected, n))
        larger = n + 70
        stacks = [(actual[0][:1], actual[1][:1]), actual[:2]]
        parts = quantiser.decode_operand(stacks, larger, bits, mapping, block_size)
        whole = padded_by_identity(back, larger)
        assert relative_error(parts.float()[1:], whole) < 2**-21
        side = parts.hi.shape[-1]
        assert torch.equal(parts.float()[0], parts.float()[1])
        assert not parts.hi[1:, larger:].any()
        assert not parts.hi[1:, :, larger:side].any()
    exact_diagonal = X.diagonal(dim1=-2, dim2=-1).clone()
    codes, scales, diagonal = quantiser.encode(X.to(kernels), True, bits, mapping, block_size)
    assert torch.equal(diagonal.cpu(), exact_diagonal)
    X.diagonal(dim1=-2, dim2=-1).zero_()
    whole = reference.decode(reference.encode(X), n)
    whole.diagonal(dim1=-2, dim2=-1).copy_(exact_diagonal)
    back = quantiser.decode(codes, scales, diagonal, bits, mapping, block_size)
    assert torch.equal(back.cpu(), whole)


def test_a_nan_makes_a_scale_that_is_refused(kernels: torch.device) -> None:
    from kronbit.kernels import quantization as quantiser

    X = torch.ones(1, 20, 20, device=kernels)
    X[0, 3, 3] = torch.nan
    _, scales, _ = quantiser.encode(X, False, 4, "linear2", 64)
    assert (~torch.isfinite(scales)).sum() == 1


@pytest.mark.parametrize("sizes", [(70, 50, 33), (5, 7, 3), (64, 128, 130)])
def test_products_are_as_accurate_as_float32(
    sizes: tuple[int, int, int], kernels: torch.device
) -> None:
    m, depth, n = sizes
    A, B = torch.randn(2, m, depth) * 1e-3, torch.randn(2, depth, n) * 1e5
    exact = A.double() @ B.double()
    a, b = operand(A.to(kernels)), operand(B.to(kernels))
    assert relative_error(multiply(a, b), exact) < 5e-7
    assert relative_error(multiply(b.mT, a.mT), exact.mT) < 5e-7
    C = torch.randn(2, m, n)
    out = C.clone().to(kernels)
    result = multiply(a, b, C=out, alpha=-0.5, beta=1.5, out=out)
    assert result.data_ptr() == out.data_ptr()
    assert relative_error(out, 1.5 * C.double() - 0.5 * exact) < 5e-7
    gram = multiply(a, a.mT, symmetric=True)
    assert relative_error(gram, A.double() @ A.double().mT) < 5e-7


def test_products_of_zero_tiny_huge_and_broken_matrices(kernels: torch.device) -> None:
    X = torch.stack([torch.zeros(9, 9), torch.full((9, 9), 1e-25), torch.full((9, 9), 1e18)])
    x = operand(X.to(kernels))
    eye = operand(torch.eye(9, device=kernels).repeat(3, 1, 1), bound=1.0)
    assert relative_error(multiply(x, eye)[1:], X[1:]) < 1e-6
    assert torch.equal(multiply(x, eye)[0].cpu(), X[0])
    X[0, 0, 0] = torch.nan
    assert not torch.isfinite(multiply(operand(X.to(kernels)), eye)[0]).all()
    assert torch.isfinite(multiply(operand(X.to(kernels)), eye)[1]).all()


@pytest.mark.parametrize("n", [5, 64, 130])
def test_chained_products_are_as_accurate_as_float32(n: int, kernels: torch.device) -> None:
    A = torch.randn(2, n, n, dtype=torch.float64).float() / n**0.5
    M = A @ A.mT * 1e6
    a, exact = operand(A.to(kernels)), A.double() @ A.double().mT
    compose = backend(a).compose
    S = compose(a, a.mT, symmetric=True)
    assert relative_error(S.float(), exact) < 1e-6
    assert relative_error(multiply(S, a), exact @ A.double()) < 1e-6
    assert relative_error(compose(a.mT, a).float(), A.double().mT @ A.double()) < 1e-6
    step = compose(S, a, C=a, alpha=-0.5, beta=1.5)
    assert relative_error(step.float(), 1.5 * A.double() - 0.5 * exact @ A.double()) < 1e-6
    bound = M.diagonal(dim1=-2, dim2=-1).amax(-1).to(kernels)
    large = compose(a, a.mT, C=M.to(kernels), alpha=0.1, beta=0.9, symmetric=True, bound=bound)
    assert relative_error(large.float(), 0.1 * exact + 0.9 * M.double()) < 1e-6
    lam = torch.rand(2, n) * 1e7
    scaled = backend(a).scale_rows(a, lam.to(kernels), lam.amax(-1).to(kernels))
    assert relative_error(scaled.float(), A.double() * lam.double().unsqueeze(-1)) < 1e-6


def test_columns_are_normalised(kernels: torch.device) -> None:
    X = torch.randn(2, 70, 67) * 10.0 ** torch.randint(-12, 12, (67,))
    X[0, :, 3] = 0.0
    exact = X.double() / X.double().norm(dim=-2, keepdim=True).clamp(min=1e-300)
    assert relative_error(backend(kernels).normalise_columns(X.to(kernels)).float(), exact) < 1e-6
    Y = torch.randn(2, 70, 67)
    dots = (exact.float().double() * Y.double()).sum(-2)
    actual = backend(kernels).column_dots(exact.float().to(kernels), Y.to(kernels))
    assert relative_error(actual, dots) < 1e-6


def test_skipping_the_zeros_of_triangles_changes_nothing(kernels: torch.device) -> None:
    c = operand(torch.randn(2, 300, 300).tril().to(kernels))
    actual = multiply(c, c.mT, symmetric=True, triangular=True)
    assert torch.equal(actual, multiply(c, c.mT, symmetric=True))


def norms(A: Tensor) -> tuple[Tensor, Tensor]:
    return backend(A.device).norms(A, least=-126)


@pytest.mark.parametrize("n", [5, pytest.param(70, marks=slow), pytest.param(270, marks=slow)])
def test_norms_and_largest_eigenvalues_do_not_depend_on_the_batch(
    n: int, kernels: torch.device
) -> None:
    """Results are bit-identical whatever the padding and the other matrices of the batch."""
    X = torch.randn(3, n, n, dtype=torch.float64)
    A = (X @ X.mT).float() * torch.tensor([1e-30, 1.0, 1e30])[:, None, None]
    a, factors = A.to(kernels), (torch.tensor([1e30, 2.0, 1e-30]) / n).to(kernels)
    (norm, power), largest = norms(a), power_iteration(a, factors)
    assert relative_error(norm / a.double().norm(dim=(-2, -1)), torch.ones(3)) < 1e-7
    assert torch.equal(power.cpu(), norms(A)[1])
    assert ((norm < power) & (power <= 2 * norm)).all()
    exact = power_iteration(A * factors.cpu()[:, None, None])
    assert relative_error(largest, exact) < 1e-5
    larger = functional.pad(a[1:2], (0, 20, 0, 20))
    assert torch.equal(norms(larger)[0], norm[1:2])
    assert torch.equal(power_iteration(larger, factors[1:2]), largest[1:2])
    zeros = torch.zeros(3, 5, 5, device=kernels)
    assert not power_iteration(zeros).any()
    assert [values.tolist() for values in norms(zeros)] == [[0.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("shape", [(40, 40), (130, 70), (200, 130)])
def test_a_correction_squares_the_error(shape: tuple[int, int], kernels: torch.device) -> None:
    m, n = shape
    Q = torch.linalg.qr(torch.randn(2, m, n, dtype=torch.float64))[0]
    Q = (Q @ (torch.eye(n) + 1e-3 * torch.randn(2, n, n)).double()).float()
    E = Q.double().mT @ Q.double() - torch.eye(n)
    q = operand(Q.to(kernels), bound=1.0)
    W, error = backend(q).correction(q)
    U = E.triu(1) + torch.diag_embed(E.diagonal(dim1=-2, dim2=-1) / 2)
    assert relative_error(W.float(), torch.eye(n) - U) < 1e-6
    assert relative_error(error.sum(-1), E.triu().square().sum((-2, -1))) < 1e-3
    plain, plain_error = backend(Q).correction(Q)
    assert relative_error(plain, torch.eye(n) - U) < 1e-6
    assert relative_error(plain_error.sum(-1), E.triu().square().sum((-2, -1))) < 1e-3
    corrected = multiply(operand(Q.to(kernels)), W).cpu().double()
    remaining = (corrected.mT @ corrected - torch.eye(n)).norm(dim=(-2, -1))
    assert (remaining < 5 * E.norm(dim=(-2, -1)) ** 2 + 1e-5).all()


@pytest.mark.parametrize(
    ("n", "block"),
    [(5, 8), (32, 8), (70, 8), pytest.param(200, 2, marks=slow), pytest.param(280, 8, marks=slow)],
)
def test_the_inverse_factor_is_choleskys(
    n: int, block: int, kernels: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kronbit.kernels import cholesky

    monkeypatch.setattr(cholesky, "_BLOCK", block)
    X = torch.randn(3, 2 * n + 20, n, dtype=torch.float64)
    S = X.mT @ X
    S[1] -= (2 * n + 20) * torch.eye(n)
    all_true = torch.ones(3, dtype=torch.bool, device=kernels)
    inverse = cholesky.inverse_factor_(S.float().to(kernels), 0.0, all_true)
    assert torch.isfinite(inverse).flatten(1).all(1).tolist() == [True, False, True]
    for i in (0, 2):
        exact = torch.linalg.inv(torch.linalg.cholesky(S[i]).mT)
        assert relative_error(inverse[i], exact) < 1e-5


@pytest.mark.parametrize("n", [1, 32, pytest.param(45, marks=slow), 130])
def test_the_factor_is_choleskys(n: int, kernels: torch.device) -> None:
    X = torch.randn(4, n, 2 * n + 20, dtype=torch.float64)
    A = X @ X.mT
    A[1, -1, -1] = -1.0  # the last pivot is negative
    A[2] -= 3 * A[2].diagonal().amax() * torch.eye(n)  # the first pivot is negative
    C, good = backend(kernels).cholesky_(A.float().to(kernels))
    assert good.tolist() == [True, False, False, True]
    for i in (0, 3):
        exact = torch.linalg.cholesky(A[i])
        assert relative_error(C[i], exact) < 1e-5
        assert (C[i].triu(1) == 0).all()


def test_a_factor_of_small_pivots_is_as_accurate_as_torchs(kernels: torch.device) -> None:
    """C Cᵀ has float32 accuracy, however small the pivots are."""
    n = 200
    V, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))
    lam = torch.logspace(0, -6, n, dtype=torch.float64)
    A = ((V * lam) @ V.mT).float().unsqueeze(0)
    C, good = backend(kernels).cholesky_(A.clone().to(kernels))
    assert good.all()
    C = C.cpu().double()
    assert relative_error(C @ C.mT, A.double()) < 1e-6
    exact = torch.linalg.cholesky(A.double())
    plain = torch.linalg.cholesky(A).double()
    assert relative_error(C, exact) < 3 * relative_error(plain, exact) + 1e-6


def test_tiny_pivots_eliminate_nothing(kernels: torch.device) -> None:
    """The reference is textbook Cholesky in float64 that skips tiny pivots."""
    from kronbit.kernels.cholesky import inverse_factor_

    n, least = 70, 1e-3
    X = torch.randn(2, n, n, dtype=torch.float64)
    X[:, :, 3] = X[:, :, 1] + X[:, :, 2]
    X[:, :, 40] = X[:, :, 10] - X[:, :, 35]
    X /= X.norm(dim=-2, keepdim=True)
    S = X.mT @ X
    expected = []
    for rest in S.clone():
        L = torch.zeros(n, n, dtype=torch.float64)
        for j in range(n):
            if rest[j, j] < least:
                L[j, j] = least**0.5
            else:
                L[j:, j] = rest[j:, j] / rest[j, j].sqrt()
                rest -= torch.outer(L[:, j], L[:, j])
        assert (L.diagonal() == least**0.5).nonzero().flatten().tolist() == [3, 40]
        expected.append(torch.linalg.inv(L.mT))
    S = S.float().to(kernels)
    actual = inverse_factor_(S.clone(), least, torch.ones(2, dtype=torch.bool, device=kernels))
    assert relative_error(actual, torch.stack(expected)) < 1e-3
    only = torch.tensor([False, True], device=kernels)
    assert torch.equal(inverse_factor_(S, least, only)[1], actual[1])


@pytest.mark.parametrize(("n", "rank"), [(27, 13), (64, 3)])
@pytest.mark.parametrize("ridge", [0.0, pytest.param(1e-9, marks=slow)])
def test_kernels_take_singular_matrices(
    n: int, rank: int, ridge: float, kernels: torch.device
) -> None:
    G = torch.randn(n, rank, dtype=torch.float64) * torch.logspace(0, -3, rank)
    A = G @ G.mT + ridge * torch.eye(n)
    V = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]
    X = (A @ V).float()[None].to(kernels)
    Q, good = shifted_cholesky_qr(X)
    assert good.all()
    assert orthogonality_error(Q).max() < 1e-5


@slow
def test_tiny_statistics_survive_without_an_initial_value(kernels: torch.device) -> None:
    """With beta=0, the initial value has no weight, and A has the scale of M."""
    p = nn.Parameter(torch.zeros(20, 24, device=kernels))
    optimizer = Shampoo(
        [p], base="sgd", lr=0.1, beta=0, method="eigen", update_every=1, refresh_every=1
    )
    p.grad = 1e-17 * torch.randn(20, 24, device=kernels)
    optimizer.step()
    left = optimizer.state[p]["block_0"]["left"]
    G = torch.randn(20, 24)
    assert left["eigenvalues"].max() > 1e-34
    assert not torch.equal(left["root"].cpu(), torch.eye(20))
    p.grad = G.to(kernels)
    optimizer.step()
    assert torch.isfinite(p.grad).all()


def test_the_environment_turns_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KRONBIT_KERNELS", "0")
    device = torch.device("cuda", 7)
    assert guard.why_not.__wrapped__(device) == "KRONBIT_KERNELS=0"
    monkeypatch.delenv("KRONBIT_KERNELS")
    assert guard.why_not.__wrapped__(torch.device("cpu")) == "no kernels for cpu"


def test_kernels_are_compiled_and_loaded_before_they_are_launched() -> None:
    """A kernel that cannot be loaded does not stop the others. It fails when it is launched.

    CPython may fail to parse a kernel while another thread parses. The kernel is compiled again.
    """
    from kronbit.kernels.launch import compile_together, launch

    class Kernel:
        def __init__(self, fits: bool) -> None:
            self.fits, self.loaded, self.calls = fits, False, 0
            self.src = SimpleNamespace(signature={"x": "*fp32"})

        def warmup(self, *arguments: object, grid: tuple[int, ...]) -> Kernel:
            self.calls += 1
            if self.calls == 1:
                raise SystemError("AST constructor recursion depth mismatch (before=48, after=89)")
            return self

        @property
        def run(self) -> object:
            self.loaded = True
            if not self.fits:
                raise RuntimeError("out of resources")
            return object()

    some = [Kernel(True), Kernel(False), Kernel(True)]

    def work() -> None:
        for kernel in some:
            launch(kernel, (1,), torch.zeros(1))

    compile_together(work)
    assert all(kernel.loaded for kernel in some)


_TWO_BUILDERS = """
import sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from kronbit.kernels.launch import load

class Compiled:
    def __init__(self, pointer):
        self.src = SimpleNamespace(signature={"x": pointer, "n": "i32", "N": "constexpr"})
    @property
    def run(self):
        mark = Path(sys.argv[1])
        mark.touch(exist_ok=False)  # fails if another thread or process is building
        time.sleep(0.02)
        mark.unlink()

failed = []
def build():
    try:
        for pointer in ("*fp32", "*i8") * 8:  # one library
            load(Compiled(pointer))
    except FileExistsError as error:
        failed.append(error)

threads = [threading.Thread(target=build) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
sys.exit(bool(failed))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_one_thread_at_a_time_builds_the_launcher_of_a_signature(tmp_path: Path) -> None:
    """Concurrent builders would load each other's libraries, whose signatures differ."""
    command = [sys.executable, "-c", _TWO_BUILDERS, str(tmp_path / "building")]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    both = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [one.wait(timeout=120) for one in both] == [0, 0]
    (lock,) = (tmp_path / "cache").iterdir()
    assert lock.stat().st_size == 0


def test_threads_never_get_the_launcher_of_another_signature() -> None:
    """Python keeps one module object for all launchers, because they have the same name."""
    from kronbit.kernels.launch import load

    module = SimpleNamespace(launch="")

    class Compiled:
        """Loads its launcher as Triton does: into the common module, from which it is read."""

        launch = ""

        def __init__(self, signature: str) -> None:
            self.src = SimpleNamespace(signature={"x": signature})

        @property
        def run(self) -> None:
            module.launch = self.src.signature["x"]
            time.sleep(0.001)
            self.launch = module.launch

    loaded = [Compiled(signature) for signature in ("*fp32", "i32", "i64", "fp32") * 8]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(load, loaded))
    assert all(compiled.launch == compiled.src.signature["x"] for compiled in loaded)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_every_kernel_compiles_without_a_gpu() -> None:
    """The compiler refuses some programs that the interpreter accepts."""
    script = Path(__file__).parents[1] / "support" / "compile_kernels.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass_kernel" in done.stdout
    assert "wgmma" in done.stdout


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
    """Set new gradients at other addresses."""
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
    """The workspace holds all parameters in one wave, or needs two or three waves."""
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
        assert 24 not in actual["products"]
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
