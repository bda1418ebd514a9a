"""The measured gradients of a step on one device, whether torch or kernels measure them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from kronbit.gpu.addresses import AddressTable


class Measured(NamedTuple):
    """The gradients of a step and their norms.

    Attributes:
        grads: The gradients; ``None`` for parameters without one.
        norms: ‖G‖_F of each in float32; 0 without a gradient. Not finite where G is not, or where
            the sum of squares overflows float32.
        finite: bool, True if a norm is finite.
        addresses: Table of the gradients that kernels support; ``None`` without kernels.
        by_kernels: True if kernels have measured the norms, and therefore support all gradients.
    """

    grads: Sequence[Tensor | None]
    norms: Tensor
    finite: Tensor
    addresses: AddressTable | None
    by_kernels: bool
