"""A polynomial of a symmetric matrix as data: the products that compute it, in order.

Torch and the kernels both read it, so this module does not need Triton.
"""

from __future__ import annotations

from typing import NamedTuple


class Product(NamedTuple):
    """One product: alpha A B + beta C + diagonal I.

    Attributes:
        A: Left operand: the number of its product, from 1 on; 0 is the first matrix.
        B: Right operand.
        C: Matrix that is added, or None.
        alpha: Factor of the product.
        beta: Factor of C.
        diagonal: Number that is added to the diagonal.
        bound: Approximate upper bound of the result's elements.
    """

    A: int
    B: int
    C: int | None = None
    alpha: float = 1.0
    beta: float = 1.0
    diagonal: float = 0.0
    bound: float = 1.0

    def operands(self) -> set[int]:
        """Return the numbers of the matrices that the product reads."""
        return {self.A, self.B} | ({self.C} if self.C is not None else set())


class Polynomial(NamedTuple):
    """Products that start from one symmetric matrix.

    All results are polynomials of this matrix, and so symmetric: half of each is enough.

    Attributes:
        products: The products. The last one, without a C, is the result; all others are used.
        checked: The number of the product whose C must be close to I. No later product reads C.
        tolerance: Upper bound on the magnitudes in C - I.
    """

    products: tuple[Product, ...]
    checked: int
    tolerance: float

    def last_uses(self) -> dict[int, int]:
        """Return the number of each matrix -> the last product that reads it."""
        return {
            number: i for i, product in enumerate(self.products, 1) for number in product.operands()
        }
