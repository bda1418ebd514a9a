"""The choice between torch and kernels for the math on factors, made only here.

``torch_backend`` is the contract, on every device. ``triton_backend`` computes the same with Triton
kernels. Both are modules with the functions of ``Backend``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from kronbit.kernels.guard import has_kernels
from kronbit.kernels.polynomial import Polynomial
from kronbit.linalg import torch_backend

if TYPE_CHECKING:
    from kronbit.kernels.cholesky import Chain
    from kronbit.kernels.split import Split

# A stack of float32 matrices (k, rows, columns) that is multiplied: the tensor itself, or, for
# kernels, its two float16 parts. Transposed by ``.mT``; in float32 by ``.float()``.
Operand: TypeAlias = "Tensor | Split"


class Backend(Protocol):
    """Functions on stacks of float32 matrices on one device.

    Q and D quantise and restore; R is the mapping of the quantiser, b its bits.

    Attributes:
        by_kernels: True if kernels do the work. Then operands are copies of the matrices, which may
            be overwritten, and rows of different orders may share a launch.
    """

    by_kernels: bool

    def operand(self, X: Tensor, bound: Tensor | float | None = None) -> Operand:
        """See ``products.operand``."""

    def multiply(
        self, A: Any, B: Any, C: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0, *,
        symmetric: bool = False, triangular: bool = False, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See ``products.multiply``."""

    def compose(
        self, A: Any, B: Any, C: Any = None, alpha: float = 1.0, beta: float = 1.0, *,
        symmetric: bool = False, bound: Tensor | None = None,
    ) -> Operand:  # fmt: skip
        """Multiply and add as ``multiply`` does; the result is an operand of the next product.

        C may be an operand stored by rows. No element of the result is much larger than ``bound``:
        (k,), or 1 for all matrices.
        """

    def scale_rows(self, X: Any, factors: Tensor, largest: Tensor) -> Operand:
        """Return diag(factors) X.

        Args:
            X: (k, n, n), nearly orthogonal, by rows.
            factors: (k, n), not negative.
            largest: (k,), the largest factor of each matrix.
        """

    def correction(self, Q: Any) -> tuple[Operand, Tensor]:
        """Return the factor that squares the error of a nearly orthonormal Q: Q ← Q (I - U).

        With QᵀQ = I + E and U + Uᵀ = E, the Gram matrix of Q (I - U) is I + O(E²). U is the upper
        triangle of E with its diagonal halved, so Q (I - U) still comes from a QR decomposition.

        Args:
            Q: (k, m, n), by rows.

        Returns:
            I - U, and (k, parts) that add up to the squared elements of E on and above its
            diagonal.
        """

    def normalise_columns(self, X: Tensor) -> Operand:
        """Divide the columns of a contiguous stack by their lengths. Zero stays zero.

        The stack may be overwritten.
        """

    def column_dots(self, X: Tensor, Y: Tensor) -> Tensor:
        """Return the dot products of the columns of X and Y, (k, n). Y may be overwritten."""

    def norms(self, A: Tensor, least: int) -> tuple[Tensor, Tensor]:
        """Return ‖A‖_F of each matrix of a contiguous stack, and the next power of two; (k,).

        That power is 2 for a zero matrix, and no smaller than 2^least.
        """

    def add_ridge_(
        self, A: Tensor, largest: Tensor, norm: Tensor, s: Tensor, ridge: float, least: float,
        orders: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Add a ridge to the diagonals of a contiguous stack (k, n, n); 1 for zero matrices.

        Args:
            A: The stack.
            largest: (k,), eigenvalues of A / s.
            norm: (k,), of A.
            s: (k,).
            ridge: The ridge, relative to the largest eigenvalue of A.
            least: The least ridge, relative to the norm.
            orders: int32 (k,), the orders before padding. Padding need not be touched.
        """

    def power_iteration(self, A: Tensor, factors: Tensor, steps: int, unscaled: int) -> Tensor:
        """See ``roots.power_iteration``. ``unscaled`` steps run between two normalisations."""

    def room(self, k: int, n: int, device: torch.device) -> Tensor:
        """Allocate float32 matrices (k, n, n) with enough storage for ``evaluate`` to work in."""

    def evaluate(
        self, polynomial: Polynomial, A: Tensor, s: Tensor, scale: Tensor,
        orders: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Evaluate a polynomial of A / s.

        Args:
            polynomial: The products.
            A: (k, n, n), symmetric, contiguous. All of its storage may be overwritten; the storage
                is large enough if it comes from ``room``.
            s: (k,), powers of two that no element of A exceeds.
            scale: (k,), factors of the results.
            orders: int32 (k,), the orders before padding: kernels see zeros beyond them.

        Returns:
            (k, n, n); NaN where the check has failed; undefined beyond the orders.
        """

    def chain(self, device: torch.device, graphs: bool) -> Chain | None:
        """Return an object that launches repeated factorisations, as CUDA graphs if allowed."""

    def cholesky_(self, A: Tensor, chain: Chain | None = None) -> tuple[Tensor, Tensor]:
        """Return the lower triangular C with A = C Cᵀ.

        Args:
            A: (k, n, n), symmetric, float32, contiguous; may be overwritten.
            chain: Launches factorisations that are repeated, if kernels do them.

        Returns:
            C: (k, n, n), zero above the diagonal.
            good: bool (k,): False where a pivot was not positive. C is not usable there.
        """

    def whitened(
        self, X: Tensor, room: Tensor | None, least: float, limit: float, chain: Chain | None
    ) -> Operand:
        """Return X R⁻¹ with Rᵀ R = Xᵀ X, for X with columns of length 1; NaN where this fails.

        Rounding errors grow with the condition number, and pivots near zero consist of nothing
        else. Columns with these pivots are postponed: they are made orthogonal to the others, but
        not to each other. The result is better conditioned, and a second pass, where R⁻¹ is large,
        does the rest.

        Args:
            X: (k, m, n), contiguous; may be overwritten.
            room: (k, n, n) that may be overwritten; it may be X itself.
            least: The least pivot of the first pass.
            limit: The largest element of R⁻¹ up to which one pass is enough.
            chain: Launches factorisations, if given.
        """

    def shifted(self, X: Tensor, room: Tensor | None, shift: float) -> Tensor:
        """Whiten in one pass, with Rᵀ R = Xᵀ X + shift I."""

    def encode_rows(
        self, X: Tensor, diagonal: bool, bits: int, mapping: str, block_size: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Q by rows: return codes, scales and diagonal of a stack, which may be overwritten.

        If ``diagonal`` is true, the diagonal is taken out, and zeros are quantised in its place.
        """

    def decode_rows(
        self, codes: Tensor, scales: Tensor, diagonal: Tensor | None, bits: int, mapping: str,
        block_size: int,
    ) -> Tensor:  # fmt: skip
        """D by rows: return a new stack (k, n, n), with the given diagonal, if any."""

    def operand_of_rows(
        self, stacks: Sequence[tuple[Tensor, Tensor]], order: int, bits: int, mapping: str,
        block_size: int,
    ) -> Operand:  # fmt: skip
        """D by rows: return stacks as one operand, joined as by ``torch_backend.joined``."""

    def encode_triangle(
        self, X: Tensor, triangle: bool, bits: int, mapping: str, block_size: int, tiled: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Q: return codes, codes of the scales (k, blocks), and scales of the scales.

        Args:
            X: (k, n, n), which may be transposed.
            triangle: True if only elements below the diagonal count.
            bits: b, below 32.
            mapping: R.
            block_size: Elements of a block.
            tiled: True if blocks are rows of square tiles; else of the matrix.
        """

    def decode_triangle(
        self, codes: Tensor, scales: Tensor, tops: Tensor, diagonal: Tensor | None, mirrored: bool,
        bits: int, mapping: str, block_size: int, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """D: restore the result of ``encode_triangle``.

        Args:
            codes: (k, tiles, block, bytes), or (k, n, bytes) by rows.
            scales: Codes of the scales, (k, blocks).
            tops: Scales of the scales.
            diagonal: (k, n) of a triangle; ``None`` for a square matrix.
            mirrored: True if the upper triangle is the mirrored lower one; else it is zero.
            bits: b, below 32.
            mapping: R.
            block_size: Elements of a block.
            out: Receives the result (k, n, n), if given; its rows need not be contiguous.
        """

    def replace_rows_(self, old: Sequence[Tensor], new: Sequence[Tensor], accepted: Tensor) -> None:
        """Copy accepted rows of new tensors over old ones. Allocates nothing.

        Kernels also refuse rows that are not finite, and set ``accepted``, bool (rows,), to False
        for these.
        """


def backend(where: torch.device | Operand) -> Backend:
    """Return the backend that a device uses now, or the one that made an operand.

    Call this at each use, because kernels may be turned off in between.
    """
    if isinstance(where, Tensor) or (isinstance(where, torch.device) and not has_kernels(where)):
        return torch_backend
    from kronbit.linalg import triton_backend

    return triton_backend
