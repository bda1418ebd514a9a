"""How matrices are kept: as the paper does, or in less memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from kronbit.config import Format
from kronbit.factors.compact_storage import CompactStorage
from kronbit.factors.layout import Layout, Leaves, Shape
from kronbit.factors.paper_storage import RowStorage
from kronbit.linalg.products import Operand
from kronbit.quantization import Quantizer


class MatrixStorage(Protocol):
    """How one matrix per row of the stack is kept."""

    @property
    def quantizer(self) -> Quantizer:
        """Q and D."""

    def layout(self, order: int) -> Layout:
        """Shapes and dtypes of the tensors for matrices of this order."""

    def encode(self, X: Tensor) -> Leaves:
        """Q(X) for a float32 stack (k, n, n) that the caller gives away: it may be written to."""

    def decode(self, leaves: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """D: the float32 stack (k, n, n); it may be the stored one, not to be written to.

        Args:
            leaves: The tensors.
            out: Takes it, if given: its rows may be apart.
        """

    def operand(self, slices: Sequence[Mapping[str, Tensor]], order: int) -> Operand:
        """D, for products, of stacks, one behind the other, enlarged to this order."""


def statistic_storage(format: Format, plain: str, shape: Shape) -> MatrixStorage:
    """Where a method keeps its statistic.

    Args:
        format: Bits and storage.
        plain: The tensor's name at 32 bits.
        shape: What is known of the matrix.
    """
    return _storage(format, format.statistic, plain, "", shape)


def root_storage(format: Format) -> MatrixStorage:
    """Where every method keeps its inverse roots."""
    return _storage(format, format.root, "root", "root_", "symmetric")


def _storage(
    format: Format, quantizer: Quantizer, plain: str, prefix: str, shape: Shape
) -> MatrixStorage:
    if format.compact and quantizer.bits < 32:
        return CompactStorage(quantizer, prefix, shape)
    # The diagonal of a basis does not dominate.
    return RowStorage(quantizer, plain, prefix, diagonal=shape != "square")
