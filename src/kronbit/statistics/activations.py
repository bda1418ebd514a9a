"""Statistics of K-FAC and AdaBK: means of y yᵀ (L) and x xᵀ (R) over the rows x and y of a layer.

Hooks are registered only before steps that update statistics. Rows are collected in the backward
pass, so a forward pass that activation checkpointing repeats is not counted twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from kronbit.blocks.batches import Part
from kronbit.blocks.blocking import Blocking, route
from kronbit.blocks.groups import DeviceStacks, DueMembers
from kronbit.config import Config
from kronbit.distributed.collectives import copy_all
from kronbit.linalg.precision import full_precision
from kronbit.linalg.products import multiply, operand
from kronbit.messages import warn
from kronbit.statistics.base import MatrixOf, ParamOf, Statistics, rows_in_batch, zeros_for
from kronbit.statistics.hooks import SavedInput, register_hooks, was_reset
from kronbit.statistics.layers import Layer, find_layers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from kronbit.gpu.measured import Measured


SHARED = ("expand", "reduce")


class LayerSums:
    """Sums over the rows of a layer of E matrices, since its gradient was reset.

    Attributes:
        X: Σ x xᵀ, (E, inputs, inputs), float32.
        Y: Σ y yᵀ, (E, outputs, outputs), float32.
        rows: Number of rows.
    """

    def __init__(self, layer: Layer, device: torch.device) -> None:
        E, outputs, inputs = layer.sides
        self.X = torch.zeros(E, inputs, inputs, dtype=torch.float32, device=device)
        self.Y = torch.zeros(E, outputs, outputs, dtype=torch.float32, device=device)
        self.rows = 0

    def sides(self, layer: Layer) -> tuple[Tensor, Tensor, int]:
        """Return the sums for L and for R, and the number of rows."""
        left, right = (self.X, self.Y) if layer.inputs_are_rows else (self.Y, self.X)
        return left, right, self.rows


class ActivationStatistics(Statistics):
    """Collects the statistics of a model's layers.

    Args:
        model: The model whose parameters are optimized.
        shared: How positions of an example (tokens, or outputs of a convolution) become rows.
            ``"expand"``: each position is a row. ``"reduce"``: each example is a row, with the mean
            of its x and the sum of its y.
        grad_scaler: Scaler of the loss; y is divided by its scale.
        process_group: Ranks over which statistics are averaged. None: all. False: no averaging.
        workspace: Limit on copies of inputs, in bytes.
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
        self._collected: dict[Layer, LayerSums] = {}
        self._handles: list[RemovableHandle] = []
        self._closed = False
        self._counts: Counter[str] = Counter(missed_statistics=0)

    def __getstate__(self) -> dict[str, Any]:
        # Hooks belong to the model, and collected sums to a single step: neither is copied.
        # A copy has no process group: it works alone.
        group = None if self.process_group is None else False
        return {**self.__dict__, "_collected": {}, "_handles": [], "process_group": group}

    # ------------------------------------------------------------------------------- parameters

    def adopt(self, params: Collection[Tensor]) -> None:
        """Find the layers of parameters. Biases that are not in ``params`` are ignored.

        Raises:
            ValueError: If the model has none of the parameters.
        """
        known = set(self.model.parameters())
        if not known.intersection(params) and not self._layers:
            raise ValueError(
                "model has none of the parameters that are optimized: pass the model that they "
                "belong to, not a copy of it"
            )
        layers, self._reasons = find_layers(self.model, params)
        self._layers = {**layers, **self._layers}  # known layers may have state
        self._reasons |= dict.fromkeys(set(params) - known, "not a parameter of model")
        for layer in self._layers.values():
            if layer.bias is not None:
                weight = f"{layer.name}.weight" if layer.name else "weight"
                self._reasons[layer.bias] = f"goes with {weight}"

    def route(self, p: Tensor, config: Config) -> Blocking | str:
        """Return one block per matrix of a layer, or why the parameter is left to F.

        Raises:
            ValueError: If an option would cut matrices.
        """
        for name in ("batch_dims", "split_sizes", "split", "shard_state", "blocks"):
            if getattr(config, name) != getattr(Config, name):
                raise ValueError(
                    f"{name}={getattr(config, name)!r}: matrices of layers are neither cut nor "
                    f"divided among ranks; omit {name}, or use Shampoo"
                )
        if not config.precondition:
            return "precondition=False"
        layer = self._layers.get(p)
        if layer is None:
            return self._reasons.get(p, "not the weight of a linear layer or convolution")
        largest = max(layer.matrices[1:])
        if largest > config.max_order:
            return f"a side of {largest} is above max_order={config.max_order}"
        blocking = route(layer.matrices, replace(config, batch_dims=1))
        if isinstance(blocking, Blocking) and layer.bias is None:
            # Without a bias, the weight's gradient is preconditioned in place, in any memory
            # format. With a bias, the gradient is copied into [W | b].
            blocking = replace(blocking, taps=math.prod(layer.weight.shape[2:]))
        return blocking

    @contextmanager
    def matrices(
        self, params: Sequence[Tensor], planned: Container[Tensor], grads: list[Tensor]
    ) -> Iterator[list[Tensor]]:
        """Provide gradients: of [W | b] for preconditioned layers with a bias, else as they are."""
        layers = {
            i: self._layers[p]
            for i, p in enumerate(params)
            if p in planned and self._layers[p].bias is not None
        }
        joined = list(grads)
        for i, layer in layers.items():
            joined[i] = layer.join(grads[i])
        yield joined
        copy_all(pair for i, layer in layers.items() for pair in layer.separated(joined[i]))

    # ------------------------------------------------------------------------------- collecting

    def expect(self, params: Iterable[Tensor]) -> None:
        """Drop collected sums, and watch the layers of these parameters from now on."""
        self._collected.clear()
        wanted = [layer for p in params if (layer := self._layers.get(p)) is not None]
        if not wanted and not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = register_hooks(self.watch, [] if self._closed else wanted)

    def forget(self) -> None:
        """Drop collected sums: their gradients have been reset."""
        self._collected.clear()

    def close(self) -> None:
        """Remove all hooks. No data is collected from now on."""
        self._closed = True
        self.expect(())

    def watch(self, layer: Layer, x: Tensor, output: Any) -> None:
        """Register a hook for the gradient at the output of a layer."""
        if was_reset(layer):
            self._collected.pop(layer, None)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(self._collect, layer, SavedInput(x)))

    @torch.no_grad()
    @full_precision()
    def _collect(self, layer: Layer, saved: SavedInput, y: Tensor) -> None:
        x = None if self._closed or y.numel() == 0 else saved.get()
        if x is None:
            return
        if layer not in self._collected:
            self._collected[layer] = LayerSums(layer, y.device)
        sums = self._collected[layer]
        scale = 1.0 if self.grad_scaler is None else 1 / self.grad_scaler.get_scale()
        for rows in self._rows(layer.outputs(y), torch.sum):
            sums.rows += rows.shape[1]
            _add_square(sums.Y, rows * scale)
        for piece in layer.inputs(x, self.workspace):
            for rows in self._rows(piece, torch.mean):
                if layer.bias is not None:
                    rows = functional.pad(rows, (0, 1), value=1.0)
                _add_square(sums.X, rows)

    def _rows(self, rows: Tensor, reduced: Callable[..., Tensor]) -> Iterator[Tensor]:
        """Convert (E, examples, positions, features) to (E, rows, features), float32, in pieces."""
        if self.shared == "reduce":
            yield reduced(rows, 2, dtype=torch.float32)
            return
        row_bytes = 8 * rows[:, :1, :1].numel()  # in float32 and copied once
        count = max(1, self.workspace // max(1, row_bytes))
        for piece in rows.flatten(1, 2).split(count, 1):
            yield piece.float()

    # --------------------------------------------------------------------------------- updating

    def source(
        self, stacks: DeviceStacks, measured: Measured, due: DueMembers, param: ParamOf
    ) -> tuple[DueMembers, MatrixOf]:
        """Return the members whose layers have rows, and the function for M, a mean over rows."""
        layers = {i: self._layers[param(i)] for i in due}
        self._all_reduce(list(layers.values()))
        self._note_missed([layer for layer in layers.values() if layer not in self._collected])
        sums = {
            i: self._collected[layer].sides(layer)  # not removed: a failed step is repeated
            for i, layer in layers.items()
            if layer in self._collected
        }
        return {i: due[i] for i in sums}, partial(_mean_squares, sums, stacks.device)

    def _all_reduce(self, layers: Sequence[Layer]) -> None:
        """Add up the sums of all ranks. All ranks take part, even ranks without rows."""
        group = self.process_group
        started = dist.is_available() and dist.is_initialized()
        if not layers or group is False or not started or dist.get_world_size(group) == 1:
            return
        sums = [
            self._collected.get(layer) or LayerSums(layer, layer.weight.device) for layer in layers
        ]
        device = layers[0].weight.device
        rows = torch.tensor([local.rows for local in sums], dtype=torch.int64, device=device)
        dist.all_reduce(rows, group=group)
        for layer, total, count in zip(layers, sums, rows.tolist(), strict=True):
            for square in (total.X, total.Y):
                dist.all_reduce(square, group=group)
            total.rows = count
            if count:
                self._collected[layer] = total

    def _note_missed(self, layers: Sequence[Layer]) -> None:
        if layers and not self._counts["missed_statistics"]:
            warn(
                f"{len(layers)} layer(s), such as {layers[0].name!r}, have a gradient, but were "
                "not called in training mode since the last step: their statistics are not "
                "updated. Compiled models do not call hooks: do not compile these layers"
            )
        self._counts["missed_statistics"] += len(layers)

    def counts(self) -> dict[str, int]:
        """Return the number of updates that layers missed."""
        return dict(self._counts)


def _mean_squares(
    sums: Mapping[int, tuple[Tensor, Tensor, int]], device: torch.device, parts: Sequence[Part]
) -> Tensor:
    """Return M of a batch. The caller ignores rows whose gradient is not finite."""
    M = zeros_for(parts, device)
    for part, rows in rows_in_batch(parts):
        n, offset = part.factors.order, rows.start - part.rows.start
        for span in part.group.spans:
            start, stop = max(part.rows.start, span.start), min(part.rows.stop, span.stop)
            if start < stop:
                *sides, count = sums[span.member]
                first = span.first - span.start
                side = sides[part.right][start + first : stop + first]
                torch.div(side, count, out=M[start + offset : stop + offset, :n, :n])
    return M


def _add_square(total: Tensor, rows: Tensor) -> None:
    """Add rowsᵀ rows to a total (E, n, n)."""
    x = operand(rows.contiguous())
    multiply(x.mT, x, C=total, symmetric=True, out=total)
