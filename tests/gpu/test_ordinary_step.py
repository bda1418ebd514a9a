"""Kernels of the ordinary step against the torch reference: norms, products, grafting."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.numerics import angle, relative_error, slow
from torch import Tensor

from kronbit import CASPR, Shampoo
from kronbit.blocks.batches import UPDATE, batches, due_parts
from kronbit.blocks.blocking import Blocking, route
from kronbit.blocks.gradients import GradientBlocks, plain_dtypes
from kronbit.blocks.groups import Due, Member
from kronbit.config import Config
from kronbit.factors import Factors
from kronbit.gpu.measured import Measured
from kronbit.gpu.product_precision import BF16X3, FLOAT32, HALF, _least_bits
from kronbit.kernels import guard
from kronbit.statistics import GradientStatistics
from kronbit.statistics.gradients import _by_torch as gradients_by_torch
from kronbit.step.nonfinite import NonfiniteGuard
from kronbit.step.preconditioner import Preconditioner

pytest.importorskip("triton")
from kronbit.gpu import addresses
from kronbit.gpu.addresses import AddressTable

pytestmark = [
    pytest.mark.filterwarnings("ignore:(invalid value|overflow encountered):RuntimeWarning"),
    pytest.mark.bf16_products,
]

# Rows of (12, 64) and (75, 40) are wide (read 16 bytes at a time): in bf16, they are multiplied in
# place.
SHAPES = [(20, 66), (12, 64), (2, 10, 24), (75, 40)]
PASS = Config(nonfinite="pass")


def make_preconditioner(
    device: torch.device,
    algorithm: Any = Shampoo,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    workspace: int = 2**21,
    **options: Any,
) -> Preconditioner:
    """Make a preconditioner of several shapes and formats, with roots far from the identity."""
    config = Config(**{"storage": "paper", "max_order": 70, **options})
    members = [Member(route(shape, config), config) for shape in shapes]
    preconditioner = Preconditioner(members, algorithm.algorithm, workspace, False, device)
    for group in preconditioner.stacks.groups:
        for factors in (group.left, group.right):
            A = torch.randn(factors.rows, factors.order, factors.order) / factors.order**0.5
            for name, leaf in factors.method.root.encode(
                (A @ A.mT + torch.eye(factors.order)).to(device)
            ).items():
                factors.tensors[name].copy_(leaf)
    preconditioner.find_refreshed(range(len(shapes)))
    return preconditioner


def measure(
    device: torch.device, grads: Sequence[Tensor | None], guard: NonfiniteGuard | None = None
) -> Measured:
    """Measure gradients as a step does."""
    sizes = [0 if grad is None else grad.numel() for grad in grads]
    taps = [1 if grad is None else math.prod(grad.shape[2:]) for grad in grads]
    dtypes = plain_dtypes([grad for grad in grads if grad is not None])
    return (guard or NonfiniteGuard(device, PASS)).measure(grads, sizes, taps, dtypes)


def gradients(device: torch.device, dtypes: list[torch.dtype]) -> list[Tensor]:
    return [
        torch.randn(shape).to(device=device, dtype=dtype)
        for shape, dtype in zip(SHAPES, dtypes, strict=True)
    ]


SINGLE = [torch.float32] * 4
MIXED = [torch.float32, torch.bfloat16, torch.float16, torch.float32]
ALL_BF16 = [torch.bfloat16] * 4


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
    """Random gradients permit float16. Gradients along the smallest gain of dense roots may not."""
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


# Some blocks of order 70 are read wide. Others begin and end between the taps of an input.
CONVOLUTIONS = [(75, 8, 2, 2), (20, 9, 3, 3), (8, 6, 2, 3, 2), (16, 24), (24, 9, 1, 1)]


def in_both_orders(
    device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor]]:
    """Make gradients of convolutions and matrices, contiguous and in channels-last order."""
    plain = [torch.randn(shape).to(device=device, dtype=dtype) for shape in CONVOLUTIONS]
    channels_last = [
        grad.movedim(1, -1).contiguous().movedim(-1, 1) if grad.dim() > 2 else grad.clone()
        for grad in plain
    ]
    assert [grad.is_contiguous() for grad in channels_last] == [False] * 3 + [True] * 2
    return plain, channels_last


@slow
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (HALF, torch.bfloat16),
        (BF16X3, torch.float32),
        (HALF, torch.float32),
        (BF16X3, torch.bfloat16),
    ],
)
def test_channels_last_gradients_are_read_and_written_in_place(
    precision: int, dtype: torch.dtype, kernels: torch.device
) -> None:
    preconditioner = make_preconditioner(kernels, shapes=CONVOLUTIONS)
    preconditioner.products.bits = dict.fromkeys(range(5), precision)
    plain, channels_last = in_both_orders(kernels, dtype)
    before = [grad.clone() for grad in plain]
    for grads in (plain, channels_last):
        step = measure(kernels, grads)
        assert step.by_kernels
        assert step.addresses is not None
        assert step.addresses.aligned
        assert step.addresses.channels_last == ({0, 1, 2} if grads is channels_last else set())
        preconditioner.precondition(step)
    for grad, expected, start in zip(channels_last, plain, before, strict=True):
        # The norm is summed in another order; contiguous bf16 gradients are multiplied in place.
        near = 1e-6 if dtype == torch.float32 else 0.01
        assert relative_error(grad.float(), expected.float()) < near
        assert relative_error(grad.float(), start.float()) > 0.1
    # Contiguous gradients are still read wide.
    wide = {
        (key[2], block.member): chunk.wide
        for key, tables in preconditioner.products._grouped.items()
        for wave in tables._tables.waves
        for chunk in wave.chunks
        for block in chunk.blocks
    }
    assert wide[frozenset(), 0]
    assert wide[frozenset({0, 1, 2}), 3]
    assert not wide[frozenset({0, 1, 2}), 0]


@slow
def test_statistics_of_channels_last_gradients_have_the_same_bits(kernels: torch.device) -> None:
    preconditioner, statistics = (
        make_preconditioner(kernels, shapes=CONVOLUTIONS),
        GradientStatistics(),
    )
    due = {i: Due(preconditioner.stacks.members[i].config) for i in range(5)}
    actual = []
    plain, channels_last = in_both_orders(kernels)
    blocks = GradientBlocks(preconditioner.stacks.members, plain)
    for grads in (plain, channels_last):
        measured = measure(kernels, grads)
        outer_products = statistics.outer_products(preconditioner.stacks, measured, due)
        parts = list(
            batches(
                due_parts(preconditioner.stacks.groups, due),
                preconditioner.stacks.workspace,
                UPDATE,
            )
        )
        actual.append([outer_products(part) for part in parts])
    assert all(torch.equal(*pair) for pair in zip(*actual, strict=True))
    for M, part in zip(actual[0], parts, strict=True):
        expected = gradients_by_torch(blocks, measured.finite, part)
        assert (M - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_channels_last_gradients_of_grouped_convolutions_are_preconditioned(
    kernels: torch.device,
) -> None:
    """K-FAC has a matrix per group, and each row of the matrix keeps all taps."""
    preconditioner = make_preconditioner(kernels, shapes=[(2, 12, 36)], batch_dims=1)
    (member,) = preconditioner.stacks.members
    member_with_taps = replace(member, blocking=replace(member.blocking, taps=9))
    preconditioner.products._stacks = copy.copy(preconditioner.stacks)
    preconditioner.products._stacks.members = (member_with_taps,)
    preconditioner.products.bits = {0: HALF}
    plain = torch.randn(24, 4, 3, 3).to(kernels)
    channels_last = plain.to(memory_format=torch.channels_last)
    for grad in (plain, channels_last):
        step = measure(kernels, [grad])
        assert step.by_kernels
        preconditioner.precondition(step)
    assert relative_error(channels_last, plain) < 1e-6


def test_channels_last_gradients_that_kernels_cannot_read_are_left_to_torch(
    kernels: torch.device,
) -> None:
    """Rows of stacked matrices are scattered. Gradients left to the base may have any order."""
    last = torch.randn(3, 10, 4, 5, device=kernels).to(memory_format=torch.channels_last)
    guard = NonfiniteGuard(kernels, PASS)
    for taps, by_kernels in ((1, False), (0, True), (20, True), (1, False)):
        actual = guard.measure([last], [600], [taps], {torch.float32})
        assert actual.by_kernels == by_kernels
        assert float(actual.norms[0]) == pytest.approx(float(last.norm()), rel=1e-6)
        assert actual.addresses is not None
        assert bool(actual.addresses.values[0]) == by_kernels
        assert (actual.addresses.channels_last == {0}) == by_kernels
    # Kernels cannot read the other gradient, which is float64.
    wide = torch.randn(4, 4, device=kernels, dtype=torch.float64)
    both = {torch.float32, torch.float64}
    actual = guard.measure([last, wide], [600, 16], [20, 1], both)
    assert not actual.by_kernels
    assert actual.addresses is not None
    assert actual.addresses.channels_last == {0}
    assert actual.addresses.values[0] == last.data_ptr() + (1 << 59)
    assert actual.addresses.values[1] == 0


def test_taps_count_kernel_positions_unless_rows_are_scattered() -> None:
    def taps(shape: tuple[int, ...], **options: Any) -> int:
        blocking = route(shape, Config(**options))
        assert isinstance(blocking, Blocking)
        return blocking.taps

    assert taps((3, 10, 4, 5)) == 20
    assert taps((3, 10, 2, 4, 5)) == 40
    assert taps((30, 10)) == 1
    # In channels-last order, rows of these are scattered.
    assert taps((3, 10, 4, 5), batch_dims=1) == 1
    assert taps((1, 10, 4, 5)) == 1


@slow
def test_gradients_at_unaligned_addresses_give_the_same_result(kernels: torch.device) -> None:
    """Rows of a multiple of 8 elements are read and written wide if they are aligned."""
    config = Config(max_order=64)
    preconditioner = Preconditioner(
        [Member(route((64, 128), config), config)], Shampoo.algorithm, 2**21, False, kernels
    )
    for group in preconditioner.stacks.groups:
        for factors in (group.left, group.right):
            A = torch.randn(factors.rows, factors.order, factors.order) / factors.order**0.5
            roots = factors.method.root.encode((A @ A.mT + torch.eye(factors.order)).to(kernels))
            for name, leaf in roots.items():
                factors.tensors[name].copy_(leaf)
    preconditioner.find_refreshed(range(1))
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
    """Kernels skip parameters without a gradient. torch handles gradients they cannot read."""
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


@pytest.mark.parametrize(
    ("method", "attempt", "option"),
    [
        ("eigen", 0, {"damping": 0.0}),
        ("eigen", 0, {"beta": 0.0}),
        ("eigen", 0, {"root": "schur_newton"}),
        ("eigen", None, {"trace_scaling": True}),
        ("cholesky", 0, {"beta": 0.0}),
    ],
)
def test_orders_stay_apart_if_padding_would_change_results(
    method: str, attempt: int | None, option: dict[str, Any]
) -> None:
    """A matrix with λ = 0 cannot be padded, and Newton's iteration depends on the whole matrix."""
    for options in ({}, option):
        config = Config(method=method, max_order=100, **options)
        members = [Member(route(shape, config), config) for shape in ((70, 66), (80, 90))]
        preconditioner = Preconditioner(
            members, Shampoo.algorithm, 2**24, False, torch.device("cpu")
        )
        parts = due_parts(preconditioner.stacks.groups, {0: Due(config), 1: Due(config)})
        orders = [
            {part.factors.order for part in batch}
            for batch in batches(
                parts,
                preconditioner.stacks.workspace,
                UPDATE,
                lambda part: part.factors.method.allows_padding(part.config, attempt),
            )
        ]
        assert (max(map(len, orders)) > 1) == (not options)


@pytest.mark.parametrize(("method", "last"), [("eigen", 2), ("cholesky", 1), ("naive", 0)])
def test_orders_do_not_share_a_batch_if_results_depend_on_the_whole_matrix(
    method: str, last: int
) -> None:
    config = Config(method=method, bits=4)
    chosen = Factors(64, 1, config.format(64), 1e-6, "cpu").method
    assert not chosen.allows_padding(config, last)
    assert chosen.allows_padding(config, None) == (method != "naive")
    assert not chosen.allows_padding(replace(config, trace_scaling=True), None)


@pytest.mark.parametrize("mixed", [pytest.param(False, marks=slow), True])
def test_outer_products_read_gradients_in_place(mixed: bool, kernels: torch.device) -> None:
    """Both sides match torch in several dtypes. M is zero where a gradient is not finite."""
    preconditioner = make_preconditioner(kernels)
    grads: list[Tensor | None] = [torch.randn(shape).to(kernels) for shape in SHAPES]
    grads[1] = grads[1].bfloat16()
    grads[2] = None
    grads[3][4, 4] = torch.inf
    finite = torch.tensor([True, True, True, False], device=kernels)
    due = {
        i: Due(member.config) for i, member in enumerate(preconditioner.stacks.members) if i != 2
    }
    measured = measure(kernels, grads)
    statistics = GradientStatistics()
    by_kernels = statistics.outer_products(preconditioner.stacks, measured, due)
    blocks = GradientBlocks(preconditioner.stacks.members, grads)
    count = 0
    orders = []
    for parts in batches(
        due_parts(preconditioner.stacks.groups, due),
        preconditioner.stacks.workspace,
        UPDATE,
        lambda part: mixed,
    ):
        orders.append({part.factors.order for part in parts})
        expected = gradients_by_torch(blocks, finite, parts)
        M = by_kernels(parts)
        assert M.shape == expected.shape
        assert (M - expected).abs().max() <= 1e-6 * expected.abs().max()
        count += len(M)
    assert preconditioner.stacks in statistics._tables
    assert (max(map(len, orders)) > 1) == mixed
    assert count == sum(2 * len(preconditioner.stacks.members[i].blocking) for i in due)
