"""Products of stacks of float32 matrices at float32 accuracy: torch's, or a kernel's.

What is about to be multiplied, maybe several times, is an operand: the stack itself, or, where
there are kernels, its two float16 parts. Chains of products stay operands from end to end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from kronbit.kernels.guard import has_kernels

if TYPE_CHECKING:
    from kronbit.kernels.split import Split

_TINY = 16
_LEAST_EXPONENT = -126  # of float32: what is smaller has lost its bits already

# A stack of matrices (k, rows, columns). Transposed by ``.mT``; in float32 by ``.float()``.
Operand: TypeAlias = "Tensor | Split"


def operand(X: Tensor, bound: Tensor | float | None = None) -> Operand:
    """Prepare a float32 stack for products; a kernel takes it apart here.

    Args:
        X: The stack.
        bound: No element is larger by far: of each matrix, (k,), or 1 of all, as in matrices that
            are nearly orthogonal. If nothing is known, it is looked for.
    """
    if not has_kernels(X.device):
        return X
    from kronbit.kernels.split import split

    return split(X, bound)


def multiply(
    A: Operand,
    B: Operand,
    C: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    symmetric: bool = False,
    triangular: bool = False,
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
        triangular: A is lower triangular and B upper triangular: zeros need not be multiplied.
        out: Takes the result, contiguous; it may be C, but neither A nor B.

    Returns:
        The result (k, m, n), float32.
    """
    if not isinstance(A, Tensor):
        from kronbit.kernels import matmul

        assert not isinstance(B, Tensor), "both operands are on the same device"
        return matmul.multiply(A, B, C, alpha, beta, symmetric, out, triangular=triangular)
    assert isinstance(B, Tensor), "both operands are on the same device"
    if A.dtype == torch.float32 and max(*A.shape[1:], B.shape[-1]) < _TINY:
        # CPUs multiply tiny matrices in a way that depends on where they lie in memory, and so on
        # those that they share a batch with. That ends below float32's last bit.
        wide = multiply(
            A.double(), B.double(), None if C is None else C.double(), alpha=alpha, beta=beta
        )
        return wide.float() if out is None else out.copy_(wide)
    if C is None:
        product = torch.bmm(A, B) if out is None else torch.bmm(A, B, out=out)
        return product if alpha == 1 else product.mul_(alpha)
    if out is None:
        return torch.baddbmm(C, A, B, beta=beta, alpha=alpha)
    return torch.baddbmm(C, A, B, beta=beta, alpha=alpha, out=out)


def compose(
    A: Operand,
    B: Operand,
    C: Operand | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    symmetric: bool = False,
    bound: Tensor | None = None,
) -> Operand:
    """``multiply`` whose result is an operand of the next product.

    Args:
        A: (k, m, depth).
        B: (k, depth, n).
        C: (k, m, n), by rows, or nothing.
        alpha: Factor of the product.
        beta: Factor of C.
        symmetric: The result is known to be symmetric.
        bound: No element of the result is larger by far: of each matrix, (k,), or 1 of all.
    """
    if isinstance(A, Tensor):
        assert C is None or isinstance(C, Tensor), "all operands are on the same device"
        return multiply(A, B, C, alpha=alpha, beta=beta, symmetric=symmetric)
    from kronbit.kernels import matmul

    assert not isinstance(B, Tensor), "both operands are on the same device"
    return matmul.compose(A, B, C, alpha, beta, symmetric, bound)


def scale_rows(X: Operand, factors: Tensor, largest: Tensor) -> Operand:
    """diag(factors) X.

    Args:
        X: (k, n, n), nearly orthogonal, by rows.
        factors: (k, n), not negative.
        largest: (k,), of the factors.
    """
    if isinstance(X, Tensor):
        return X * factors.unsqueeze(-1)
    from kronbit.kernels import split

    return split.scale_rows(X, factors, largest)


def column_dots(X: Tensor, Y: Tensor) -> Tensor:
    """The dot products of the columns of X and Y: (k, m, n) -> (k, n). Y is given away."""
    if not has_kernels(X.device):
        return Y.mul_(X).sum(-2)
    from kronbit.kernels import split

    return split.column_dots(X, Y)


def norms(A: Tensor) -> tuple[Tensor, Tensor]:
    """‖A‖_F of each matrix of a contiguous stack (k, n, n), and the next power of two; (k,).

    Of a zero matrix that is 2; of a tiny one, the least that is a normal float32.
    """
    if has_kernels(A.device):
        from kronbit.kernels import power

        return power.norms(A, _LEAST_EXPONENT)
    # In float32, squares would overflow.
    norm = torch.linalg.vector_norm(A, dim=(-2, -1), dtype=torch.float64)
    exponent = torch.frexp(torch.where(norm == 0, 1.0, norm)).exponent
    return norm.float(), torch.exp2(exponent.clamp_(min=_LEAST_EXPONENT).double()).float()


def add_ridge_(
    A: Tensor,
    largest: Tensor,
    norm: Tensor,
    s: Tensor,
    ridge: float,
    least: float,
    orders: Tensor | None = None,
) -> None:
    """Add to the diagonals of a contiguous stack (k, n, n): 1 to those of zero matrices.

    Args:
        A: The stack.
        largest: (k,), eigenvalues of A / s.
        norm: (k,), of A.
        s: (k,).
        ridge: What is added, relative to the largest eigenvalue of A.
        least: No less than that is added, relative to the norm.
        orders: int32 (k,): how far kernels go; what is beyond is of no interest.
    """
    if has_kernels(A.device):
        from kronbit.kernels import power

        power.add_ridge_(A, largest, norm, s, ridge, least, orders)
        return
    added = torch.maximum(largest * s * ridge, norm * least)
    A.diagonal(dim1=-2, dim2=-1).add_(torch.where(norm == 0, 1.0, added).unsqueeze(-1))


def normalise_columns(X: Tensor) -> Operand:
    """The columns of a contiguous stack, each divided by its length; zero stays zero.

    Args:
        X: (k, m, n), given away.
    """
    if has_kernels(X.device):
        from kronbit.kernels import split

        return split.normalise_columns(X)
    length = torch.linalg.vector_norm(X, dim=-2, keepdim=True)
    return X.div_(torch.where(length == 0, 1.0, length))


def correction(Q: Operand) -> tuple[Operand, Tensor]:
    """What makes a nearly orthonormal Q more so: Q (I - U) is, up to the square of the error.

    With QᵀQ = I + E and U + Uᵀ = E, the Gram matrix of Q (I - U) is I + O(E²). U is the upper
    triangle of E, its diagonal halved: so Q stays what a QR decomposition gives.

    Args:
        Q: (k, m, n), by rows.

    Returns:
        I - U, and (k, parts) that add up to the squared elements of E on and above its diagonal.
    """
    if not isinstance(Q, Tensor):
        from kronbit.kernels import matmul

        return matmul.correction(Q)
    E = torch.bmm(Q.mT, Q)
    E.diagonal(dim1=-2, dim2=-1).sub_(1)
    U = E.triu_()
    error = torch.linalg.vector_norm(U, dim=-1).square()
    U.neg_().diagonal(dim1=-2, dim2=-1).mul_(0.5).add_(1)
    return U, error
