"""The functions of ``backend.Backend`` in pure torch: the contract of every kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kronbit.kernels.polynomial import Polynomial
from kronbit.quantization import reference

by_kernels = False
_TINY = 16


def nonzero(divisor: Tensor) -> Tensor:
    """Replace 0 by 1: zero divided by it stays zero, and NaN and infinity stay visible."""
    return torch.where(divisor == 0, 1.0, divisor)


def operand(X: Tensor, bound: Tensor | float | None = None) -> Tensor:
    """Return X itself."""
    return X


def multiply(
    A: Tensor, B: Tensor, C: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0, *,
    symmetric: bool = False, triangular: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply and add: alpha A B + beta C."""
    if A.dtype == torch.float32 and max(*A.shape[1:], B.shape[-1]) < _TINY:
        # On CPUs, products of tiny matrices depend on their position in memory, and so on the
        # batch. In float64, the difference is below float32's last bit.
        wide = multiply(A.double(), B.double(), None if C is None else C.double(), alpha, beta)
        return wide.float() if out is None else out.copy_(wide)
    if C is None:
        product = torch.bmm(A, B) if out is None else torch.bmm(A, B, out=out)
        return product if alpha == 1 else product.mul_(alpha)
    if out is None:
        return torch.baddbmm(C, A, B, beta=beta, alpha=alpha)
    return torch.baddbmm(C, A, B, beta=beta, alpha=alpha, out=out)


def compose(
    A: Tensor, B: Tensor, C: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0, *,
    symmetric: bool = False, bound: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply and add."""
    return multiply(A, B, C, alpha, beta)


def scale_rows(X: Tensor, factors: Tensor, largest: Tensor) -> Tensor:
    """Return diag(factors) X."""
    return X * factors.unsqueeze(-1)


def correction(Q: Tensor) -> tuple[Tensor, Tensor]:
    """Return I - U with U the upper triangle of QᵀQ - I, its diagonal halved; and its squares."""
    E = torch.bmm(Q.mT, Q)
    E.diagonal(dim1=-2, dim2=-1).sub_(1)
    U = E.triu_()
    error = torch.linalg.vector_norm(U, dim=-1).square()
    U.neg_().diagonal(dim1=-2, dim2=-1).mul_(0.5).add_(1)
    return U, error


def normalise_columns(X: Tensor) -> Tensor:
    """Divide columns by their lengths."""
    return X.div_(nonzero(torch.linalg.vector_norm(X, dim=-2, keepdim=True)))


def column_dots(X: Tensor, Y: Tensor) -> Tensor:
    """Return the dot products of columns."""
    return Y.mul_(X).sum(-2)


def norms(A: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """Return ‖A‖_F and the next power of two."""
    # In float32, squares would overflow.
    norm = torch.linalg.vector_norm(A, dim=(-2, -1), dtype=torch.float64)
    exponent = torch.frexp(nonzero(norm)).exponent
    return norm.float(), torch.exp2(exponent.clamp_(min=least).double()).float()


def add_ridge_(
    A: Tensor, largest: Tensor, norm: Tensor, s: Tensor, ridge: float, least: float,
    orders: Tensor | None = None,
) -> None:  # fmt: skip
    """Add a ridge to the diagonals."""
    added = torch.maximum(largest * s * ridge, norm * least)
    A.diagonal(dim1=-2, dim2=-1).add_(torch.where(norm == 0, 1.0, added).unsqueeze(-1))


def power_iteration(A: Tensor, factors: Tensor, steps: int, unscaled: int) -> Tensor:
    """Return λmax, starting from the unit vector of the largest diagonal element."""
    start = A.diagonal(dim1=-2, dim2=-1).argmax(-1, keepdim=True)
    # Use two equal vectors. Torch multiplies one matrix by a vector differently than several, but a
    # result must not depend on the matrices that share the batch.
    x = A.new_zeros(*A.shape[:-1], 2).scatter_(-2, start.unsqueeze(-1).expand(-1, 1, 2), 1.0)
    for step in range(1, steps + 1):
        x = torch.bmm(A, x) * factors[:, None, None]
        if step % unscaled == 0:
            x /= nonzero(torch.linalg.vector_norm(x, dim=-2, keepdim=True))
    y = torch.bmm(A, x) * factors[:, None, None]
    x, y = x[..., 0], y[..., 0]
    return (x * y).sum(-1).abs_() / nonzero((x * x).sum(-1))


def room(k: int, n: int, device: torch.device) -> Tensor:
    """Allocate matrices (k, n, n)."""
    return torch.empty(k, n, n, dtype=torch.float32, device=device)


def evaluate(
    polynomial: Polynomial, A: Tensor, s: Tensor, scale: Tensor, orders: Tensor | None = None
) -> Tensor:
    """Evaluate a polynomial of A / s."""
    last_uses = polynomial.last_uses()
    held = {0: A.div_(s[:, None, None])}
    del A
    good = torch.ones_like(scale, dtype=torch.bool)
    for number, line in enumerate(polynomial.products, 1):
        C = None if line.C is None else held[line.C]
        result = multiply(held[line.A], held[line.B], C, line.alpha, line.beta)
        result.diagonal(dim1=-2, dim2=-1).add_(line.diagonal)
        held[number] = result
        if number == polynomial.checked and C is not None:
            C.diagonal(dim1=-2, dim2=-1).sub_(1)  # its last use
            # A comparison with NaN is False.
            good = torch.linalg.vector_norm(C, ord=torch.inf, dim=(-2, -1)) < polynomial.tolerance
        for operand in line.operands():
            if last_uses[operand] == number:
                del held[operand]
        del C
    (result,) = held.values()
    return result.mul_(scale.masked_fill(~good, torch.nan)[:, None, None])


def chain(device: torch.device, graphs: bool) -> None:
    """Return None: torch launches factorisations itself."""
    return


def cholesky_(A: Tensor, chain: object = None) -> tuple[Tensor, Tensor]:
    """Return C with A = C Cᵀ, and bool (k,), True if positive definite."""
    C, info = torch.linalg.cholesky_ex(A)
    return C, info == 0


def whitened(
    X: Tensor, room: Tensor | None, least: float, limit: float, chain: object = None
) -> Tensor:
    """Return X R⁻¹ with Rᵀ R = Xᵀ X; take a second pass where R⁻¹ is larger than the limit."""
    largest = _whiten_once_(X, least)
    for row, enough in enumerate((largest <= limit).tolist()):  # False for NaN
        if not enough:
            alone = X[row : row + 1].clone()
            _whiten_once_(alone, least)
            X[row : row + 1] = alone
    return X


def shifted(X: Tensor, room: Tensor | None, shift: float) -> Tensor:
    """Return X R⁻¹ with Rᵀ R = Xᵀ X + shift I."""
    _whiten_once_(X, shift, always=True)
    return X


def _whiten_once_(X: Tensor, shift: float, always: bool = False) -> Tensor:
    """Take one pass; return the largest elements of R⁻¹, infinity where the diagonal was shifted.

    Unless ``always``, the diagonal is shifted only where torch finds a pivot that is not positive:
    torch cannot postpone single columns.
    """
    normalise_columns(X)
    S = multiply(X.mT, X)
    lower, info = torch.linalg.cholesky_ex(S)
    failed = torch.ones_like(info, dtype=torch.bool) if always else info != 0
    for row, bad in enumerate(failed.tolist()):
        if bad:
            again = S[row].clone()
            again.diagonal().add_(shift)
            lower[row], info = torch.linalg.cholesky_ex(again)
            lower[row].masked_fill_(info != 0, torch.nan)
    del S
    eye = torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)
    W = torch.linalg.solve_triangular(lower.mT, eye.expand_as(lower), upper=True)
    del lower
    X.copy_(multiply(X, W))
    largest: Tensor = torch.linalg.vector_norm(W, ord=torch.inf, dim=(-2, -1))
    return largest.masked_fill_(failed, torch.inf)


def encode_rows(
    X: Tensor, diagonal: bool, bits: int, mapping: str, block_size: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantise by rows."""
    apart = X.diagonal(dim1=-2, dim2=-1).clone() if diagonal else None
    if diagonal:
        X.diagonal(dim1=-2, dim2=-1).zero_()
    return *reference.quantize(X, bits, mapping, block_size), apart


def decode_rows(
    codes: Tensor, scales: Tensor, diagonal: Tensor | None, bits: int, mapping: str, block_size: int
) -> Tensor:
    """Restore by rows."""
    X = reference.dequantize(codes, scales, bits, mapping, block_size, codes.shape[-2])
    if diagonal is not None:
        X.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    return X


def operand_of_rows(
    stacks: Sequence[tuple[Tensor, Tensor]], order: int, bits: int, mapping: str, block_size: int
) -> Tensor:
    """Restore several stacks by rows."""
    return joined([decode_rows(*stack, None, bits, mapping, block_size) for stack in stacks], order)


def joined(stacks: Sequence[Tensor], order: int) -> Tensor:
    """Pad stacks (k, n, n) to an order, and concatenate them."""
    padded = [padded_by_identity(X, order) for X in stacks]
    return padded[0] if len(padded) == 1 else torch.cat(padded)


def padded_by_identity(X: Tensor, order: int) -> Tensor:
    """Pad a stack (k, n, n) to an order; the rest of each matrix is the identity."""
    k, n, _ = X.shape
    if n == order:
        return X
    padded = torch.eye(order, dtype=X.dtype, device=X.device).repeat(k, 1, 1)
    padded[:, :n, :n] = X
    return padded


def encode_triangle(
    X: Tensor, triangle: bool, bits: int, mapping: str, block_size: int, tiled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise triangles, and their scales."""
    if triangle:
        X = lower_tiles(X, block_size) if tiled else X.tril(-1)
    exact = reference.block_scales(X, block_size)
    scales, tops = reference.quantize_scales(exact.flatten(1))
    # The codes are nearest for the stored scales, not for the exact ones.
    kept = reference.dequantize_scales(scales, tops).view_as(exact)
    return reference.nearest_codes(X, kept, bits, mapping, block_size), scales, tops


def decode_triangle(
    codes: Tensor, scales: Tensor, tops: Tensor, diagonal: Tensor | None, mirrored: bool,
    bits: int, mapping: str, block_size: int, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Restore the result of ``encode_triangle``."""
    tiled = codes.dim() == 4
    order = codes.shape[1] if diagonal is None else diagonal.shape[1]
    scales = reference.dequantize_scales(scales, tops).view(*codes.shape[:-1], -1)
    length = block_size if tiled else order
    X = reference.dequantize(codes, scales, bits, mapping, block_size, length)
    if diagonal is not None:
        X = from_lower_tiles(X, order) if tiled else X
        if mirrored:
            X = X + X.mT  # strictly lower, and strictly upper
        X.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    return X if out is None else out.copy_(X)


def tile_count(order: int, tile: int) -> int:
    """Return the number of tiles on and below the diagonal."""
    side = -(-order // tile)
    return side * (side + 1) // 2


def lower_tiles(X: Tensor, tile: int) -> Tensor:
    """Cut the strictly lower triangles of (k, n, n) into zero-padded (k, tiles, tile, tile)."""
    tiles = X.new_zeros(len(X), tile_count(X.shape[-1], tile), tile, tile)
    for in_tiles, in_matrix in _tile_rows(tiles, X):
        in_tiles.copy_(in_matrix)
    side = -(-X.shape[-1] // tile)
    for i in range(side):
        on_diagonal = tiles[:, tile_count((i + 1) * tile, tile) - 1]
        on_diagonal.copy_(on_diagonal.tril(-1))
    return tiles


def from_lower_tiles(tiles: Tensor, order: int) -> Tensor:
    """Restore the lower triangles (k, n, n) from tiles."""
    X = tiles.new_zeros(len(tiles), order, order)
    for in_tiles, in_matrix in _tile_rows(tiles, X):
        in_matrix.copy_(in_tiles)
    return X


def _tile_rows(tiles: Tensor, X: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views (k, rows, tiles, columns) of the same elements in the tiles and in X."""
    k, order = X.shape[:2]
    tile = tiles.shape[-1]
    for i, start in enumerate(range(0, order, tile)):
        stop = min(start + tile, order)
        in_tiles = tiles[:, i * (i + 1) // 2 : (i + 1) * (i + 2) // 2].transpose(1, 2)
        if i:
            yield in_tiles[:, : stop - start, :i], X[:, start:stop, :start].view(k, -1, i, tile)
        on = slice(0, stop - start)
        yield in_tiles[:, on, i, on], X[:, start:stop, start:stop]


def replace_rows_(old: Sequence[Tensor], new: Sequence[Tensor], accepted: Tensor) -> None:
    """Copy accepted rows of new tensors over old ones."""
    for target, leaf in zip(old, new, strict=True):
        torch.where(accepted.view(-1, *[1] * (leaf.dim() - 1)), leaf, target, out=target)
