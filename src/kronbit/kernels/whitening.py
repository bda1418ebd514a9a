"""X R⁻¹ with Rᵀ R = Xᵀ X, on the tensor cores."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from kronbit.kernels.cholesky import Chain, inverse_factor_
from kronbit.kernels.matmul import compose, multiply
from kronbit.kernels.split import Split, measured_split, normalise_columns, take_


def whitened(
    X: Tensor, room: Tensor | None, least: float, limit: float, chain: Chain | None
) -> Split:
    """What ``kronbit.linalg.orthogonal`` asks for, without waiting for the device.

    Which matrices need a second pass is known there alone: it is launched for all of them, and
    programs that have nothing to do end at once.

    Args:
        X: (k, m, n), contiguous.
        room: (k, n, n) that may be overwritten; it may be X itself.
        least: The least pivot of the first pass.
        limit: The largest element of R⁻¹ up to which one pass is enough.
        chain: What launches factorisations.
    """
    x = normalise_columns(X)
    everyone = _everyone(X)
    S = multiply(x.mT, x, symmetric=True, out=room, only=everyone)
    W = inverse_factor_(S, least, everyone, chain)
    w, largest = measured_split(W, everyone)
    del S, W
    y = compose(x, w)
    del x, w
    again = largest > _bits(limit)
    S = multiply(y.mT, y, symmetric=True, out=room, only=again)
    # No least pivot here: columns have lost their length.
    W = inverse_factor_(S, 0.0, again, chain)
    w, _ = measured_split(W, again)
    del S, W
    take_(y, compose(y, w, only=again), again)
    return y


def shifted(X: Tensor, room: Tensor | None, shift: float) -> Tensor:
    """One pass with something added to the diagonal of XᵀX, in float32."""
    x = normalise_columns(X)
    everyone = _everyone(X)
    S = multiply(x.mT, x, symmetric=True, out=room, only=everyone)
    S.diagonal(dim1=-2, dim2=-1).add_(shift)
    w, _ = measured_split(inverse_factor_(S, 0.0, everyone), everyone)
    return compose(x, w).float()


def _everyone(X: Tensor) -> Tensor:
    """All matrices as some of them: kernels are compiled once for both."""
    return torch.ones(len(X), dtype=torch.bool, device=X.device)


def _bits(value: float) -> int:
    """A positive float32 as an integer. Those of larger numbers, infinity and NaN are larger."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return int(bits)
