"""The ordinary step on a GPU: Ĝ and G̃ of all parameters by a few launches, as one CUDA graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kronbit.addresses import AddressTable
from kronbit.kernels import grouped as kernels
from kronbit.kernels.grouped import STRIP, Field
from kronbit.kernels.launch import launch
from kronbit.quantization import codebook
from kronbit.tables import (
    LANES,
    Chunk,
    Precision,
    TableBlock,
    TableWave,
    block_size,
    make_waves,
)

if TYPE_CHECKING:
    from kronbit.preconditioner import Preconditioner

_COLUMNS = 256
_DEPTH, _WARPS, _STAGES = 64, 4, 3


@dataclass
class _Way:
    """Tables and graphs for gradients of one precision.

    Attributes:
        precision: How products are taken.
        waves: The members' blocks.
        squares: Takes the sums of squares of a wave's programs.
        warm: Values of ``zero_nonfinite`` that have been run: their kernels are compiled.
        graphs: The step as a graph by ``zero_nonfinite``; ``None`` where capture was refused.
    """

    precision: Precision
    waves: list[TableWave]
    squares: Tensor
    warm: set[bool] = field(default_factory=set)
    graphs: dict[bool, torch.cuda.CUDAGraph | None] = field(default_factory=dict)


class GroupedProducts:
    """Preconditions the members of one device.

    Args:
        preconditioner: Members, blocks and factors.
        wanted: The members that will be asked for.
        precise: Whether products take 16 bits of the roots and gradients, not 8.
        graphs: Whether to capture the step as a CUDA graph.

    Attributes:
        graph_refused: Why a step could not be captured; ``None`` if nothing was refused.
    """

    def __init__(
        self, preconditioner: Preconditioner, wanted: Collection[int], precise: bool, graphs: bool
    ) -> None:
        self._weak, self._wanted, self._precise = weakref.ref(preconditioner), wanted, precise
        ratios = preconditioner.graft_ratio
        self._graphs = graphs and ratios.is_cuda
        self._device = ratios.device
        self._addresses = AddressTable(len(ratios), self._device)
        self._scales = torch.empty_like(ratios)
        self._anchor = torch.zeros(64, dtype=torch.bfloat16, device=self._device)
        self._ways: dict[bool, _Way] = {}
        self.graph_refused: str | None = None

    @property
    def _own(self) -> Preconditioner:
        """The owner, held weakly: see ``KernelProducts``."""
        owner = self._weak()
        assert owner is not None
        return owner

    def precondition(
        self, grads: Mapping[int, Tensor], norms: Tensor, zero_nonfinite: bool
    ) -> None:
        """Write G̃ = Ĝ ‖G‖ / ‖Ĝ‖ over the gradients.

        Args:
            grads: Member -> gradient, such as ``addresses.take`` allows.
            norms: (members,): ‖G‖_F, not finite where the gradient is not.
            zero_nonfinite: Whether a non-finite gradient becomes zero; else it stays as it is.
        """
        way = self._way(grads)
        scratch, held = self._scratch(way), self._held(way, max(wave.held for wave in way.waves))
        self._addresses.fill(
            grads, SCRATCH=self._from_anchor(scratch), HELD=held.data_ptr(), NORMS=norms.data_ptr()
        )
        # Inside of a capture of the user's, the launches become part of that.
        own = self._graphs and not torch.cuda.is_current_stream_capturing()
        # Kernels are compiled in the first step; a graph can only hold compiled ones.
        if own and zero_nonfinite in way.warm and zero_nonfinite not in way.graphs:
            way.graphs[zero_nonfinite] = self._capture(lambda: self._step(way, zero_nonfinite))
        graph = way.graphs.get(zero_nonfinite) if own else None
        if graph is not None:
            graph.replay()
        else:
            self._step(way, zero_nonfinite)
        way.warm.add(zero_nonfinite)

    def look(
        self,
        grads: Mapping[int, Tensor],
        seen: Callable[[Sequence[tuple[TableBlock, Tensor]]], None],
    ) -> None:
        """Compute Ĝ without writing it, and show it: (block, its Ĝ) for a few blocks at a time."""
        way = self._way(grads)
        scratch = self._scratch(way)
        for wave in way.waves:
            for chunk in wave.chunks:
                blocks = [block for block in chunk.blocks if block.member in grads]
                if not blocks:
                    continue
                # Room for this chunk alone: the stack seems to begin before it.
                first = wave.offsets[chunk.blocks[0]]
                held = self._held(way, sum(map(block_size, chunk.blocks)))
                begin = held.data_ptr() - first * held.element_size()
                self._addresses.fill(grads, SCRATCH=self._from_anchor(scratch), HELD=begin)
                self._products(way, wave, chunk)
                seen([(block, _view(held, wave.offsets[block] - first, block)) for block in blocks])

    def _way(self, grads: Mapping[int, Tensor]) -> _Way:
        """In bf16 alone, if no gradient has more bits than that."""
        half = not self._precise and all(g.dtype == torch.bfloat16 for g in grads.values())
        if half not in self._ways:
            precision = Precision(half, self._precise)
            waves = make_waves(self._own, self._wanted, precision, self._device)
            squares = torch.zeros(max(wave.squares for wave in waves), device=self._device)
            self._ways[half] = _Way(precision, waves, squares)
        return self._ways[half]

    def _scratch(self, way: _Way) -> Tensor:
        size = max(wave.scratch for wave in way.waves)
        return torch.empty(size, dtype=torch.bfloat16, device=self._device)

    def _held(self, way: _Way, size: int) -> Tensor:
        dtype = torch.bfloat16 if way.precision.half else torch.float32
        return torch.empty(size, dtype=dtype, device=self._device)

    def _from_anchor(self, scratch: Tensor) -> int:
        """Elements from the anchor to the scratch; both are aligned to much more than that."""
        return (scratch.data_ptr() - self._anchor.data_ptr()) // scratch.element_size()

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Record a step as a graph. It allocates nothing, and nothing waits for the device."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(torch.cuda.Stream(self._device)):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self.graph_refused = str(error).splitlines()[0]
            return None
        return graph

    def _step(self, way: _Way, zero_nonfinite: bool) -> None:
        addresses = self._addresses.tensor
        for wave in way.waves:
            self._in_lanes(way, wave, self._products)
            launch(
                kernels.graft_kernel,
                (len(wave.members),),
                wave.members,
                addresses,
                way.squares,
                self._scales,
                self._own.graft_ratio,
                self._own.ungrafted,
                ZERO_NONFINITE=zero_nonfinite,
                BLOCK=256,
            )
            self._in_lanes(way, wave, self._write)

    def _write(self, way: _Way, wave: TableWave, chunk: Chunk) -> None:
        """G̃ of a chunk's blocks over the gradients."""
        if not wave.fits:
            self._products(way, wave, chunk)
        launch(
            kernels.scatter_kernel,
            (len(chunk.strips),),
            chunk.strips,
            wave.lines,
            self._addresses.tensor,
            self._scales,
            HALF=way.precision.half,
            ROWS=STRIP,
            COLUMNS=_COLUMNS,
        )

    def _in_lanes(
        self, way: _Way, wave: TableWave, work: Callable[[_Way, TableWave, Chunk], None]
    ) -> None:
        """Work on all chunks; in a graph, so that one fills the gaps of another."""
        if self._device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            for chunk in wave.chunks:
                work(way, wave, chunk)
            return
        here = torch.cuda.current_stream(self._device)
        lanes = [here, *(torch.cuda.Stream(self._device) for _ in range(LANES - 1))]
        for lane in lanes[1:]:
            lane.wait_stream(here)
        for chunk in wave.chunks:
            with torch.cuda.stream(lanes[chunk.lane]):
                work(way, wave, chunk)
        for lane in lanes[1:]:
            here.wait_stream(lane)

    def _products(self, way: _Way, wave: TableWave, chunk: Chunk) -> None:
        """Ĝ of a chunk's blocks into the held stack, and their squares."""
        addresses = self._addresses.tensor
        for quantizer, tiles in chunk.roots:
            coded = quantizer.bits < 32
            launch(
                kernels.roots_kernel,
                (len(tiles),),
                tiles,
                wave.lines,
                addresses,
                self._anchor,
                codebook(quantizer.mapping, quantizer.bits, self._device) if coded else way.squares,
                PRECISE=self._precise,
                BITS=quantizer.bits,
                BLOCK=quantizer.block_size,
                ROWS=STRIP,
                COLUMNS=_COLUMNS,
            )
        launch(
            kernels.gather_kernel,
            (len(chunk.strips),),
            chunk.strips,
            wave.lines,
            addresses,
            self._anchor,
            TO=int(Field.X),
            HALF=way.precision.half,
            ROWS=STRIP,
            COLUMNS=_COLUMNS,
        )
        source, target = int(Field.X), int(Field.Y)
        for number, by in enumerate(self._own.rule, 1):
            launch(
                kernels.pass_kernel,
                (len(chunk.tiles),),
                chunk.tiles,
                wave.lines,
                addresses,
                self._anchor,
                way.squares,
                chunk.square,
                SOURCE=source,
                TARGET=target,
                BY_LEFT=by.left,
                BY_RIGHT=by.right,
                PRECISE=self._precise,
                HALF=way.precision.half,
                LAST=number == len(self._own.rule),
                TILE_M=way.precision.tile[0],
                TILE_N=way.precision.tile[1],
                DEPTH=_DEPTH,
                num_warps=_WARPS,
                num_stages=_STAGES,
            )
            source, target = target, source


def _view(held: Tensor, start: int, block: TableBlock) -> Tensor:
    return held[start : start + block_size(block)].view(block.group.shape)
