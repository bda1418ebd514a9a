"""The paper's algorithms, one matrix at a time: literal and slow, in float64 or float32.

The oracle is written from the paper and uses no code of kronbit. Where the paper leaves a choice
open, the oracle follows kronbit's documentation: the signs of QR, the start of the power iteration,
and when a Newton iteration stops.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

# The codebooks as the paper prints them.
PAPER_CODEBOOKS = {
    ("dt", 4): "-0.8875 -0.6625 -0.4375 -0.2125 -0.0775 -0.0325 -0.0055 0.0000 "
    "0.0055 0.0325 0.0775 0.2125 0.4375 0.6625 0.8875 1.0000",
    ("dt", 3): "-0.7750 -0.3250 -0.0550 0.0000 0.0550 0.3250 0.7750 1.0000",
    ("linear2", 4): "-1.0000 -0.7511 -0.5378 -0.3600 -0.2178 -0.1111 -0.0400 0.0000 "
    "0.0044 0.0400 0.1111 0.2178 0.3600 0.5378 0.7511 1.0000",
    ("linear2", 3): "-1.0000 -0.5102 -0.1837 0.0000 0.0204 0.1837 0.5102 1.0000",
}


def codebook(mapping: str, bits: int) -> list[float]:
    """Return R(0), ..., R(2^b - 1), the values of the codes."""
    count = 2**bits
    if mapping == "dt":
        values = {0.0, 1.0}
        for exponent in range(bits - 1):
            fraction = bits - 2 - exponent
            for k in range(2**fraction):
                p = [0.9 * j / 2**fraction + 0.1 for j in (k, k + 1)]
                q = (p[0] + p[1]) / 2 * 10.0**-exponent
                values |= {q, -q}
        return sorted(values)
    power = {"linear": 1, "linear2": 2}[mapping]
    out = []
    for j in range(count):
        x = -1 + 2 * j / (count - 1)
        if j < count // 2 - 1:
            out.append(-(abs(x) ** power))
        elif j == count // 2 - 1:
            out.append(0.0)
        else:
            out.append(x**power)
    return out


def quantize_row(
    row: Tensor, bits: int, mapping: str, block: int
) -> tuple[list[int], list[Tensor]]:
    """Return codes and scales of one vector."""
    codes: list[int] = []
    scales: list[Tensor] = []
    book = codebook(mapping, bits)
    for start in range(0, len(row), block):
        piece = row[start : start + block]
        scale = piece.abs().max()
        scales.append(scale)
        normalized = piece / scale if scale > 0 else piece * 0
        codes += nearest(normalized, book)
    return codes, scales


def dequantize_row(
    codes: list[int], scales: list[Tensor], bits: int, mapping: str, block: int, dtype: torch.dtype
) -> Tensor:
    book = torch.tensor(codebook(mapping, bits), dtype=torch.float32).to(dtype)
    values = book[torch.tensor(codes)]
    return torch.cat([piece * scales[i] for i, piece in enumerate(values.split(block))])


def nearest(values: Tensor, book: list[float]) -> list[int]:
    """Return the nearest code of each value; the first one if several are equally near."""
    table = torch.tensor(book, dtype=torch.float32).double()
    return [int(i) for i in (values.double()[:, None] - table).abs().argmin(1)]


def packed_bytes(count: int, bits: int) -> int:
    return (count * bits + 7) // 8


def triangle_blocks(n: int, bits: int) -> tuple[int, list[tuple[int, range]]]:
    """Choose the smallest layout of a triangle: tiles of 32, tiles of 64, or rows.

    Tiles of 64 are chosen only if they save at least one percent.

    Returns:
        The length of a block, and (row, columns) of each block in order. Parts of a block may lie
        outside of the matrix.
    """
    best = None
    for side in (32, 64, None):
        blocks = []
        if side is None:
            blocks = [(row, range(c, min(c + 64, n))) for row in range(n) for c in range(0, n, 64)]
            size = n * packed_bytes(n, bits)
        else:
            for top in range(0, n, side):
                for left in range(0, top + 1, side):
                    columns = range(left, left + side)
                    blocks += [(row, columns) for row in range(top, top + side)]
            size = len(blocks) * packed_bytes(side, bits)
        size += len(blocks) + 4 * ((len(blocks) + 255) // 256) + 4 * n
        size *= 1.01 if side == 64 else 1
        if best is None or size < best[0]:
            best = size, side or 64, blocks
    assert best is not None
    return best[1], best[2]


def bjorck(V: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        V = 1.5 * V - 0.5 * V @ V.T @ V
    return V


def qr(X: Tensor) -> Tensor:
    """Return Householder's Q, signed so that R has a non-negative diagonal."""
    Q, R = torch.linalg.qr(X)
    return Q * torch.where(R.diagonal() < 0, -1, 1)


def power_iteration(A: Tensor, steps: int = 10) -> Tensor:
    x = torch.zeros(len(A), dtype=A.dtype)
    x[A.diagonal().argmax()] = 1
    for _ in range(steps):
        x = A @ x
        if x.norm() > 0:
            x = x / x.norm()
    return (x @ A @ x).abs()


def schur_newton(A: Tensor, p: int, ridge: float, steps: int) -> Tensor:
    """Compute (A + λmax ε I)^(-1/p) by the coupled Newton iteration."""
    n = len(A)
    eye = torch.eye(n, dtype=A.dtype)
    damped = A + power_iteration(A) * ridge * eye
    z = (1 + p) / (2 * damped.norm())
    M, H = z * damped, z ** (1 / p) * eye
    error = (M - eye).abs().max()
    for _ in range(steps):
        if error < 1e-6:
            break
        T = ((p + 1) * eye - M) / p
        M_next = torch.linalg.matrix_power(T, p) @ M
        error_next = (M_next - eye).abs().max()
        if not error_next <= 1.2 * error:
            break
        H, M, error = H @ T, M_next, error_next
    return H


@dataclass
class Options:
    """Options of the oracle, with the paper's defaults."""

    bits: int = 4
    root_bits: int | None = None
    method: str = "eigen"
    mapping: str = "linear2"
    block_size: int = 64
    min_quantized_numel: int = 4096
    storage: str = "paper"
    exponent: float = -0.25
    trace_scaling: bool = False
    beta: float = 0.95
    damping: float = 1e-6
    start: float | None = None
    update_every: int = 100
    refresh_every: int = 500
    update_rectify: int = 1
    refresh_rectify: int = 4
    qr_iterations: int = 1
    newton_steps: int = 10
    root: str = "eigen"
    max_order: int = 1200
    split: str = "greedy"


@dataclass
class Kept:
    """A stored matrix: plain, or quantised row by row, with or without a separate diagonal.

    Compact storage holds codes of blocks, codes of their scales, and the scales of these codes.
    """

    plain: Tensor | None = None
    diagonal: Tensor | None = None
    rows: list[tuple[list[int], list[Tensor]]] = field(default_factory=list)
    blocks: list[tuple[int, range]] = field(default_factory=list)
    codes: list[list[int]] = field(default_factory=list)
    scales: list[int] = field(default_factory=list)
    tops: list[Tensor] = field(default_factory=list)


class Factor:
    """One preconditioner A and its inverse root."""

    def __init__(self, n: int, options: Options, dtype: torch.dtype) -> None:
        self.n, self.o, self.dtype = n, options, dtype
        small = n * n < options.min_quantized_numel
        self.bits = 32 if small else options.bits
        self.root_bits = 32 if small else (options.root_bits or options.bits)
        eye = torch.eye(n, dtype=dtype)
        start = options.damping if options.start is None else options.start
        if options.method == "eigen":
            self.lam = torch.full((n,), start, dtype=dtype)
            self.kept = self.keep(eye, self.bits, diagonal=False)
        elif options.method == "cholesky":
            self.kept = self.keep(start**0.5 * eye, self.bits, diagonal=True)
        else:
            self.kept = self.keep(start * eye, self.bits, diagonal=True)
        self.root = self.keep(eye, self.root_bits, diagonal=True)

    def keep(self, X: Tensor, bits: int, diagonal: bool) -> Kept:
        if bits == 32:
            return Kept(plain=X.clone())
        if self.o.storage == "compact":
            return self.keep_compact(X, bits, diagonal)
        separated = X.diagonal().clone() if diagonal else None
        X = X - torch.diag(separated) if separated is not None else X
        o = self.o
        rows = [quantize_row(row, bits, o.mapping, o.block_size) for row in X]
        return Kept(diagonal=separated, rows=rows)

    def keep_compact(self, X: Tensor, bits: int, triangle: bool) -> Kept:
        n = self.n
        kept = Kept(diagonal=X.diagonal().clone() if triangle else None)
        kept.blocks = [(row, range(c, min(c + 64, n))) for row in range(n) for c in range(0, n, 64)]
        if triangle:
            _, kept.blocks = triangle_blocks(n, bits)
        values = []
        for row, columns in kept.blocks:
            block = torch.zeros(len(columns), dtype=X.dtype)
            inside = [c for c in columns if row < n and c < n and (c < row or not triangle)]
            if inside:
                block[: len(inside)] = X[row, inside[0] : inside[-1] + 1]
            values.append(block)
        book = [(j / 255) ** 2 for j in range(256)]
        scales = torch.stack([block.abs().max() for block in values])
        for chunk in scales.split(256):
            top = chunk.max()
            kept.tops.append(top)
            kept.scales += nearest(chunk / top if top > 0 else chunk, book)
        book = codebook(self.o.mapping, bits)
        for block, scale in zip(values, self.restored_scales(kept), strict=True):
            normalized = block / scale if scale > 0 else block
            kept.codes.append(nearest(normalized, book))
        return kept

    def restored_scales(self, kept: Kept) -> list[Tensor]:
        return [
            torch.tensor((j / 255) ** 2, dtype=torch.float32).to(self.dtype) * kept.tops[i // 256]
            for i, j in enumerate(kept.scales)
        ]

    def restore_compact(self, kept: Kept, bits: int, mirrored: bool) -> Tensor:
        book = torch.tensor(codebook(self.o.mapping, bits), dtype=torch.float32).to(self.dtype)
        X = torch.zeros(self.n, self.n, dtype=self.dtype)
        scales = self.restored_scales(kept)
        for (row, columns), codes, scale in zip(kept.blocks, kept.codes, scales, strict=True):
            if row < self.n:
                inside = [c for c in columns if c < self.n]
                X[row, columns.start : columns.start + len(inside)] = (
                    book[torch.tensor(codes)][: len(inside)] * scale
                )
        if mirrored:
            X = X + X.T
        return X if kept.diagonal is None else X + torch.diag(kept.diagonal)

    def restore(self, kept: Kept, bits: int) -> Tensor:
        if kept.plain is not None:
            return kept.plain
        if kept.codes:
            symmetric = kept is self.root or self.o.method == "naive"
            return self.restore_compact(kept, bits, mirrored=symmetric)
        o = self.o
        X = torch.stack(
            [
                dequantize_row(codes, scales, bits, o.mapping, o.block_size, self.dtype)
                for codes, scales in kept.rows
            ]
        )
        return X if kept.diagonal is None else X + torch.diag(kept.diagonal)

    def vectors(self, steps: int) -> Tensor:
        """Return V with eigenvectors as columns. Storage holds them as rows."""
        V = self.restore(self.kept, self.bits).T
        return bjorck(V, 0 if self.bits == 32 else steps)

    def matrix(self) -> Tensor:
        if self.o.method == "eigen":
            V = self.vectors(self.o.update_rectify)
            return V @ torch.diag(self.lam) @ V.T
        X = self.restore(self.kept, self.bits)
        return X @ X.T if self.o.method == "cholesky" else X

    def update(self, M: Tensor) -> None:
        """Average M into A, or add it to A if β is 1: the paper's PU."""
        o = self.o
        A = self.matrix() + M if o.beta == 1 else o.beta * self.matrix() + (1 - o.beta) * M
        if o.method != "eigen":
            kept = torch.linalg.cholesky(A) if o.method == "cholesky" else A
            self.kept = self.keep(kept, self.bits, diagonal=True)
            return
        P = self.vectors(o.update_rectify)
        for _ in range(o.qr_iterations):
            P = qr(A @ P)
        self.lam = (P.T @ A @ P).diagonal().clamp(min=0)
        self.kept = self.keep(P.T.contiguous(), self.bits, diagonal=False)

    def refresh(self) -> None:
        """Compute the inverse root: the paper's PIRU."""
        o = self.o
        if o.method == "eigen" and o.root == "eigen":
            V = self.vectors(o.refresh_rectify)
            root = V @ torch.diag((self.lam + self.lam.max() * o.damping) ** o.exponent) @ V.T
        elif o.method == "cholesky":
            A = self.matrix()
            lam, V = torch.linalg.eigh(A)
            root = V @ torch.diag((lam + power_iteration(A) * o.damping) ** o.exponent) @ V.T
        else:
            root = schur_newton(self.matrix(), round(-1 / o.exponent), o.damping, o.newton_steps)
        if o.trace_scaling:  # the power of A / √tr A
            trace = self.lam.sum() if o.method == "eigen" else self.matrix().trace()
            root = root * trace ** (-0.5 * o.exponent)
        self.root = self.keep(root, self.root_bits, diagonal=True)

    def inverse_root(self) -> Tensor:
        return self.restore(self.root, self.root_bits)


def pieces(length: int, max_order: int, split: str) -> list[tuple[int, int]]:
    """Return (start, stop) of the pieces of a side."""
    size = max_order
    if split == "even" and length > max_order:
        number = 1
        while number * max_order < length:
            number += 1
        size = (length + number - 1) // number
        while size % 64:
            size += 1
        size = min(size, max_order)
    return [(start, min(start + size, length)) for start in range(0, length, size)]


class Shampoo:
    """The paper's "Practical 4-bit Shampoo", 32-bit Shampoo or CASPR, parameter by parameter."""

    def __init__(
        self,
        params: list[Tensor],
        first_order: torch.optim.Optimizer,
        options: Options,
        rule: str = "shampoo",
    ) -> None:
        self.params, self.first_order, self.o, self.rule = params, first_order, options, rule
        self.t = 0
        self.refreshed = False
        self.factors: dict[tuple[int, int], tuple[Factor, Factor]] = {}

    @staticmethod
    def as_matrix(G: Tensor) -> Tensor | None:
        sides = [side for side in G.shape if side > 1]
        return G.reshape(sides[0], -1) if len(sides) > 1 else None

    def blocks(self, G: Tensor) -> list[tuple[slice, slice]]:
        rows = pieces(G.shape[0], self.o.max_order, self.o.split)
        columns = pieces(G.shape[1], self.o.max_order, self.o.split)
        return [(slice(*r), slice(*c)) for r in rows for c in columns]

    def step(self) -> None:
        self.t += 1
        o = self.o
        self.refreshed |= self.t % o.refresh_every == 0
        for index, p in enumerate(self.params):
            if p.grad is None or (G := self.as_matrix(p.grad)) is None:
                continue
            Ghat = torch.zeros_like(G)
            for number, block in enumerate(self.blocks(G)):
                g = G[block]
                if (index, number) not in self.factors:
                    pair = tuple(Factor(n, o, g.dtype) for n in g.shape)
                    self.factors[index, number] = pair  # type: ignore[assignment]
                left, right = self.factors[index, number]
                if self.t % o.update_every == 0:
                    left.update(g @ g.T)
                    right.update(g.T @ g)
                if self.t % o.refresh_every == 0:
                    left.refresh()
                    right.refresh()
                L, R = left.inverse_root(), right.inverse_root()
                if self.rule == "shampoo":
                    Ghat[block] = L @ g @ R
                else:
                    J = L @ g + g @ R
                    Ghat[block] = L @ J + J @ R
            if self.refreshed:
                p.grad = (Ghat * (G.norm() / (Ghat.norm() + 1e-12))).reshape(p.shape)
        self.first_order.step()


class KFAC:
    """Algorithm 5: K-FAC and AdaBK, layer by layer, on matrices [W | b]."""

    def __init__(
        self,
        layers: list[tuple[Tensor, Tensor | None]],
        first_order: torch.optim.Optimizer,
        options: Options,
    ) -> None:
        self.layers, self.first_order, self.o = layers, first_order, options
        self.t = 0
        self.factors: list[tuple[Factor, Factor]] = []

    def step(self, rows: list[tuple[Tensor, Tensor]]) -> None:
        """Take one step.

        Args:
            rows: Inputs x (with a constant 1 for a bias) and output gradients y of each layer.
        """
        self.t += 1
        o = self.o
        for number, ((W, b), (x, y)) in enumerate(zip(self.layers, rows, strict=True)):
            assert W.grad is not None
            G = W.grad.reshape(len(W), -1)
            if b is not None:
                assert b.grad is not None
                G = torch.cat([G, b.grad.unsqueeze(1)], 1)
            if number == len(self.factors):
                self.factors.append(
                    (Factor(G.shape[0], o, G.dtype), Factor(G.shape[1], o, G.dtype))
                )
            left, right = self.factors[number]
            if self.t % o.update_every == 0:
                left.update(y.T @ y / len(y))
                right.update(x.T @ x / len(x))
            if self.t % o.refresh_every == 0:
                left.refresh()
                right.refresh()
            if self.t >= o.refresh_every:
                Ghat = left.inverse_root() @ G @ right.inverse_root()
                Gtilde = Ghat * (G.norm() / (Ghat.norm() + 1e-12))
                W.grad = (Gtilde if b is None else Gtilde[:, :-1]).reshape(W.shape)
                if b is not None:
                    b.grad = Gtilde[:, -1].clone()
        self.first_order.step()
