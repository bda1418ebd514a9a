"""Gradients as stacks of blocks, and back."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kronbit.blocks.blocking import Blocking, Grid, Route
from kronbit.blocks.groups import Group, Member, Span
from kronbit.config import Config

_REAL = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
# Rows of a group that are one strided view of a gradient: the member, the grid, the blocks as
# slices of the grid, and the blocks as a slice of the stack of requested rows.
Piece: TypeAlias = tuple[int, Grid, tuple[slice, ...], slice]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of axes


def plain_dtypes(grads: Sequence[Tensor]) -> set[torch.dtype] | None:
    """Return the dtypes if all gradients are real and contiguous or channels-last, else None.

    This runs at every step, so it makes two passes in C instead of one in Python.
    """
    dtypes = set(map(attrgetter("dtype"), grads))
    try:
        plain = dtypes <= _REAL and (
            all(map(Tensor.is_contiguous, grads)) or all(map(_is_dense, grads))
        )
    except RuntimeError:  # is_contiguous is not defined for sparse tensors
        plain = False
    return dtypes if plain else None


def _is_dense(grad: Tensor) -> bool:
    """True if a gradient is contiguous, or channels-last without gaps."""
    if grad.is_contiguous():
        return True
    last = _CHANNELS_LAST.get(grad.dim())
    return last is not None and grad.is_contiguous(memory_format=last)


def problem(grad: Tensor) -> str | None:
    """Return why a gradient cannot be preconditioned, with the remedy; ``None`` if it can be."""
    if grad.layout != torch.strided:
        return (
            f"is sparse ({grad.layout}): build the embedding with sparse=False, or put the "
            "parameter into a param group with precondition=False and use a base that takes sparse "
            "gradients, such as SGD or Adagrad"
        )
    if grad.is_complex():
        return (
            f"is complex ({grad.dtype}): optimize torch.view_as_real of the parameter, or put it "
            "into a param group with precondition=False"
        )
    return None


def overlaps_itself(grad: Tensor) -> bool:
    """True if elements share memory, as in an expanded tensor, which must not be written to."""
    return any(
        stride == 0 and size > 1 for size, stride in zip(grad.shape, grad.stride(), strict=True)
    )


def view_blocks(grid: Grid, matrices: Tensor) -> Tensor:
    """Return a view (*dims, m, n) of the blocks of a tensor (E, M, N)."""
    rows, columns = grid.rows, grid.columns
    part = matrices[:, rows.start : rows.stop, columns.start : columns.stop]
    part = part.unflatten(2, (len(columns), columns.step))
    view: Tensor = part.unflatten(1, (len(rows), rows.step)).transpose(2, 3)
    return view


class GradientBlocks:
    """Reads and writes blocks of the gradients of one step.

    A gradient whose strides do not allow a view as a matrix (that of a convolution in channels-last
    order) is copied at each read. Writes go to a copy, which ``flush`` writes back.
    """

    def __init__(self, members: Sequence[Member], grads: Sequence[Tensor | None]) -> None:
        self._members, self._grads = members, grads
        self._written: dict[int, Tensor] = {}

    def gather(self, group: Group, rows: slice) -> Tensor:
        """Return G, the blocks of the given rows, as a new float32 stack (rows, m, n)."""
        shape = (rows.stop - rows.start, *group.shape)
        stack = torch.empty(shape, dtype=torch.float32, device=group.member_of.device)
        for member, grid, box, target in _pieces(group, rows):
            view = view_blocks(grid, self._matrices(member))[box]
            stack[target].view(view.shape).copy_(view)
        return stack

    def scatter(self, group: Group, rows: slice, stack: Tensor) -> None:
        """Write a stack into the gradients, in their dtype."""
        for member, grid, box, target in _pieces(group, rows):
            view = view_blocks(grid, self._matrices(member, to_write=True))[box]
            values = stack[target].view(view.shape)
            if view.dtype == torch.float16:
                # G̃ has the norm of G, but one of its elements may exceed float16's range: saturate.
                values = values.clamp(-65504.0, 65504.0)
            view.copy_(values)

    def flush(self) -> None:
        """Write the copies back into gradients that cannot be viewed as matrices."""
        for member, copy in self._written.items():
            grad = self._grad(member)
            grad.copy_(copy.view(grad.shape))
        self._written.clear()

    def _grad(self, member: int) -> Tensor:
        grad = self._grads[member]
        assert grad is not None, "rows of a parameter without a gradient are never requested"
        return grad

    def _matrices(self, member: int, to_write: bool = False) -> Tensor:
        """Return a gradient as (E, M, N)."""
        if member in self._written:
            return self._written[member]
        grad, shape = self._grad(member), self._members[member].blocking.matrices
        try:
            return grad.view(shape)
        except RuntimeError:  # the strides do not allow this view
            copy = grad.reshape(shape)
            if to_write:
                self._written[member] = copy
            return copy


def _pieces(group: Group, rows: slice) -> tuple[Piece, ...]:
    """Return the pieces of gradients that hold the given rows; computed once."""
    key = rows.start, rows.stop
    if key not in group.pieces:
        group.pieces[key] = tuple(_cut(group.spans, *key))
    return group.pieces[key]


def _cut(spans: Sequence[Span], first: int, last: int) -> Iterator[Piece]:
    number = bisect_right(spans, first, key=lambda span: span.start) - 1
    row = 0
    for span in spans[number:]:
        if span.start >= last:
            break
        offset = span.first - span.start
        start, stop = max(first, span.start) + offset, min(last, span.stop) + offset
        for box in boxes(span.grid.dims, start, stop):
            count = math.prod(side.stop - side.start for side in box)
            yield span.member, span.grid, box, slice(row, row + count)
            row += count


def boxes(dims: tuple[int, ...], start: int, stop: int) -> tuple[tuple[slice, ...], ...]:
    """Cover the flat range [start, stop) of a row-major grid with boxes, in order.

    A range of rows may begin and end in the middle of a grid; each box is one strided view.
    """
    if start >= stop:
        return ()
    if len(dims) == 1:
        return ((slice(start, stop),),)
    inner = math.prod(dims[1:])
    first, offset = divmod(start, inner)
    last, rest = divmod(stop, inner)
    if first == last:
        return _under(first, boxes(dims[1:], offset, rest))
    head = _under(first, boxes(dims[1:], offset, inner)) if offset else ()
    lines = slice(first + bool(offset), last)
    whole = (lines, *(slice(0, d) for d in dims[1:]))
    body = (whole,) if lines.start < lines.stop else ()
    return (*head, *body, *_under(last, boxes(dims[1:], 0, rest)))


def _under(line: int, inner: tuple[tuple[slice, ...], ...]) -> tuple[tuple[slice, ...], ...]:
    return tuple((slice(line, line + 1), *box) for box in inner)


def elements(grad: Tensor) -> Tensor:
    """Return a real strided view of the stored numbers of any gradient, even sparse or complex."""
    if grad.layout == torch.sparse_coo:
        grad = grad._values()
    elif grad.layout != torch.strided:
        grad = grad.values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


class StepGradients(NamedTuple):
    """The parameters that have a gradient at a step.

    Attributes:
        params: The parameters.
        configs: The options of each parameter.
        grads: The gradient of each parameter.
        dtypes: The dtypes of the gradients, as returned by ``plain_dtypes``.
    """

    params: list[Tensor]
    configs: list[Config]
    grads: list[Tensor]
    dtypes: set[torch.dtype] | None

    @classmethod
    def of(
        cls, groups: Iterable[Mapping[str, Any]], config_of: Callable[[Mapping[str, Any]], Config]
    ) -> StepGradients:
        """Collect the parameters of param groups that have a gradient."""
        params: list[Tensor] = []
        configs: list[Config] = []
        grads: list[Any] = []
        for group in groups:
            listed = group["params"]
            params += listed
            grads += [p.grad for p in listed]
            configs += [config_of(group)] * len(listed)
        try:
            dtypes = plain_dtypes(grads)
        except AttributeError:  # some parameters have no gradient
            present = [grad is not None for grad in grads]
            params, configs, grads = (
                list(compress(values, present)) for values in (params, configs, grads)
            )
            dtypes = plain_dtypes(grads)
        return cls(params, configs, grads, dtypes)

    def once(self) -> StepGradients:
        """Return the gradients, each parameter once: torch accepts a parameter listed twice."""
        if len(set(map(id, self.params))) == len(self.params):
            return self
        rows = {id(row[0]): row for row in zip(self.params, self.configs, self.grads, strict=True)}
        params, configs, grads = zip(*rows.values(), strict=True)
        return StepGradients(list(params), list(configs), list(grads), self.dtypes)


def collect(
    groups: Iterable[Mapping[str, Any]],
    config_of: Callable[[Mapping[str, Any]], Config],
    route: Route,
    name: Callable[[Tensor], str],
) -> StepGradients:
    """Collect a step's gradients; a gradient that must not be written to is replaced by a copy.

    Raises:
        RuntimeError: If a gradient cannot be preconditioned.
    """
    gradients = StepGradients.of(groups, config_of)
    if gradients.dtypes is not None:  # nothing needs a closer look
        return gradients
    for p, config, grad in zip(gradients.params, gradients.configs, gradients.grads, strict=True):
        fault = problem(grad)
        if fault is None and overlaps_itself(grad):
            p.grad = grad.clone(memory_format=torch.contiguous_format)
        elif fault is not None and isinstance(route(p, config), Blocking):
            raise RuntimeError(f"the gradient of {name(p)} {fault}")
    return StepGradients.of(groups, config_of)
