"""Recipes: products of symmetric matrices, one after the other, each of what earlier ones gave."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kronbit.acceleration import has_kernels
from kronbit.products import compose


class Line(NamedTuple):
    """One product: alpha A B + beta C + diagonal I.

    Attributes:
        A: Left operand: the number of the line that gives it, from 1 on; 0 is the first matrix.
        B: Right operand.
        C: What is added, or nothing.
        alpha: Factor of the product.
        beta: Factor of C.
        diagonal: Added to the diagonal.
        bound: No element of the result is larger by far.
    """

    A: int
    B: int
    C: int | None = None
    alpha: float = 1.0
    beta: float = 1.0
    diagonal: float = 0.0
    bound: float = 1.0

    def operands(self) -> set[int]:
        """What it reads."""
        return {self.A, self.B} | ({self.C} if self.C is not None else set())


class Recipe(NamedTuple):
    """Products that begin with one matrix.

    All results are polynomials of it: they are symmetric, and half of each need not be computed.

    Attributes:
        lines: The products. The last one, which adds nothing, gives the recipe's result; those of
            all others are used.
        checked: The line that adds a C which must be close to I. No later one reads it.
        tolerance: No element of C - I may be larger.
    """

    lines: tuple[Line, ...]
    checked: int
    tolerance: float

    def last_uses(self) -> dict[int, int]:
        """By the number of a matrix: the last line that reads it."""
        return {number: i for i, line in enumerate(self.lines, 1) for number in line.operands()}


def room(k: int, n: int, device: torch.device) -> Tensor:
    """Room for matrices (k, n, n) in float32 that begin a recipe."""
    if not has_kernels(device):
        return torch.empty(k, n, n, dtype=torch.float32, device=device)
    from kronbit.kernels import recipes

    return recipes.room(k, n, device)


def follow(
    recipe: Recipe, A: Tensor, s: Tensor, scale: Tensor, orders: Tensor | None = None
) -> Tensor:
    """Follow a recipe from A / s.

    Args:
        recipe: What is multiplied.
        A: (k, n, n), symmetric, float32, contiguous; given away, and so is all of its storage,
            which is large enough if it comes from ``room``.
        s: (k,), powers of two that no element of A exceeds.
        scale: (k,), which results are multiplied with.
        orders: int32 (k,): what is beyond is of no interest; kernels find zeros there.

    Returns:
        (k, n, n); NaN where the check has failed; undefined beyond the orders.
    """
    if has_kernels(A.device):
        from kronbit.kernels import recipes

        return recipes.follow(recipe, A, s, scale, orders)
    last_uses = recipe.last_uses()
    held = {0: A.div_(s[:, None, None])}
    del A
    good = torch.ones_like(scale, dtype=torch.bool)
    for number, line in enumerate(recipe.lines, 1):
        C = None if line.C is None else held[line.C]
        found = compose(
            held[line.A],
            held[line.B],
            C,
            alpha=line.alpha,
            beta=line.beta,
            symmetric=True,
        )
        assert isinstance(found, Tensor), "without kernels, operands are tensors"
        found.diagonal(dim1=-2, dim2=-1).add_(line.diagonal)
        held[number] = found
        if number == recipe.checked and C is not None:
            C.diagonal(dim1=-2, dim2=-1).sub_(1)  # its last use
            # A comparison with NaN is False.
            good = torch.linalg.vector_norm(C, ord=torch.inf, dim=(-2, -1)) < recipe.tolerance
        for operand in line.operands():
            if last_uses[operand] == number:
                del held[operand]
        del C
    (result,) = held.values()
    return result.mul_(scale.masked_fill(~good, torch.nan)[:, None, None])
