"""Quantisation errors of a preconditioner: every way to store it, compared with float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kronbit.config import Config
from kronbit.factors import Batch, Factors, Leaves, make_method
from kronbit.linalg.orthogonal import bjorck
from kronbit.quantization import Quantizer

# Methods and storages of this library, in the order of the tables.
KEPT = tuple(product(("naive", "eigen", "cholesky"), ("paper", "compact")))
# The quantised quantity, and True if its eigenvectors are rectified; None if it has none.
Quantity = tuple[str, bool | None]
# The paper's synthetic matrix has two distinct eigenvalues, which the paper does not print. These
# values reproduce all rows of its table that do not depend on them strongly.
_LARGE, _SMALL, _SHARE_OF_LARGE = 1000.0, 1.0, 1155 / 1200


@dataclass(frozen=True)
class Deviation:
    """The paper's errors of X: NRE, ‖X - X₀‖ / ‖X₀‖, and the angle to X₀ in degrees."""

    nre: float
    angle: float

    @classmethod
    def of(cls, X: Tensor, exact: Tensor) -> Deviation:
        """Compare X with the exact matrix X₀ in float64."""
        a, b = X.double(), exact.double()
        # The chord is accurate for small angles; the cosine is not.
        chord = float((a / a.norm() - b / b.norm()).norm())
        angle = 2 * math.degrees(math.asin(min(chord / 2, 1.0)))
        return cls(float((a - b).norm() / b.norm()), angle)


def deviations(X: Tensor, exact: Tensor) -> tuple[Deviation, Deviation]:
    """Compute the errors of X and of X without its diagonal, whose elements are small."""
    return Deviation.of(X, exact), Deviation.of(_off(X), _off(exact))


@dataclass(frozen=True, eq=False)
class Statistic:
    """A preconditioner A = U Λ Uᵀ that is known exactly, in float64: λ ≥ 0 (n,) and U (n, n).

    Damping, exponent and trace scaling of the options define the inverse root.
    """

    lam: Tensor
    U: Tensor
    config: Config

    @classmethod
    def of(cls, A: Tensor, config: Config) -> Statistic:
        """Decompose a matrix (n, n). Negative eigenvalues are rounding errors and become 0."""
        lam, U = torch.linalg.eigh(A.double())
        return cls(lam.clamp(min=0), U, config)

    @property
    def order(self) -> int:
        """Order n of the matrix."""
        return len(self.lam)

    @property
    def p(self) -> int:
        """The p of the inverse p-th root."""
        return round(-1 / self.config.exponent)

    @property
    def damped(self) -> Tensor:
        """Damped eigenvalues λ + max(λ) ε; 1 if A is zero and has no inverse root."""
        largest = self.lam.max()
        return torch.where(largest == 0, 1.0, self.lam + largest * self.config.damping)

    @property
    def condition(self) -> float:
        """Condition number of the damped A."""
        return float(self.damped.max() / self.damped.min())

    def matrix(self) -> Tensor:
        """Return A with damping."""
        return (self.U * self.damped) @ self.U.mT

    def root(self) -> Tensor:
        """Return the exact inverse p-th root, as an optimizer defines it."""
        root: Tensor = (self.U * self.damped ** (-1 / self.p)) @ self.U.mT
        trace = self.lam.sum()
        if self.config.trace_scaling and trace > 0:
            root = root * trace ** (1 / (2 * self.p))
        return root


def synthetic_matrix(order: int = 1200, device: torch.device | str = "cpu") -> Statistic:
    """Return the paper's A2: random orthogonal eigenvectors and two distinct eigenvalues."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(order, order, dtype=torch.float64, generator=generator)
    lam = torch.full((order,), _SMALL, dtype=torch.float64)
    lam[: round(order * _SHARE_OF_LARGE)] = _LARGE
    return Statistic(lam.to(device), torch.linalg.qr(noise)[0].to(device), Config())


# ------------------------------------------------------------------------------ the paper's table


@dataclass(frozen=True)
class StorageErrors:
    """One way to store a preconditioner, with the errors of its inverse root f(A) = A^(-1/p).

    A way is the quantised quantity: the matrix ``A``, its eigenvectors ``U``, its triangular factor
    ``C``, its root ``B``, or two of them; or method and storage of this library.
    """

    way: str
    mapping: str
    bits: int
    block_size: int
    rectified: bool | None  # eigenvectors are orthogonalized again; None if there are none
    whole: Deviation  # of f(A)
    off_diagonal: Deviation  # of f(A) without its diagonal

    @classmethod
    def of(
        cls, key: Quantity, kept: Quantizer | Config, root: Tensor, exact: Tensor
    ) -> StorageErrors:
        """Compare a root after quantisation with the exact one."""
        quantizer = kept.mapping, kept.bits, kept.block_size
        return cls(key[0], *quantizer, key[1], *deviations(root, exact))

    @property
    def label(self) -> str:
        """Label for tables and figures."""
        return _label((self.way, self.rectified))


def _label(key: Quantity) -> str:
    way, rectified = key
    return f"{way}, rectified" if rectified else way


def static_table(
    statistic: Statistic,
    bits: int = 4,
    mappings: Sequence[str] = ("linear2", "dt"),
    kept: Iterable[tuple[str, str]] = KEPT,
) -> list[StorageErrors]:
    """Compute the paper's table for one matrix, extended by methods and storages of this library.

    A scale covers 64 elements, and 256 at 8 bits, as in the paper; compact storage always has 64.
    """
    block_size = 256 if bits == 8 else 64
    widths: dict[str, Any] = {"bits": bits, "root_bits": None, "min_quantized_numel": 0}
    exact = statistic.root()
    rows = []
    for mapping in mappings:
        quantizer = Quantizer(bits, mapping, block_size)
        roots = {key: inverse_root(A, statistic) for key, A in _matrices(statistic, quantizer)}
        roots["B", None] = _restored_off_diagonal(exact, quantizer)
        for way, rectified in (("A", None), ("U", False), ("U", True)):
            roots[f"{way}, B", rectified] = _restored_off_diagonal(roots[way, rectified], quantizer)
        rows += [StorageErrors.of(key, quantizer, root, exact) for key, root in roots.items()]
        for method, storage in kept:
            size = block_size if storage == "paper" else 64
            stored = widths | {"method": method, "storage": storage, "mapping": mapping}
            config = replace(statistic.config, **stored, block_size=size)
            key = f"{method}, {storage}", None
            rows.append(StorageErrors.of(key, config, kept_root(statistic, config), exact))
    return rows


def _matrices(statistic: Statistic, quantizer: Quantizer) -> Iterator[tuple[Quantity, Tensor]]:
    """Yield each quantised quantity with the matrix that is restored from it."""
    A = statistic.matrix()
    yield ("A", None), _restored_off_diagonal(A, quantizer)
    yield ("A and diagonal", None), _restored(A, quantizer)
    for rectified in (False, True):
        V = restored_vectors(statistic, quantizer, int(rectified))
        yield ("U", rectified), (V * statistic.damped) @ V.mT
    # Unlike Cholesky, QR works if A is singular to rounding.
    C = torch.linalg.qr(statistic.damped.sqrt().unsqueeze(-1) * statistic.U.mT).R.mT
    C = _restored_off_diagonal(C, quantizer)
    yield ("C", None), C @ C.mT


def inverse_root(A: Tensor, like: Statistic) -> Tensor:
    """Return f(A) with the options of a statistic. Only the lower triangle of A is read.

    A quantised A may be indefinite: as in the paper, its singular values are raised to the power.
    """
    lam, U = torch.linalg.eigh(A)
    lam = lam.abs().clamp(min=torch.finfo(lam.dtype).tiny)
    return Statistic(lam, U, replace(like.config, damping=0.0)).root()


def restored_vectors(statistic: Statistic, quantizer: Quantizer, rectify: int) -> Tensor:
    """Return D(Q(U)) after ``rectify`` Björck steps. A block lies within one eigenvector."""
    Vt = _restored(statistic.U.mT, quantizer)
    return bjorck(Vt.unsqueeze(0), rectify)[0].double().mT


def _restored(X: Tensor, quantizer: Quantizer) -> Tensor:
    return quantizer.dequantize(quantizer.quantize(X), X.shape[-1]).double()


def _restored_off_diagonal(X: Tensor, quantizer: Quantizer) -> Tensor:
    """Return D(Q(X)) with the exact diagonal of X, which is not quantised."""
    return _restored(_off(X), quantizer) + torch.diag(X.diagonal())


def _off(X: Tensor) -> Tensor:
    return X - torch.diag(X.diagonal())


def kept_root(statistic: Statistic, config: Config) -> Tensor:
    """Return the root that an optimizer with these options would store for the statistic A."""
    A = (statistic.U * statistic.lam) @ statistic.U.mT
    stored = make_method(config.format(len(A))).encode_matrix(A.float().unsqueeze(0))
    return refreshed_root(factors_of(len(A), stored, config, A.device), config)


def factors_of(order: int, leaves: Leaves, config: Config, device: torch.device | str) -> Factors:
    """Return a stack of one preconditioner with the given tensors."""
    factors = Factors(order, 1, config.format(order), config.start_value, device)
    for name, leaf in leaves.items():
        factors.tensors[name].copy_(leaf)
    return factors


def refreshed_root(factors: Factors, config: Config) -> Tensor:
    """Refresh the first root of a stack as an optimizer does, and return it in float64."""
    first = slice(0, 1)
    batch = Batch([(factors, first)])
    # A root that is not finite is computed again with ten times the damping.
    for attempt in range(1 + len(factors.method.root_repairs)):
        if bool(batch.refresh(replace(config, damping=config.damping * 10**attempt)).all()):
            break
    return factors.roots(first)[0].double()


# --------------------------------------------------------------------------- the paper's figures

_QUANTIZER = Quantizer(4, "linear2")


def contraction(statistic: Statistic) -> dict[float, list[StorageErrors]]:
    """Compute errors at 4 bits for eigenvalues that are contracted until they are almost equal.

    The keys are the factors τ of the contraction λ ↦ τ (λ - λmin) + λmin; the rows quantise A, the
    rectified U, or C. Quantising U instead of A pays off if the condition number is large.
    """
    lam = statistic.damped
    least, undamped = lam.min(), replace(statistic.config, damping=0.0)
    rows = {}
    for exponent in range(0, -math.ceil(math.log2(statistic.condition)) - 1, -2):
        tau = 2.0**exponent
        contracted = Statistic(tau * (lam - least) + least, statistic.U, undamped)
        exact = contracted.root()
        rows[tau] = [
            StorageErrors.of(key, _QUANTIZER, inverse_root(A, contracted), exact)
            for key, A in _matrices(contracted, _QUANTIZER)
            if key in (("A", None), ("U", True), ("C", None))
        ]
    return rows


def rectification(statistic: Statistic, steps: int = 8) -> dict[int, list[float]]:
    """Compute the error of V Λ^s Vᵀ as a power of V Λ Vᵀ, for 4-bit V and t2 Björck steps.

    It is the mean of |(V Λ^s Vᵀ)^k (V Λ Vᵀ) - I| for each k = -1 / s, for t2 from 0 to ``steps``.
    """
    lam = statistic.damped
    eye = torch.eye(statistic.order, dtype=lam.dtype, device=lam.device)
    V = restored_vectors(statistic, _QUANTIZER, 0)
    errors_of: dict[int, list[float]] = {k: [] for k in (1, 2, 4, 8)}
    for _ in range(steps + 1):
        A = (V * lam) @ V.mT
        for k, errors in errors_of.items():
            power = torch.linalg.matrix_power((V * lam ** (-1 / k)) @ V.mT, k)
            errors.append(float((power @ A - eye).abs().mean()))
        V = bjorck(V.unsqueeze(0), 1)[0].double()
    return errors_of


def singular_values(statistic: Statistic) -> dict[str, Tensor]:
    """Return the singular values of A and of each matrix restored from 4 bits, ascending."""
    spectra = {"exact": statistic.damped}
    for key, A in _matrices(statistic, _QUANTIZER):
        spectra[_label(key)] = torch.linalg.eigvalsh(A).abs()
    return {name: values.sort().values.cpu() for name, values in spectra.items()}
