"""Outer products of gradients match torch, and orders share a batch only if it changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.numerics import slow
from support.preconditioners import SHAPES, make_preconditioner, measure
from torch import Tensor

from kronbit import Shampoo
from kronbit.blocks.batches import UPDATE, batches, due_parts
from kronbit.blocks.blocking import route
from kronbit.blocks.gradients import GradientBlocks
from kronbit.blocks.groups import Due, Member
from kronbit.config import Config
from kronbit.factors import Factors
from kronbit.statistics import GradientStatistics
from kronbit.statistics.gradients import _by_torch as gradients_by_torch
from kronbit.step.preconditioner import Preconditioner

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore:(invalid value|overflow encountered):RuntimeWarning"),
    pytest.mark.bf16_products,
]


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
    assert preconditioner.stacks.outer_product_tables is not None
    assert (max(map(len, orders)) > 1) == mixed
    assert count == sum(2 * len(preconditioner.stacks.members[i].blocking) for i in due)
