"""Kernels read and write gradients in channels-last order in place, or leave them to torch."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.numerics import relative_error, slow
from support.preconditioners import PASS, make_preconditioner, measure
from torch import Tensor

from kronbit.blocks.batches import UPDATE, batches, due_parts
from kronbit.blocks.blocking import Blocking, route
from kronbit.blocks.gradients import GradientBlocks
from kronbit.blocks.groups import Due
from kronbit.config import Config
from kronbit.linalg.precision import BF16X3, HALF
from kronbit.statistics import GradientStatistics
from kronbit.statistics.gradients import _by_torch as gradients_by_torch
from kronbit.step.nonfinite import NonfiniteGuard

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore:(invalid value|overflow encountered):RuntimeWarning"),
    pytest.mark.bf16_products,
]

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
    double = torch.randn(4, 4, device=kernels, dtype=torch.float64)
    both = {torch.float32, torch.float64}
    actual = guard.measure([last, double], [600, 16], [20, 1], both)
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
