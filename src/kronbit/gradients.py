"""Gradients as stacks of blocks, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kronbit.groups import Group, Member


def check_supported(grad: Tensor, name: Callable[[Tensor], str], p: Tensor) -> None:
    """Refuse gradients that are not strided real tensors, and say what to do.

    Args:
        grad: The gradient.
        name: Tells a parameter's name; it is looked up only for the message.
        p: The parameter.
    """
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of {name(p)} is sparse ({grad.layout}): build the embedding with "
            "sparse=False, or put the parameter into a group with precondition=False and use a "
            "base that takes sparse gradients, such as SGD or Adagrad"
        )
    if grad.is_complex():
        raise RuntimeError(
            f"the gradient of {name(p)} is complex ({grad.dtype}): optimize torch.view_as_real of "
            "the parameter, or put it into a group with precondition=False"
        )


class GradientBlocks:
    """Reads and writes blocks of the gradients of one step.

    A gradient that is not laid out as a matrix (a channels-last convolution, say) is copied, and
    the copy is written back by ``flush``.

    Args:
        members: The parameters.
        grads: Their gradients; ``None`` where there is none.
    """

    def __init__(self, members: Sequence[Member], grads: Sequence[Tensor | None]) -> None:
        self._members, self._grads = members, grads
        self._copies: dict[int, Tensor] = {}

    def gather(self, group: Group, rows: slice) -> Tensor:
        """G: the blocks of some rows as a new float32 stack (rows, m, n)."""
        shape = (rows.stop - rows.start, *group.shape)
        stack = torch.empty(shape, dtype=torch.float32, device=group.owner.device)
        for span, box, place, dims in group.pieces(rows):
            view = span.grid.view(self._matrices(span.member))[box]
            stack[place].view(*dims, *group.shape).copy_(view)
        return stack

    def scatter(self, group: Group, rows: slice, stack: Tensor) -> None:
        """Write a stack back into the gradients, in their dtype."""
        for span, box, place, dims in group.pieces(rows):
            view = span.grid.view(self._matrices(span.member))[box]
            view.copy_(stack[place].view(*dims, *group.shape))

    def flush(self) -> None:
        """Write copies back to gradients that are not matrices in memory."""
        for member, copy in self._copies.items():
            grad = self._grad(member)
            grad.copy_(copy.view(grad.shape))
        self._copies.clear()

    def _grad(self, member: int) -> Tensor:
        grad = self._grads[member]
        assert grad is not None, "rows of a parameter without gradient are never asked for"
        return grad

    def _matrices(self, member: int) -> Tensor:
        """A gradient as (E, M, N)."""
        grad, shape = self._grad(member), self._members[member].blocking.matrices
        if member in self._copies:
            return self._copies[member]
        try:
            return grad.view(shape)
        except RuntimeError:  # its strides do not allow that view
            self._copies[member] = grad.reshape(shape)
            return self._copies[member]
