"""Quantisation errors of a preconditioner: every way to keep it, against float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kronbit.config import Config
from kronbit.factors import Batch, Factors
from kronbit.linalg import bjorck
from kronbit.quantization import Quantizer

MAPPINGS = ("linear2", "dt")
# What users can run, in the order in which tables show it.
KEPT = (
    ("naive", "paper"),
    ("naive", "compact"),
    ("eigen", "paper"),
    ("eigen", "compact"),
    ("cholesky", "paper"),
    ("cholesky", "compact"),
)
# What is quantised, and whether its eigenvectors are rectified; None: there are none.
Way = tuple[str, bool | None]
# The paper's synthetic matrix has two distinct eigenvalues, which it does not print. With these,
# all rows of its table that do not depend on them much come out as printed.
_LARGE, _SMALL, _SHARE_OF_LARGE = 1000.0, 1.0, 1155 / 1200


@dataclass(frozen=True)
class Deviation:
    """How far a matrix is from the exact one.

    Attributes:
        nre: ‖X - X₀‖ / ‖X₀‖, the paper's normwise relative error.
        angle: Between the two, in degrees: its angle error.
    """

    nre: float
    angle: float

    @classmethod
    def of(cls, found: Tensor, exact: Tensor) -> Deviation:
        """The deviation of a matrix, in float64."""
        a, b = found.double(), exact.double()
        # From the chord, not from the cosine: small angles keep their digits.
        chord = float((a / a.norm() - b / b.norm()).norm())
        angle = 2 * math.degrees(math.asin(min(chord / 2, 1.0)))
        return cls(float((a - b).norm() / b.norm()), angle)


def deviations(found: Tensor, exact: Tensor) -> tuple[Deviation, Deviation]:
    """Of a matrix, and of what is beside its diagonal: that is small, and easily lost."""
    return Deviation.of(found, exact), Deviation.of(_off(found), _off(exact))


@dataclass(frozen=True, eq=False)
class Statistic:
    """A preconditioner A = U Λ Uᵀ, known exactly.

    Attributes:
        lam: λ, not negative, float64 (n,).
        U: Eigenvectors as columns, float64 (n, n).
        config: Damping, exponent and trace scaling say what its inverse root is.
    """

    lam: Tensor
    U: Tensor
    config: Config

    @classmethod
    def of(cls, A: Tensor, config: Config) -> Statistic:
        """The one that a matrix (n, n) stands for; negative eigenvalues are rounding errors."""
        lam, U = torch.linalg.eigh(A.double())
        return cls(lam.clamp(min=0), U, config)

    @property
    def order(self) -> int:
        """Its order n."""
        return len(self.lam)

    @property
    def p(self) -> int:
        """Which root is taken."""
        return round(-1 / self.config.exponent)

    @property
    def damped(self) -> Tensor:
        """λ + max(λ) ε; 1, if A is zero, which has no inverse root."""
        largest = self.lam.max()
        return torch.where(largest == 0, 1.0, self.lam + largest * self.config.damping)

    @property
    def condition(self) -> float:
        """Of A with its damping."""
        return float(self.damped.max() / self.damped.min())

    def matrix(self) -> Tensor:
        """A with its damping."""
        return (self.U * self.damped) @ self.U.mT

    def root(self) -> Tensor:
        """Its inverse p-th root, exactly, as an optimizer takes it."""
        found: Tensor = (self.U * self.damped ** (-1 / self.p)) @ self.U.mT
        trace = self.lam.sum()
        if self.config.trace_scaling and trace > 0:
            found = found * trace ** (1 / (2 * self.p))
        return found


def synthetic_matrix(
    order: int = 1200, seed: int = 0, device: torch.device | str = "cpu"
) -> Statistic:
    """The paper's A2: random orthogonal eigenvectors, and two distinct eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(order, order, dtype=torch.float64, generator=generator)
    lam = torch.full((order,), _SMALL, dtype=torch.float64)
    lam[: round(order * _SHARE_OF_LARGE)] = _LARGE
    return Statistic(lam.to(device), torch.linalg.qr(noise)[0].to(device), Config())


# ------------------------------------------------------------------------------ the paper's table


@dataclass(frozen=True)
class Row:
    """One way to keep a preconditioner, and the errors of its inverse root f(A).

    Attributes:
        way: What is quantised: ``A``, its eigenvectors ``U``, its triangular factor ``C``, the root
            ``B`` that comes of it, or two of them; or method and storage of this library.
        mapping: R.
        bits: b.
        block_size: Elements that share a scale.
        rectified: Whether eigenvectors were made orthogonal again; ``None``: there are none.
        whole: Errors in A^(-1/p).
        off_diagonal: Errors in A^(-1/p) without its diagonal.
    """

    way: str
    mapping: str
    bits: int
    block_size: int
    rectified: bool | None
    whole: Deviation
    off_diagonal: Deviation

    @classmethod
    def of(cls, key: Way, kept: Quantizer | Config, root: Tensor, exact: Tensor) -> Row:
        """The row of a root that comes of quantisation."""
        way, rectified = key
        errors = deviations(root, exact)
        return cls(way, kept.mapping, kept.bits, kept.block_size, rectified, *errors)

    @property
    def key(self) -> Way:
        """What is quantised, and whether it is rectified."""
        return self.way, self.rectified


def label_of(key: Way) -> str:
    """What is quantised, and whether it is rectified, in words."""
    way, rectified = key
    return f"{way}, rectified" if rectified else way


def static_table(
    statistic: Statistic,
    bits: int = 4,
    block_size: int | None = None,
    mappings: Sequence[str] = MAPPINGS,
    kept: Iterable[tuple[str, str]] = KEPT,
) -> list[Row]:
    """The paper's static analysis of one matrix, and the same for what this library keeps.

    Args:
        statistic: The matrix.
        bits: b.
        block_size: ``None``: the paper's, 64, and 256 at 8 bits.
        mappings: R, one after the other.
        kept: Methods and storages of the library. Compact ones have blocks of their own.
    """
    block = block_size or (256 if bits == 8 else 64)
    exact = statistic.root()
    rows = []
    for mapping in mappings:
        quantizer = Quantizer(bits, mapping, block)
        rows += [
            Row.of(key, quantizer, root, exact)
            for key, root in _roots_of_the_paper(statistic, quantizer)
        ]
        for method, storage in kept:
            config = replace(
                statistic.config,
                bits=bits,
                root_bits=None,
                method=method,
                storage=storage,
                mapping=mapping,
                block_size=block if storage == "paper" else 64,
                min_quantized_numel=0,
            )
            root = kept_root(statistic, config)
            rows.append(Row.of((f"{method}, {storage}", None), config, root, exact))
    return rows


def _roots_of_the_paper(statistic: Statistic, quantizer: Quantizer) -> Iterator[tuple[Way, Tensor]]:
    """What is quantised, whether it is rectified, and f(A) that comes of it."""
    roots = {}
    for key, A in _matrices(statistic, quantizer):
        roots[key] = inverse_root(A, statistic)
        yield key, roots[key]
    yield ("B", None), _restored_beside_diagonal(statistic.root(), quantizer)
    for way, rectified in (("A", None), ("U", False), ("U", True)):
        B = _restored_beside_diagonal(roots[way, rectified], quantizer)
        yield (f"{way}, B", rectified), B


def _matrices(statistic: Statistic, quantizer: Quantizer) -> Iterator[tuple[Way, Tensor]]:
    """What is quantised, whether it is rectified, and g(A), what is left of A."""
    A = statistic.matrix()
    yield ("A", None), _restored_beside_diagonal(A, quantizer)
    yield ("A and diagonal", None), _restored(A, quantizer)
    for rectified in (False, True):
        V = restored_vectors(statistic, quantizer, int(rectified))
        yield ("U", rectified), (V * statistic.damped) @ V.mT
    # By QR, which does not mind if A is singular but for rounding.
    C = torch.linalg.qr(statistic.damped.sqrt().unsqueeze(-1) * statistic.U.mT).R.mT
    C = _restored_beside_diagonal(C, quantizer)
    yield ("C", None), C @ C.mT


def inverse_root(A: Tensor, like: Statistic) -> Tensor:
    """f(A), the same root of another matrix than a statistic, of whose lower triangle.

    By singular values, as the paper defines A^s: a quantised A may be indefinite.
    """
    lam, U = torch.linalg.eigh(A)
    lam = lam.abs().clamp(min=torch.finfo(lam.dtype).tiny)
    plain = replace(like.config, damping=0.0)
    return Statistic(lam, U, plain).root()


def restored_vectors(statistic: Statistic, quantizer: Quantizer, rectify: int) -> Tensor:
    """D(Q(U)) after so many of Björck's steps; a block lies inside one eigenvector."""
    Vt = _restored(statistic.U.mT, quantizer)
    return bjorck(Vt.unsqueeze(0), rectify)[0].double().mT


def _restored(X: Tensor, quantizer: Quantizer) -> Tensor:
    return quantizer.dequantize(quantizer.quantize(X), X.shape[-1]).double()


def _restored_beside_diagonal(X: Tensor, quantizer: Quantizer) -> Tensor:
    """D(Q(X)), but for its diagonal, which is kept in float32."""
    return _restored(_off(X), quantizer) + torch.diag(X.diagonal())


def _off(X: Tensor) -> Tensor:
    return X - torch.diag(X.diagonal())


def kept_root(statistic: Statistic, config: Config) -> Tensor:
    """The root that an optimizer with these options would hold, if A were its statistic."""
    A = (statistic.U * statistic.lam) @ statistic.U.mT
    factors = Factors(len(A), 1, config.format(len(A)), config.start_value, A.device)
    for name, leaf in factors.method.encode_matrix(A.float().unsqueeze(0)).items():
        factors.tensors[name].copy_(leaf)
    return refreshed_root(factors, config)


def refreshed_root(factors: Factors, config: Config) -> Tensor:
    """The root of the first statistic of a stack, refreshed as an optimizer does it; float64."""
    first = slice(0, 1)
    batch = Batch([(factors, first)])
    # Where a root is not finite: again, with ten times the damping.
    for attempt in range(1 + len(factors.method.root_repairs)):
        if bool(batch.refresh(replace(config, damping=config.damping * 10**attempt)).all()):
            break
    return factors.roots(first)[0].double()


# --------------------------------------------------------------------------- the paper's figures


@dataclass(frozen=True)
class Contracted:
    """Errors after the eigenvalues were drawn together.

    Attributes:
        tau: λ ↦ τ (λ - λmin) + λmin.
        rows: The ways A, U rectified, and C.
    """

    tau: float
    rows: tuple[Row, ...]


def contraction(statistic: Statistic, bits: int = 4, mapping: str = "linear2") -> list[Contracted]:
    """Errors against the contraction of the eigenvalues, from none to nearly all the same.

    A large condition is what makes it better to quantise U than A.
    """
    quantizer = Quantizer(bits, mapping)
    lam = statistic.damped
    least = lam.min()
    undamped = replace(statistic.config, damping=0.0)
    found = []
    for exponent in range(0, -math.ceil(math.log2(statistic.condition)) - 1, -2):
        tau = 2.0**exponent
        drawn = Statistic(tau * (lam - least) + least, statistic.U, undamped)
        rows = tuple(
            Row.of(key, quantizer, inverse_root(A, drawn), drawn.root())
            for key, A in _matrices(drawn, quantizer)
            if key in (("A", None), ("U", True), ("C", None))
        )
        found.append(Contracted(tau, rows))
    return found


def rectification(
    statistic: Statistic,
    steps: int = 8,
    roots: Sequence[int] = (1, 2, 4, 8),
    bits: int = 4,
    mapping: str = "linear2",
) -> dict[int, list[float]]:
    """How well V Λ^s Vᵀ is a power of V Λ Vᵀ, against Björck's steps on quantised eigenvectors.

    Args:
        statistic: The matrix.
        steps: t2 goes from 0 to this.
        roots: k of s = -1 / k.
        bits: Of the eigenvectors.
        mapping: R.

    Returns:
        By k, for each t2: the mean of the elements of |(V Λ^s Vᵀ)^k (V Λ Vᵀ) - I|.
    """
    lam = statistic.damped
    eye = torch.eye(statistic.order, dtype=lam.dtype, device=lam.device)
    V = restored_vectors(statistic, Quantizer(bits, mapping), 0)
    found: dict[int, list[float]] = {k: [] for k in roots}
    for _ in range(steps + 1):
        A = (V * lam) @ V.mT
        for k, errors in found.items():
            power = torch.linalg.matrix_power((V * lam ** (-1 / k)) @ V.mT, k)
            errors.append(float((power @ A - eye).abs().mean()))
        V = bjorck(V.unsqueeze(0), 1)[0].double()
    return found


def singular_values(
    statistic: Statistic, bits: int = 4, mapping: str = "linear2"
) -> dict[str, Tensor]:
    """Of the matrix, and of what is left of it by each way; ascending."""
    found = {"exact": statistic.damped}
    for key, A in _matrices(statistic, Quantizer(bits, mapping)):
        found[label_of(key)] = torch.linalg.eigvalsh(A).abs()
    return {name: values.sort().values.cpu() for name, values in found.items()}
