"""Products of stacks of float32 matrices at float32 accuracy."""

from __future__ import annotations

from torch import Tensor

from kronbit.linalg.backend import Operand, backend


def operand(X: Tensor, bound: Tensor | float | None = None) -> Operand:
    """Prepare a float32 stack for products. Kernels split it into two float16 parts.

    No element is much larger than ``bound``, which is (k,), or 1 for nearly orthogonal matrices. If
    ``bound`` is None, the largest elements are measured.
    """
    return backend(X.device).operand(X, bound)


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
    """Multiply and add: alpha A B + beta C, (k, m, n), float32.

    Args:
        A: (k, m, depth).
        B: (k, depth, n).
        C: (k, m, n), or None.
        alpha: Factor of the product.
        beta: Factor of C.
        symmetric: The result is known to be symmetric: half of it need not be computed.
        triangular: A is lower triangular and B upper triangular: zeros need not be multiplied.
        out: Contiguous, receives the result; it may be C, but neither A nor B.
    """
    assert isinstance(A, Tensor) == isinstance(B, Tensor), "both operands have the same backend"
    return backend(A).multiply(
        A, B, C, alpha, beta, symmetric=symmetric, triangular=triangular, out=out
    )
