"""The statistics of K-FAC and AdaBK: M = Y Yᵀ for L and X Xᵀ for R, of a layer's rows x and y.

Hooks look at inputs and output gradients, and only before steps that update statistics; at all
other times there are none. Everything is collected during the backward pass, where y is known: what
is computed once more for activation checkpointing has no backward pass, and does not count twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from kronbit.blocks.batches import Part, order_of
from kronbit.blocks.blocking import Blocking, route
from kronbit.blocks.groups import Due
from kronbit.config import Config
from kronbit.linalg.precision import full_precision
from kronbit.linalg.products import multiply, operand
from kronbit.messages import warn
from kronbit.statistics.base import DevicePart, Source
from kronbit.statistics.hooks import Kept, given_up, hooked
from kronbit.statistics.layers import Layer, kind_of, pieces_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


SHARED = ("expand", "reduce")


@dataclass
class Collected:
    """Sums over what a layer has seen since its gradient was empty.

    Attributes:
        X: Σ x xᵀ, (E, inputs, inputs), float32.
        Y: Σ y yᵀ, (E, outputs, outputs), float32.
        rows: How many there were.
    """

    X: Tensor
    Y: Tensor
    rows: int = 0

    @classmethod
    def nothing(cls, layer: Layer, device: torch.device) -> Collected:
        """Before the first row."""
        E, outputs, inputs = layer.sides
        X, Y = (torch.zeros(E, n, n, dtype=torch.float32, device=device) for n in (inputs, outputs))
        return cls(X, Y)


class ActivationStatistics:
    """Collects the statistics of a model's layers.

    Args:
        model: The model whose parameters are optimized.
        shared: What becomes of an example's positions (tokens, places of a convolution):
            ``"expand"`` makes rows of all of them, ``"reduce"`` one row of each example, its mean
            x and the sum of its y.
        grad_scaler: The scaler of the loss, if there is one: its scale is undone.
        process_group: Ranks over which statistics are averaged; ``None``: all there are;
            ``False``: they are not.
        workspace: Bound of copies of inputs, in bytes.
    """

    name = "activations"
    collects = True
    takes_shards = False

    def __init__(
        self,
        model: nn.Module,
        shared: str = "expand",
        grad_scaler: torch.amp.GradScaler | None = None,
        process_group: ProcessGroup | Literal[False] | None = None,
        workspace: int = 2**28,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module; got {type(model).__name__}")
        if shared not in SHARED:
            raise ValueError(f"shared must be one of {SHARED}; got {shared!r}")
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            raise TypeError(f"grad_scaler must be a torch.amp.GradScaler; got {grad_scaler!r}")
        self.model, self.shared, self.workspace = model, shared, workspace
        self.grad_scaler, self.process_group = grad_scaler, process_group
        self._layers: dict[Tensor, Layer] = {}
        self._reasons: dict[Tensor, str] = {}
        self._collected: dict[Layer, Collected] = {}
        self._handles: list[RemovableHandle] = []
        self._closed = False
        self._counts: Counter[str] = Counter(missed_statistics=0)

    def __getstate__(self) -> dict[str, Any]:
        # Hooks stay with the model that has them; what they have seen belongs to a single step.
        # Groups of ranks stay where they are: a copy works for itself.
        group = None if self.process_group is None else False
        return {**self.__dict__, "_collected": {}, "_handles": [], "process_group": group}

    # ------------------------------------------------------------------------------- parameters

    def adopt(self, params: Collection[Tensor]) -> None:
        """Find the layers of these parameters; a bias that is not among them is left alone.

        Raises:
            ValueError: If the model has none of them.
        """
        known = set(self.model.parameters())
        if not known.intersection(params) and not self._layers:
            raise ValueError(
                "model has none of the parameters that are to be optimized: give the model that "
                "they belong to, not a copy of it"
            )
        layers, self._reasons = find_layers(self.model, params)
        self._layers = {**layers, **self._layers}  # those that are known may have state
        self._reasons |= dict.fromkeys(set(params) - known, "not a parameter of model")
        for layer in self._layers.values():
            if layer.bias is not None:
                weight = f"{layer.name}.weight" if layer.name else "weight"
                self._reasons[layer.bias] = f"goes with {weight}"

    def route(self, p: Tensor, config: Config) -> Blocking | str:
        """One block per matrix of a layer; or why the parameter is left to the base optimizer.

        Raises:
            ValueError: If the options cut matrices.
        """
        for name in ("batch_dims", "split_sizes", "split", "shard_state", "blocks"):
            if getattr(config, name) != getattr(Config, name):
                raise ValueError(
                    f"{name}={getattr(config, name)!r}: matrices of layers are neither cut nor "
                    "shared out; leave it out, or use Shampoo"
                )
        if not config.precondition:
            return "precondition=False"
        layer = self._layers.get(p)
        if layer is None:
            return self._reasons.get(p, "no weight of a linear layer or convolution")
        found = _blocking(layer.matrices, config)
        if isinstance(found, Blocking) and layer.bias is None:
            # The gradient is the weight's own, in any order; else it is a copy, [W | b].
            found = replace(found, taps=math.prod(layer.weight.shape[2:]))
        return found

    @contextmanager
    def matrices(
        self, params: Sequence[Tensor], planned: Container[Tensor], grads: list[Tensor]
    ) -> Iterator[list[Tensor]]:
        """The gradients, of preconditioned layers with a bias that of [W | b]."""
        layers = {
            i: self._layers[p]
            for i, p in enumerate(params)
            if p in planned and self._layers[p].bias is not None
        }
        joined = list(grads)
        for i, layer in layers.items():
            joined[i] = layer.join(grads[i])
        yield joined
        pairs = [pair for i, layer in layers.items() for pair in layer.separated(joined[i])]
        if pairs:
            own, written = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(own, written)

    # ------------------------------------------------------------------------------- collecting

    def expect(self, params: Iterable[Tensor]) -> None:
        """Drop what was collected, and watch the layers of these parameters from now on."""
        self._collected.clear()
        wanted = [layer for p in params if (layer := self._layers.get(p)) is not None]
        if not wanted and not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = hooked(self, [] if self._closed else wanted)

    def forget(self) -> None:
        """Drop what was collected: the gradients that belong to it are gone."""
        self._collected.clear()

    def close(self) -> None:
        """Remove all hooks for good."""
        self._closed = True
        self.expect(())

    def watch(self, layer: Layer, x: Tensor, output: Any) -> None:
        """Wait for the gradient at the output of a layer."""
        if given_up(layer):
            self._collected.pop(layer, None)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(self._collect, layer, Kept(x)))

    @torch.no_grad()
    @full_precision()
    def _collect(self, layer: Layer, kept: Kept, y: Tensor) -> None:
        x = None if self._closed or y.numel() == 0 else kept.get()
        if x is None:
            return
        if layer not in self._collected:
            self._collected[layer] = Collected.nothing(layer, y.device)
        own = self._collected[layer]
        scale = 1.0 if self.grad_scaler is None else 1 / self.grad_scaler.get_scale()
        for rows in self._rows(layer.kind.outputs(layer.module, y), torch.sum):
            own.rows += rows.shape[1]
            _add_square(own.Y, rows * scale)
        for piece in layer.kind.inputs(layer.module, x, self.workspace):
            for rows in self._rows(piece, torch.mean):
                one = functional.pad(rows, (0, 1), value=1.0) if layer.bias is not None else rows
                _add_square(own.X, one)

    def _rows(self, rows: Tensor, reduced: Callable[..., Tensor]) -> Iterator[Tensor]:
        """(E, examples, positions, features) -> (E, rows, features), float32, in pieces."""
        if self.shared == "reduce":
            yield reduced(rows, 2, dtype=torch.float32)
            return
        count = pieces_of(rows[:, :1, :1], self.workspace)
        for piece in rows.flatten(1, 2).split(count, 1):
            yield piece.float()

    # --------------------------------------------------------------------------------- updating

    def source(self, part: DevicePart, due: Mapping[int, Due]) -> Source:
        """The mean squares of what was collected; a layer without any keeps its statistics."""
        layers = {i: self._layers[part.param(i)] for i in due}
        self._share(list(layers.values()))
        there = {i: layer for i, layer in layers.items() if layer in self._collected}
        if len(there) < len(layers):
            self._note_missed([layer for layer in layers.values() if layer not in self._collected])
        sums = {i: self._sums(layer) for i, layer in there.items()}
        return Source({i: due[i] for i in there}, partial(_of_batch, sums, part.measured.finite))

    def _share(self, layers: Sequence[Layer]) -> None:
        """Add up what all ranks have collected: all of them take part, whatever they have seen."""
        group = self.process_group
        if group is False or not (dist.is_available() and dist.is_initialized()):
            return
        if dist.get_world_size(group) == 1 or not layers:
            return
        device = layers[0].weight.device
        own = [
            self._collected.get(layer) or Collected.nothing(layer, layer.weight.device)
            for layer in layers
        ]
        rows = torch.tensor([one.rows for one in own], dtype=torch.int64, device=device)
        dist.all_reduce(rows, group=group)
        for layer, one, count in zip(layers, own, rows.tolist(), strict=True):
            for sums in (one.X, one.Y):
                dist.all_reduce(sums, group=group)
            one.rows = count
            if count:
                self._collected[layer] = one

    def _note_missed(self, layers: Sequence[Layer]) -> None:
        if not self._counts["missed_statistics"]:
            warn(
                f"{len(layers)} layer(s), {layers[0].name!r} first, have a gradient, but were not "
                "called in training mode since the last step: their statistics stay as they are. "
                "Compiled models do not call hooks"
            )
        self._counts["missed_statistics"] += len(layers)

    def _sums(self, layer: Layer) -> tuple[Tensor, Tensor, int]:
        """M of L and of R, as sums, and over how many rows; a step that fails needs them again."""
        own = self._collected[layer]
        return (*((own.X, own.Y) if layer.kind.inputs_are_rows else (own.Y, own.X)), own.rows)

    def counts(self) -> dict[str, int]:
        """Updates that a layer missed."""
        return dict(self._counts)


def _of_batch(
    sums: Mapping[int, tuple[Tensor, Tensor, int]], finite: Tensor, parts: Sequence[Part]
) -> Tensor:
    """M of a batch. Of gradients that are not finite, nobody takes it."""
    n, rows = order_of(parts), sum(part.rows.stop - part.rows.start for part in parts)
    M = torch.zeros(rows, n, n, dtype=torch.float32, device=finite.device)
    first = 0
    for part in parts:
        own = part.factors.order
        for span in part.group.spans:
            start, stop = max(part.rows.start, span.start), min(part.rows.stop, span.stop)
            if start < stop:
                here = slice(first + start - part.rows.start, first + stop - part.rows.start)
                *sides, count = sums[span.member]
                side = sides[part.right][start - span.start : stop - span.start]
                torch.div(side, count, out=M[here, :own, :own])
        first += part.rows.stop - part.rows.start
    return M


def _add_square(total: Tensor, rows: Tensor) -> None:
    """Add rowsᵀ rows to a total (E, n, n)."""
    x = operand(rows.contiguous())
    multiply(x.mT, x, C=total, symmetric=True, out=total)


def _blocking(matrices: tuple[int, int, int], config: Config) -> Blocking | str:
    """A block for each whole matrix."""
    largest = max(matrices[1:])
    if largest > config.max_order:
        return f"a side of {largest} is above max_order={config.max_order}"
    return route(matrices, replace(config, batch_dims=1))


def find_layers(
    model: nn.Module, params: Collection[Tensor]
) -> tuple[dict[Tensor, Layer], dict[Tensor, str]]:
    """The layers whose weights are among some parameters, and why other weights are left to F.

    Raises:
        ValueError: If a layer does not know its shape yet.
    """
    wanted = set(params)
    owners: dict[Tensor, list[str]] = {}
    uncalled: set[nn.Module] = set()
    for name, module in model.named_modules():
        for p in module.parameters(recurse=False):
            owners.setdefault(p, []).append(name)
        if isinstance(module, nn.MultiheadAttention):
            uncalled.add(module.out_proj)  # it only lends its weight
    layers: dict[Tensor, Layer] = {}
    reasons: dict[Tensor, str] = {}
    for name, module in model.named_modules():
        kind, weight = kind_of(module), module._parameters.get("weight")
        if kind is None or weight is None or weight not in wanted:
            continue
        if nn.parameter.is_lazy(weight):
            raise ValueError(f"{name} does not know its shape yet: call the model once before")
        if len(owners[weight]) > 1:
            reasons[weight] = f"shared by {', '.join(owners[weight])}"
        elif module in uncalled:
            reasons[weight] = "nn.MultiheadAttention does not call it"
        else:
            bias = module._parameters.get("bias")
            # One that is frozen alone stays so; with its weight, it may be trained later.
            if bias is not None and (
                bias not in wanted
                or len(owners[bias]) > 1
                or (weight.requires_grad and not bias.requires_grad)
            ):
                bias = None
            layers[weight] = Layer(name, module, kind, weight, bias)
    return layers, reasons
