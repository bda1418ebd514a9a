"""Kernels of the ordinary step against the torch reference: norms, products, grafting."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from support.numerics import angle, relative_error, slow
from support.preconditioners import (
    ALL_BF16,
    MIXED,
    PASS,
    SINGLE,
    gradients,
    make_preconditioner,
    measure,
)
from torch import Tensor

from kronbit import CASPR, Shampoo
from kronbit.config import Config
from kronbit.gpu.product_precision import _least_bits
from kronbit.kernels import guard
from kronbit.linalg.precision import BF16X3, FLOAT32, HALF
from kronbit.step.nonfinite import NonfiniteGuard

pytest.importorskip("triton")
from kronbit.gpu import addresses
from kronbit.gpu.addresses import AddressTable

pytestmark = [
    pytest.mark.filterwarnings("ignore:(invalid value|overflow encountered):RuntimeWarning"),
    pytest.mark.bf16_products,
]


@pytest.mark.parametrize(
    ("algorithm", "options", "dtypes", "precision", "nonfinite"),
    [
        (Shampoo, {}, SINGLE, HALF, "zero"),
        pytest.param(Shampoo, {}, MIXED, BF16X3, "zero", marks=slow),
        pytest.param(
            Shampoo, {"bits": 3, "method": "cholesky"}, ALL_BF16, HALF, "pass", marks=slow
        ),
        pytest.param(Shampoo, {"bits": 3}, MIXED, HALF, "pass", marks=slow),
        pytest.param(CASPR, {"block_size": 48}, ALL_BF16, HALF, "zero", marks=slow),
        pytest.param(Shampoo, {}, ALL_BF16, HALF, "pass", marks=slow),
        pytest.param(CASPR, {"bits": 32}, SINGLE, BF16X3, "pass", marks=slow),
        pytest.param(Shampoo, {"storage": "compact"}, SINGLE, HALF, "zero", marks=slow),
        pytest.param(CASPR, {"storage": "compact", "bits": 8}, MIXED, BF16X3, "zero", marks=slow),
    ],
)
def test_preconditioned_gradients_match_the_reference(
    algorithm: Any,
    options: dict[str, Any],
    dtypes: list[torch.dtype],
    precision: int,
    nonfinite: str,
    kernels: torch.device,
) -> None:
    """Angle and norm of G̃ match, although one gradient is missing and one is not finite."""
    preconditioner = make_preconditioner(kernels, algorithm, **options)
    grads: list[Tensor | None] = list(gradients(kernels, dtypes))
    grads[2][0, 0, 0] = torch.nan  # type: ignore[index]
    twins = [grad.clone() for grad in grads if grad is not None]
    broken = twins[2].clone()
    missing, grads[1] = grads[1], None
    preconditioner.products.bits = dict.fromkeys(range(4), precision)
    step = measure(kernels, grads, NonfiniteGuard(kernels, Config(nonfinite=nonfinite)))
    norms = step.norms.clone()
    exact = tuple(i for i, grad in enumerate(grads) if grad is not None)
    reference = [None if grads[i] is None else twins[i] for i in range(4)]
    preconditioner._precondition_exactly(exact, reference, norms, torch.isfinite(norms))
    preconditioner.precondition(step)
    for i in (0, 3):
        assert grads[i] is not None
        assert angle(grads[i], twins[i]) < 0.5
        assert float(grads[i].float().norm()) == pytest.approx(float(norms[i]), rel=1e-2)
    assert grads[2] is not None
    expected = torch.zeros_like(broken) if nonfinite == "zero" else broken
    for actual, right in ((twins[2], broken), (grads[2], expected)):
        torch.testing.assert_close(actual, right, rtol=0, atol=0, equal_nan=True)
    assert missing is not None
    assert torch.equal(missing, twins[1])
    assert torch.isfinite(preconditioner.stacks.graft_ratio[:1]).all()


@pytest.mark.parametrize(
    ("shape", "tile", "bits"),
    [
        ((131, 66), 64, 3),
        pytest.param((131, 66), 32, 4, marks=slow),
        pytest.param((190, 96), 64, 4, marks=slow),
        pytest.param((190, 96), 32, 3, marks=slow),
        pytest.param((66, 131), 32, 8, marks=slow),
    ],
)
def test_roots_in_tiles_and_in_rows_are_decoded_correctly(
    shape: tuple[int, int],
    tile: int,
    bits: int,
    kernels: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Roots in both layouts are decoded to the right elements."""
    monkeypatch.setattr("kronbit.factors.storage.TILES", (tile,))
    preconditioner = make_preconditioner(
        kernels, shapes=[shape], bits=bits, storage="compact", max_order=600
    )
    grad = torch.randn(shape).to(kernels)
    twin = grad.clone()
    preconditioner.products.bits = {0: BF16X3}
    step = measure(kernels, [grad])
    preconditioner._precondition_exactly((0,), [twin], step.norms.clone(), step.finite.clone())
    preconditioner.precondition(step)
    assert relative_error(grad, twin) < 1e-4


@slow
@pytest.mark.parametrize(
    ("gain", "precision"),
    [(1e-3, FLOAT32), (1.0, BF16X3), (250.0, HALF)],
)
def test_precisions_are_chosen_by_the_angle(
    gain: float, precision: int, kernels: torch.device
) -> None:
    """Random gradients permit float16. Those in the subspace that a root shrinks most may not."""
    preconditioner = make_preconditioner(kernels, bits=32)
    grads: list[Tensor | None] = list(gradients(kernels, SINGLE))
    low = torch.linalg.qr(torch.randn(20, 20))[0][:, :2]
    L = 300 * torch.eye(20) - (300 - gain) * low @ low.mT
    for group in preconditioner.stacks.groups:
        if group.shape == (20, 66):
            group.left.tensors["root"][0] = L.to(kernels)
    grads[0] = (low @ torch.randn(2, 66)).to(kernels)
    grads[1] = None
    preconditioner.products.choose(measure(kernels, grads), range(4), new=range(4))
    assert preconditioner.products.bits == {0: precision, 1: FLOAT32, 2: HALF, 3: HALF}
    grads[3] = grads[3].t().contiguous().t()  # type: ignore[union-attr]
    preconditioner.products.choose(measure(kernels, grads), range(4), new=())
    assert preconditioner.products.bits[3] == FLOAT32  # kernels read only plain matrices


def test_precisions_change_with_hysteresis() -> None:
    """A cheaper precision must meet half the tolerance, and the current one all of it."""

    def choices(before: int) -> list[int]:
        angles = (0.2, 0.4, 0.6, 10.0, 20.0)
        return [_least_bits(math.cos(math.radians(angle)), before) for angle in angles]

    assert choices(HALF) == [HALF, HALF, BF16X3, BF16X3, FLOAT32]
    assert choices(BF16X3) == [HALF, BF16X3, BF16X3, BF16X3, FLOAT32]
    assert choices(FLOAT32) == [HALF, BF16X3, BF16X3, FLOAT32, FLOAT32]
    assert _least_bits(math.nan, HALF) == FLOAT32


@slow
def test_gradients_at_unaligned_addresses_give_the_same_result(kernels: torch.device) -> None:
    """Rows whose length is a multiple of 8 are read and written wide if they are aligned."""
    preconditioner = make_preconditioner(
        kernels, shapes=[(64, 128)], storage="compact", max_order=64
    )
    preconditioner.products.bits = {0: HALF}
    G, results = torch.randn(64, 128), []
    for shift in (0, 1):
        grad = torch.zeros(64 * 128 + 8, device=kernels)[shift : shift + 64 * 128].view(64, 128)
        grad.copy_(G)
        step = measure(kernels, [grad])
        assert step.addresses is not None
        assert step.addresses.aligned == (shift == 0)
        preconditioner.precondition(step)
        results.append(grad)
    (tables,) = preconditioner.products._grouped.values()
    assert all(chunk.wide for wave in tables._tables.waves for chunk in wave.chunks)
    assert torch.equal(*results)
    assert not torch.equal(results[0].cpu(), G)


@slow
@pytest.mark.parametrize("algorithm", [Shampoo, CASPR])
@pytest.mark.parametrize("bits", [4, 32])
@pytest.mark.parametrize(
    ("workspace", "size", "dtypes"),
    [(2**21, 1.0, SINGLE), (2**16, 1e-9, SINGLE), (2**16, 1e9, SINGLE), (2**16, 1e-9, ALL_BF16)],
)
def test_precisions_keep_their_tolerances(
    algorithm: Any,
    bits: int,
    workspace: int,
    size: float,
    dtypes: list[torch.dtype],
    kernels: torch.device,
) -> None:
    """Rows have 64 or 66 codes, matrices have several blocks, and numbers have any scale."""
    preconditioner = make_preconditioner(kernels, algorithm, bits=bits, workspace=workspace)
    for factors in (
        factors for group in preconditioner.stacks.groups for factors in (group.left, group.right)
    ):
        for name in ("root", "root_scales", "root_diagonal"):
            if name in factors.tensors:
                factors.tensors[name] *= size**-0.25
    G = [size * grad for grad in gradients(kernels, dtypes)]
    actual: dict[int, list[Tensor]] = {}
    for choice in (FLOAT32, BF16X3, HALF):
        preconditioner.products.bits = dict.fromkeys(range(4), choice)
        actual[choice] = [grad.clone() for grad in G]
        preconditioner.precondition(measure(kernels, actual[choice]))
    step = measure(kernels, G)
    assert step.addresses is not None
    half, precise = (
        preconditioner.products._precision(choice, step.addresses) for choice in (HALF, BF16X3)
    )
    tables = preconditioner.products._tables((precise, frozenset(range(4)), frozenset()))
    sums = tables.compare(step.addresses, step.norms, half).double().cpu()
    direct = dtypes is ALL_BF16 and algorithm is Shampoo
    assert any(precision.direct for precision, *_ in preconditioner.products._grouped) == direct
    for i, exact in enumerate(actual[FLOAT32]):
        assert relative_error(actual[BF16X3][i], exact) < (3e-4 if dtypes is SINGLE else 1e-2)
        assert relative_error(actual[HALF][i], exact) < 1e-2  # the interpreter truncates to bf16
        ab, aa, bb = sums[i].tolist()
        assert ab / (aa * bb) ** 0.5 > math.cos(math.radians(0.5))
        # ‖G‖ / ‖Ĝ‖, with the more accurate a as Ĝ
        ratio = float(step.norms[i]) / aa**0.5
        assert ratio == pytest.approx(float(preconditioner.stacks.graft_ratio[i]), rel=1e-2)


@slow
def test_one_table_serves_parameters_that_lose_their_gradient(kernels: torch.device) -> None:
    """Kernels skip parameters without a gradient. torch handles those that kernels cannot read."""
    preconditioner = make_preconditioner(kernels)
    preconditioner.products.bits = dict(enumerate((HALF, BF16X3, HALF, HALF)))
    guard = NonfiniteGuard(kernels, PASS)
    for missing, transposed in ((None, None), (2, None), (None, 3), (0, 3)):
        grads: list[Tensor | None] = list(gradients(kernels, MIXED))
        if transposed is not None:
            grads[transposed] = grads[transposed].t().contiguous().t()  # type: ignore[union-attr]
        before = [grad.clone() for grad in grads if grad is not None]
        missing_grad = None
        if missing is not None:
            missing_grad, grads[missing] = grads[missing], None
        extra = torch.ones(5, device=kernels)  # left to F
        step = measure(kernels, [*grads, extra], guard)
        exact = tuple(i for i in range(4) if i != missing)
        preconditioner.precondition(step)
        reference = [None if i == missing else before[i].clone() for i in range(4)]
        preconditioner._precondition_exactly(exact, reference, step.norms[:4], step.finite[:4])
        for i in exact:
            assert angle(grads[i], reference[i]) < 0.5  # type: ignore[arg-type]
            assert angle(grads[i], before[i]) > 1  # type: ignore[arg-type]
        assert missing_grad is None or torch.equal(missing_grad, before[missing])  # type: ignore[index]
        assert torch.equal(extra, torch.ones_like(extra))


@slow
def test_tables_follow_common_properties_of_gradients(kernels: torch.device) -> None:
    """If all gradients are bf16, they are multiplied in place. Later ones may have other dtypes."""
    preconditioner = make_preconditioner(kernels)
    preconditioner.products.bits = dict.fromkeys(range(4), HALF)
    guard = NonfiniteGuard(kernels, PASS)
    for dtypes, tables in ((ALL_BF16, 1), (SINGLE, 2), (ALL_BF16, 2), (MIXED, 2)):
        grads = gradients(kernels, dtypes)
        reference: list[Tensor | None] = [grad.clone() for grad in grads]
        step = measure(kernels, grads, guard)
        preconditioner._precondition_exactly((0, 1, 2, 3), reference, step.norms, step.finite)
        preconditioner.precondition(step)
        assert max(map(angle, grads, reference)) < 0.5  # type: ignore[arg-type]
        assert len(preconditioner.products._grouped) == tables


@slow
def test_waves_that_do_not_fit_are_computed_twice_with_the_same_result(
    kernels: torch.device,
) -> None:
    results = []
    for workspace in (2**21, 2**16):
        torch.manual_seed(0)
        preconditioner = make_preconditioner(kernels, workspace=workspace)
        preconditioner.products.bits = dict.fromkeys(range(4), HALF)
        grads = gradients(kernels, SINGLE)
        preconditioner.precondition(measure(kernels, grads))
        results.append(grads)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("workspace", [2**12, 2**15, 2**16, 2**21])
@pytest.mark.parametrize("precision", [(True, False), (False, False), (False, True)])
def test_blocks_that_are_held_together_never_share_memory(
    workspace: int, precision: tuple[bool, bool]
) -> None:
    """Blocks of a chunk share no scratch. Blocks that await grafting share no held memory."""
    from kronbit.gpu.precision import Precision
    from kronbit.gpu.tables import held_size, make_tables
    from kronbit.kernels.grouped import LEFT

    preconditioner = make_preconditioner(torch.device("cpu"), workspace=workspace)
    chosen = Precision(*precision)
    tables = make_tables(preconditioner.stacks, range(4), chosen, ())
    lines = iter(tables.lines.tolist())
    for wave in tables.waves:
        held: list[int] = []
        for chunk in wave.chunks:
            scratch: list[int] = []
            held = held if wave.fits else []  # otherwise, a chunk is written at once
            for block in chunk.blocks:
                start = next(lines)[LEFT]
                scratch += range(start, start + block.scratch(chosen))
                start = tables.offsets[block]
                held += range(start, start + held_size(block))
            assert len(set(scratch)) == len(scratch)
            assert max(scratch) < tables.scratch
            assert len(set(held)) == len(held)
            assert max(held) < tables.held
    assert next(lines, None) is None


@slow
def test_a_dropped_preconditioner_is_freed_at_once(kernels: torch.device) -> None:
    """Stacks are large, so they must be freed without waiting for garbage collection."""
    preconditioner = make_preconditioner(kernels)
    preconditioner.products.bits = dict.fromkeys(range(4), HALF)
    grads = gradients(kernels, SINGLE)
    preconditioner.precondition(measure(kernels, grads))
    reference = weakref.ref(preconditioner)
    gc.disable()
    try:
        del preconditioner
        assert reference() is None
    finally:
        gc.enable()


def test_addresses_are_written_only_when_they_change(
    kernels: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = AddressTable(2, kernels)
    a, b = torch.zeros(8, device=kernels), torch.zeros(8, device=kernels)
    single, all_bf16 = {torch.float32}, {torch.bfloat16}
    pointers = [a.data_ptr(), b.data_ptr()]
    table.fill([a, b], single)
    assert table.tensor.tolist() == pointers
    version = table.tensor._version
    table.fill([a, b], single)
    assert table.tensor._version == version
    table.fill([a.view(torch.bfloat16), b.view(torch.bfloat16)], all_bf16)
    assert table.tensor.tolist() != pointers
    assert table.all_bf16
    table.fill([a, None], single)
    assert table.tensor.tolist() == [pointers[0], 0]
    with monkeypatch.context() as patch:
        patch.setattr(addresses, "_sendable", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            table.fill([b, a], single)
    table.fill([b, a], single)
    assert table.tensor.tolist() == pointers[::-1]


def test_norms_are_measured_and_nonfinite_gradients_are_zeroed(kernels: torch.device) -> None:
    grads: list[Tensor | None] = [
        torch.randn(40_000, device=kernels),
        None,
        torch.randn(3, 5, device=kernels).bfloat16(),
        torch.full((7,), torch.inf, device=kernels).half(),
        torch.tensor(2.0, device=kernels),
    ]
    step = measure(kernels, grads)
    assert step.by_kernels
    expected = [0.0 if g is None else float(g.double().norm()) for g in grads]
    assert step.norms.tolist() == pytest.approx(expected, rel=1e-6)
    originals = [None if g is None else g.clone() for g in grads]
    measure(kernels, grads, NonfiniteGuard(kernels, Config(nonfinite="zero")))
    for i, (grad, before) in enumerate(zip(grads, originals, strict=True)):
        if grad is not None and before is not None:
            assert torch.equal(grad, torch.zeros_like(grad) if i == 3 else before)


@slow
def test_kernels_and_torch_count_the_same_skipped_gradients(
    kernels: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_kernels, by_torch = NonfiniteGuard(kernels, PASS), NonfiniteGuard(kernels, PASS)
    for bad in (torch.nan, torch.inf, 1e30, 0.0):
        grads: list[Tensor | None] = [
            torch.randn(6_000_000 if bad == 0 else 40_000, device=kernels),
            torch.randn(7, device=kernels).bfloat16(),
            None,
            torch.empty(0, device=kernels),
        ]
        grads[0][-1] = grads[1][3] = bad  # type: ignore[index]
        actual = measure(kernels, grads, by_kernels)
        assert actual.by_kernels
        with monkeypatch.context() as patch:
            patch.setattr(guard, "why_not", lambda device: "a test")
            expected = measure(kernels, grads, by_torch)
        assert not expected.by_kernels
        assert actual.finite.dtype == torch.bool
        assert actual.finite.tolist() == expected.finite.tolist()
        assert actual.norms[2:].tolist() == [0, 0]
        if bad == 0:
            exact = [0.0 if g is None else float(g.double().norm()) for g in grads]
            assert actual.norms.tolist() == pytest.approx(exact, rel=1e-6)
    assert int(by_kernels.skipped) == int(by_torch.skipped) == 6
    broken = [torch.full((3,), torch.nan, device=kernels)]
    raising = NonfiniteGuard(kernels, Config(nonfinite="raise"))
    assert raising.measure(broken, [3], [1], {torch.float32}).finite.tolist() == [False]
    assert int(raising.skipped) == 0
