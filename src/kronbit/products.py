"""Products of stacks of float32 matrices at float32 accuracy: torch's, or a kernel's."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from kronbit.acceleration import has_kernels

if TYPE_CHECKING:
    from kronbit.kernels.matmul import Split

# A stack that is about to be multiplied, maybe several times. Transposed by ``.mT``.
Operand: TypeAlias = "Tensor | Split"


def operand(X: Tensor, bounded: bool = False) -> Operand:
    """Prepare a float32 stack (k, m, n) for products; a kernel takes it apart here, once.

    Args:
        X: The stack.
        bounded: No element is far above 1, as in matrices that are nearly orthogonal: their size
            need not be looked for.
    """
    if not has_kernels(X.device):
        return X
    from kronbit.kernels.matmul import split

    return split(X, bounded)


def multiply(
    A: Operand,
    B: Operand,
    C: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    symmetric: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply and add: alpha A B + beta C.

    Args:
        A: (k, m, depth).
        B: (k, depth, n).
        C: (k, m, n), or nothing.
        alpha: Factor of the product.
        beta: Factor of C.
        symmetric: The result is known to be symmetric: half of it need not be computed.
        out: Takes the result, contiguous; it may be C, but neither A nor B.

    Returns:
        The result (k, m, n), float32.
    """
    if not isinstance(A, Tensor):
        from kronbit.kernels import matmul

        assert not isinstance(B, Tensor), "both operands are on the same device"
        return matmul.multiply(A, B, C, alpha, beta, symmetric, out)
    assert isinstance(B, Tensor), "both operands are on the same device"
    if C is None:
        product = torch.bmm(A, B) if out is None else torch.bmm(A, B, out=out)
        return product if alpha == 1 else product.mul_(alpha)
    if out is None:
        return torch.baddbmm(C, A, B, beta=beta, alpha=alpha)
    return torch.baddbmm(C, A, B, beta=beta, alpha=alpha, out=out)
