"""Recipes: products of symmetric matrices, one after the other, each of what earlier ones gave."""

from __future__ import annotations

import torch
from torch import Tensor

from kronbit.kernels.guard import has_kernels
from kronbit.kernels.polynomial import Polynomial
from kronbit.linalg.products import compose


def room(k: int, n: int, device: torch.device) -> Tensor:
    """Room for matrices (k, n, n) in float32 that begin a polynomial."""
    if not has_kernels(device):
        return torch.empty(k, n, n, dtype=torch.float32, device=device)
    from kronbit.kernels import evaluation

    return evaluation.room(k, n, device)


def evaluate(
    polynomial: Polynomial, A: Tensor, s: Tensor, scale: Tensor, orders: Tensor | None = None
) -> Tensor:
    """Evaluate a polynomial of A / s.

    Args:
        polynomial: What is multiplied.
        A: (k, n, n), symmetric, float32, contiguous; given away, and so is all of its storage,
            which is large enough if it comes from ``room``.
        s: (k,), powers of two that no element of A exceeds.
        scale: (k,), which results are multiplied with.
        orders: int32 (k,): what is beyond is of no interest; kernels find zeros there.

    Returns:
        (k, n, n); NaN where the check has failed; undefined beyond the orders.
    """
    if has_kernels(A.device):
        from kronbit.kernels import evaluation

        return evaluation.evaluate(polynomial, A, s, scale, orders)
    last_uses = polynomial.last_uses()
    held = {0: A.div_(s[:, None, None])}
    del A
    good = torch.ones_like(scale, dtype=torch.bool)
    for number, product in enumerate(polynomial.products, 1):
        C = None if product.C is None else held[product.C]
        found = compose(
            held[product.A],
            held[product.B],
            C,
            alpha=product.alpha,
            beta=product.beta,
            symmetric=True,
        )
        assert isinstance(found, Tensor), "without kernels, operands are tensors"
        found.diagonal(dim1=-2, dim2=-1).add_(product.diagonal)
        held[number] = found
        if number == polynomial.checked and C is not None:
            C.diagonal(dim1=-2, dim2=-1).sub_(1)  # its last use
            # A comparison with NaN is False.
            good = torch.linalg.vector_norm(C, ord=torch.inf, dim=(-2, -1)) < polynomial.tolerance
        for operand in product.operands():
            if last_uses[operand] == number:
                del held[operand]
        del C
    (result,) = held.values()
    return result.mul_(scale.masked_fill(~good, torch.nan)[:, None, None])
