"""Math on factors, in torch or by Triton kernels; only this module chooses between the two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from kronbit.kernels import guard
from kronbit.kernels.polynomial import Polynomial
from kronbit.quantization import reference
from kronbit.quantization.reference import CodeFormat

if TYPE_CHECKING:
    from kronbit.kernels.cholesky import Chain
    from kronbit.kernels.split import Split

# A stack of float32 matrices (k, rows, columns) that is multiplied: the tensor itself, or, for
# kernels, its two float16 parts. Transposed by ``.mT``; in float32 by ``.float()``.
Operand: TypeAlias = "Tensor | Split"


class Backend:
    """Functions on stacks of float32 matrices on one device, in torch: the backends' contract.

    Q and D quantise and restore codes of a format.
    """

    # True if kernels do the work. Then operands are copies, so that matrices may be overwritten,
    # and rows of different orders may share a launch.
    by_kernels: ClassVar[bool] = False

    @staticmethod
    def operand(X: Tensor, bound: Tensor | float | None = None) -> Operand:
        """See ``products.operand``."""
        return X

    @staticmethod
    def multiply(
        A: Any,
        B: Any,
        C: Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        *,
        symmetric: bool = False,
        triangular: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """See ``products.multiply``."""
        if A.dtype == torch.float32 and max(*A.shape[1:], B.shape[-1]) < 16:
            # On CPUs, products of tiny matrices depend on their position in memory, and so on the
            # batch. In float64, the difference is below float32's last bit.
            wide = Backend.multiply(
                A.double(), B.double(), None if C is None else C.double(), alpha, beta
            )
            return wide.float() if out is None else out.copy_(wide)
        if C is None:
            product = torch.bmm(A, B, out=out)
            return product if alpha == 1 else product.mul_(alpha)
        return torch.baddbmm(C, A, B, beta=beta, alpha=alpha, out=out)

    @staticmethod
    def compose(
        A: Any,
        B: Any,
        C: Any = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        *,
        symmetric: bool = False,
        bound: Tensor | None = None,
    ) -> Operand:
        """Multiply and add as ``multiply`` does; the result is an operand of the next product.

        C may be an operand stored by rows. No element of the result is much above ``bound``, or 1.
        """
        return Backend.multiply(A, B, C, alpha, beta)

    @staticmethod
    def scale_rows(X: Any, factors: Tensor, largest: Tensor) -> Operand:
        """Return diag(factors) X for X (k, n, n), nearly orthogonal, by rows.

        ``factors``, (k, n), are not negative; ``largest``, (k,), is the largest of each matrix.
        """
        return torch.mul(X, factors.unsqueeze(-1))

    @staticmethod
    def correction(Q: Any) -> tuple[Operand, Tensor]:
        """Return I - U, which squares the error of a nearly orthonormal Q: Q ← Q (I - U).

        With QᵀQ = I + E and U + Uᵀ = E, the Gram matrix of Q (I - U) is I + O(E²). U is the upper
        triangle of E with its diagonal halved, so Q (I - U) still comes from a QR decomposition.
        Q is (k, m, n), by rows. Also return (k, parts), partial sums of squares of the triangle.
        """
        E = torch.bmm(Q.mT, Q)
        E.diagonal(dim1=-2, dim2=-1).sub_(1)
        U = E.triu_()
        error = torch.linalg.vector_norm(U, dim=-1).square()
        U.neg_().diagonal(dim1=-2, dim2=-1).mul_(0.5).add_(1)
        return U, error

    @staticmethod
    def normalise_columns(X: Tensor) -> Operand:
        """Divide the columns of a contiguous stack by their lengths; may overwrite X. 0 stays 0."""
        return X.div_(nonzero(torch.linalg.vector_norm(X, dim=-2, keepdim=True)))

    @staticmethod
    def column_dots(X: Tensor, Y: Tensor) -> Tensor:
        """Return the dot products of the columns of X and Y, (k, n). Y may be overwritten."""
        return Y.mul_(X).sum(-2)

    @staticmethod
    def norms(A: Tensor, least: int) -> tuple[Tensor, Tensor]:
        """Return ‖A‖_F of a contiguous stack, and the next power of two, at least 2^least; (k,).

        For a zero matrix, the power is 2.
        """
        # In float32, squares would overflow.
        norm = torch.linalg.vector_norm(A, dim=(-2, -1), dtype=torch.float64)
        exponent = torch.frexp(nonzero(norm)).exponent
        return norm.float(), torch.exp2(exponent.clamp_(min=least).double()).float()

    @staticmethod
    def add_ridge_(
        A: Tensor,
        largest: Tensor,
        norm: Tensor,
        s: Tensor,
        ridge: float,
        least: float,
        orders: Tensor | None = None,
    ) -> None:
        """Add a ridge to the diagonals of a contiguous stack (k, n, n); 1 for zero matrices.

        The ridge is ``ridge`` times the largest eigenvalue of A, which is ``largest`` times ``s``,
        but at least ``least`` times the norm. Padding beyond ``orders``, (k,), may be skipped.
        """
        added = torch.maximum(largest * s * ridge, norm * least)
        A.diagonal(dim1=-2, dim2=-1).add_(torch.where(norm == 0, 1.0, added).unsqueeze(-1))

    @staticmethod
    def power_iteration(A: Tensor, factors: Tensor, steps: int, unscaled: int) -> Tensor:
        """See ``roots.power_iteration``. ``unscaled`` steps run between two normalisations."""
        start = A.diagonal(dim1=-2, dim2=-1).argmax(-1, keepdim=True)
        # Use two equal vectors. Torch multiplies one matrix by a vector differently than several,
        # but a result must not depend on the matrices that share the batch.
        x = A.new_zeros(*A.shape[:-1], 2).scatter_(-2, start.unsqueeze(-1).expand(-1, 1, 2), 1.0)
        for step in range(1, steps + 1):
            x = torch.bmm(A, x) * factors[:, None, None]
            if step % unscaled == 0:
                x /= nonzero(torch.linalg.vector_norm(x, dim=-2, keepdim=True))
        y = torch.bmm(A, x) * factors[:, None, None]
        x, y = x[..., 0], y[..., 0]
        return (x * y).sum(-1).abs_() / nonzero((x * x).sum(-1))

    @staticmethod
    def evaluation_buffer(k: int, n: int, device: torch.device) -> Tensor:
        """Allocate float32 matrices (k, n, n) with storage that ``evaluate`` can work in."""
        return torch.empty(k, n, n, dtype=torch.float32, device=device)

    @staticmethod
    def evaluate(
        polynomial: Polynomial,
        A: Tensor,
        s: Tensor,
        scale: Tensor,
        orders: Tensor | None = None,
    ) -> Tensor:
        """Evaluate a polynomial of A / s.

        A is (k, n, n), symmetric, contiguous; all of its storage may be overwritten. ``s``, (k,),
        are powers of two that no element of A exceeds. Results are multiplied by ``scale``, (k,).
        They are NaN where the polynomial's check fails, and undefined beyond ``orders``, (k,).
        """
        last_uses = polynomial.last_uses()
        held = {0: A.div_(s[:, None, None])}
        del A
        good = torch.ones_like(scale, dtype=torch.bool)
        for number, line in enumerate(polynomial.products, 1):
            C = None if line.C is None else held[line.C]
            result = Backend.multiply(held[line.A], held[line.B], C, line.alpha, line.beta)
            result.diagonal(dim1=-2, dim2=-1).add_(line.diagonal)
            held[number] = result
            if number == polynomial.checked and C is not None:
                C.diagonal(dim1=-2, dim2=-1).sub_(1)  # its last use
                # A comparison with NaN is False.
                good = (
                    torch.linalg.vector_norm(C, ord=torch.inf, dim=(-2, -1)) < polynomial.tolerance
                )
            for operand in line.operands():
                if last_uses[operand] == number:
                    del held[operand]
            del C
        (result,) = held.values()
        return result.mul_(scale.masked_fill(~good, torch.nan)[:, None, None])

    @staticmethod
    def chain(device: torch.device, graphs: bool) -> Chain | None:
        """Return an object that launches repeated factorisations, as CUDA graphs if allowed."""
        return None

    @staticmethod
    def cholesky_(A: Tensor, chain: Chain | None = None) -> tuple[Tensor, Tensor]:
        """Return the lower triangular C with A = C Cᵀ, for a contiguous A that may be overwritten.

        Also return bool (k,): False where a pivot was not positive, and C is not usable.
        """
        C, info = torch.linalg.cholesky_ex(A)
        return C, info == 0

    @staticmethod
    def whitened(
        X: Tensor, buffer: Tensor | None, least: float, limit: float, chain: Chain | None
    ) -> Operand:
        """Return X R⁻¹ with Rᵀ R = Xᵀ X, for X with columns of length 1; NaN where this fails.

        Rounding errors grow with the condition number, and pivots near zero are rounding errors
        only. Columns with pivots below ``least`` are postponed: they are made orthogonal to the
        others, but not to each other. The result is better conditioned. A second pass follows
        where an element of R⁻¹ exceeds ``limit``. Both X, (k, m, n), contiguous, and ``buffer``,
        (k, n, n), may be overwritten; ``buffer`` may be X itself.
        """
        largest = _whiten_once_(X, least)
        for row, enough in enumerate((largest <= limit).tolist()):  # False for NaN
            if not enough:
                alone = X[row : row + 1].clone()
                _whiten_once_(alone, least)
                X[row : row + 1] = alone
        return X

    @staticmethod
    def shifted(X: Tensor, buffer: Tensor | None, shift: float) -> Tensor:
        """Whiten in one pass, with Rᵀ R = Xᵀ X + shift I."""
        _whiten_once_(X, shift, always=True)
        return X

    @staticmethod
    def encode_rows(
        X: Tensor, diagonal: bool, code_format: CodeFormat
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Q by rows: return codes, scales and diagonal of a stack, which may be overwritten.

        If ``diagonal`` is true, the diagonal is returned, and zeros are quantised in its place.
        """
        diagonals = None
        if diagonal:
            diagonals = X.diagonal(dim1=-2, dim2=-1).clone()
            X.diagonal(dim1=-2, dim2=-1).zero_()
        return *reference.quantize(X, *code_format), diagonals

    @staticmethod
    def decode_rows(
        codes: Tensor, scales: Tensor, diagonal: Tensor | None, code_format: CodeFormat
    ) -> Tensor:
        """D by rows: return a new stack (k, n, n), with the given diagonal unless it is None."""
        X = reference.dequantize(codes, scales, *code_format, codes.shape[-2])
        if diagonal is not None:
            X.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
        return X

    @staticmethod
    def operand_of_rows(
        stacks: Sequence[tuple[Tensor, Tensor]], order: int, code_format: CodeFormat
    ) -> Operand:
        """D by rows: return stacks as one operand, padded and concatenated as by ``joined``."""
        return joined([Backend.decode_rows(*s, None, code_format) for s in stacks], order)

    @staticmethod
    def encode_triangle(
        X: Tensor, triangle: bool, code_format: CodeFormat, tiled: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Q: return codes, codes of the scales (k, blocks), and scales of the scales.

        X is (k, n, n), and may be transposed. If ``triangle`` is true, only elements below the
        diagonal count. Blocks are parts of rows: of square tiles if ``tiled``, else of the matrix.
        """
        if triangle:
            X = lower_tiles(X, code_format.block_size) if tiled else X.tril(-1)
        exact = reference.block_scales(X, code_format.block_size)
        scales, tops = reference.quantize_scales(exact.flatten(1))
        # The codes are nearest for the stored scales, not for the exact ones.
        kept = reference.dequantize_scales(scales, tops).view_as(exact)
        return reference.nearest_codes(X, kept, *code_format), scales, tops

    @staticmethod
    def decode_triangle(
        codes: Tensor,
        scales: Tensor,
        tops: Tensor,
        diagonal: Tensor | None,
        mirrored: bool,
        code_format: CodeFormat,
        out: Tensor | None = None,
    ) -> Tensor:
        """D: restore the result of ``encode_triangle``: ``codes``, ``scales`` and ``tops``.

        Codes are (k, tiles, block, bytes), or (k, n, bytes) by rows. The diagonal, (k, n), is None
        for a square matrix. The upper triangle mirrors the lower one if ``mirrored``, else it is
        zero. ``out`` receives the result (k, n, n); its rows need not be contiguous.
        """
        tiled = codes.dim() == 4
        order = codes.shape[1] if diagonal is None else diagonal.shape[1]
        scales = reference.dequantize_scales(scales, tops).view(*codes.shape[:-1], -1)
        length = code_format.block_size if tiled else order
        X = reference.dequantize(codes, scales, *code_format, length)
        if diagonal is not None:
            X = from_lower_tiles(X, order) if tiled else X
            if mirrored:
                X = X + X.mT  # strictly lower, and strictly upper
            X.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
        return X if out is None else out.copy_(X)

    @staticmethod
    def replace_rows_(old: Sequence[Tensor], new: Sequence[Tensor], accepted: Tensor) -> None:
        """Copy accepted rows of new tensors over old ones. Allocates nothing.

        Kernels also set ``accepted``, bool (rows,), to False where rows are not finite.
        """
        for target, leaf in zip(old, new, strict=True):
            torch.where(accepted.view(-1, *[1] * (leaf.dim() - 1)), leaf, target, out=target)


def backend(where: torch.device | Operand) -> type[Backend]:
    """Return the backend of an operand or of a device: torch where kernels are not used."""
    if isinstance(where, Tensor) or (
        isinstance(where, torch.device) and guard.why_not(where) is not None
    ):
        return Backend
    return _backend_by_kernels()


@cache
def _backend_by_kernels() -> type[Backend]:
    """Return the backend that runs kernels. It imports Triton, which may not be installed."""
    from kronbit.kernels import cholesky, compact, evaluation, matmul, power, quantization, split
    from kronbit.kernels.replacement import replace_rows_ as replace

    class TritonBackend(Backend):
        """Functions on stacks of float32 matrices on one GPU, by kernels."""

        by_kernels = True

        add_ridge_ = staticmethod(power.add_ridge_)
        chain = staticmethod(cholesky.Chain)
        column_dots = staticmethod(split.column_dots)
        compose = staticmethod(matmul.compose)
        correction = staticmethod(matmul.correction)
        decode_rows = staticmethod(quantization.decode)
        decode_triangle = staticmethod(compact.decode)
        encode_rows = staticmethod(quantization.encode)
        encode_triangle = staticmethod(compact.encode)
        evaluate = staticmethod(evaluation.evaluate)
        evaluation_buffer = staticmethod(evaluation.evaluation_buffer)
        multiply = staticmethod(matmul.multiply)
        normalise_columns = staticmethod(split.normalise_columns)
        norms = staticmethod(power.norms)
        operand = staticmethod(split.split)
        operand_of_rows = staticmethod(quantization.decode_operand)
        power_iteration = staticmethod(power.power_iteration)
        replace_rows_ = staticmethod(replace)
        scale_rows = staticmethod(split.scale_rows)
        shifted = staticmethod(cholesky.shifted)
        whitened = staticmethod(cholesky.whitened)

        @staticmethod
        def cholesky_(A: Tensor, chain: Chain | None = None) -> tuple[Tensor, Tensor]:
            """Overwrite A by its lower triangular factors."""
            return A, cholesky.factor_(A, chain)

    return TritonBackend


def nonzero(divisor: Tensor) -> Tensor:
    """Replace 0 by 1 in a divisor: 0 / 0 becomes 0, and NaN and infinity stay visible."""
    return torch.where(divisor == 0, 1.0, divisor)


def _whiten_once_(X: Tensor, shift: float, always: bool = False) -> Tensor:
    """Run one pass; return the largest elements of R⁻¹, infinity where the diagonal was shifted.

    Unless ``always``, the diagonal is shifted only where torch finds a pivot that is not positive:
    torch cannot postpone single columns.
    """
    Backend.normalise_columns(X)
    S = Backend.multiply(X.mT, X)
    lower, info = torch.linalg.cholesky_ex(S)
    failed = torch.ones_like(info, dtype=torch.bool) if always else info != 0
    for row, bad in enumerate(failed.tolist()):
        if bad:
            shifted = S[row].clone()
            shifted.diagonal().add_(shift)
            lower[row], info = torch.linalg.cholesky_ex(shifted)
            lower[row].masked_fill_(info != 0, torch.nan)
    del S
    eye = torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)
    W = torch.linalg.solve_triangular(lower.mT, eye.expand_as(lower), upper=True)
    del lower
    X.copy_(Backend.multiply(X, W))
    largest: Tensor = torch.linalg.vector_norm(W, ord=torch.inf, dim=(-2, -1))
    return largest.masked_fill_(failed, torch.inf)


def joined(stacks: Sequence[Tensor], order: int) -> Tensor:
    """Pad stacks (k, n, n) to an order by the identity, and concatenate them."""
    padded = [padded_by_identity(X, order) for X in stacks]
    return padded[0] if len(padded) == 1 else torch.cat(padded)


def padded_by_identity(X: Tensor, order: int) -> Tensor:
    """Pad a stack (k, n, n) to an order by the identity."""
    k, n, _ = X.shape
    if n == order:
        return X
    padded = torch.eye(order, dtype=X.dtype, device=X.device).repeat(k, 1, 1)
    padded[:, :n, :n] = X
    return padded


def tile_count(order: int, tile: int) -> int:
    """Return the number of tiles on and below the diagonal."""
    side = -(-order // tile)
    return side * (side + 1) // 2


def lower_tiles(X: Tensor, tile: int) -> Tensor:
    """Cut the strictly lower triangles of (k, n, n) into zero-padded (k, tiles, tile, tile)."""
    tiles = X.new_zeros(len(X), tile_count(X.shape[-1], tile), tile, tile)
    for in_tiles, in_matrix in _tile_rows(tiles, X):
        on_diagonal = in_matrix.dim() == 3
        in_tiles.copy_(in_matrix.tril(-1) if on_diagonal else in_matrix)
    return tiles


def from_lower_tiles(tiles: Tensor, order: int) -> Tensor:
    """Restore the lower triangles (k, n, n) from tiles."""
    X = tiles.new_zeros(len(tiles), order, order)
    for in_tiles, in_matrix in _tile_rows(tiles, X):
        in_matrix.copy_(in_tiles)
    return X


def _tile_rows(tiles: Tensor, X: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of the same elements in the tiles and in X, row by row of tiles.

    Tiles left of the diagonal are (k, rows, tiles, columns); a tile on it is (k, rows, columns).
    """
    tile = tiles.shape[-1]
    for i, rows in enumerate(X.split(tile, dim=1)):
        start, height = i * tile, rows.shape[1]
        in_tiles = tiles[:, i * (i + 1) // 2 :][:, : i + 1, :height].transpose(1, 2)
        if i:
            yield in_tiles[:, :, :i], rows[:, :, :start].unflatten(2, (i, tile))
        yield in_tiles[:, :, i, :height], rows[:, :, start : start + height]
