"""The ordinary step on a GPU: Ĝ and G̃ of all parameters by a few launches, as one CUDA graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kronbit.addresses import AddressTable, Integers
from kronbit.kernels import grouped as kernels
from kronbit.kernels.launch import launch
from kronbit.kernels.lines import STRIP, Buffer, Field
from kronbit.quantization import codebook
from kronbit.rules import Pass
from kronbit.tables import (
    LANES,
    Chunk,
    Precision,
    TableWave,
    held_size,
    make_waves,
)

if TYPE_CHECKING:
    from kronbit.preconditioner import Preconditioner

_COLUMNS = 256
_HALF = Precision(precise=False)


@cache
def _other_lanes(device: torch.device) -> list[torch.cuda.Stream]:
    """Streams for all lanes but the first: always the same, since torch has few to give."""
    return [torch.cuda.Stream(device) for _ in range(LANES - 1)]


class GroupedProducts:
    """Preconditions the members of one device, or some of them.

    Addresses, below, are those of the members' gradients in order (``AddressTable``); more may
    follow. A member whose address is 0 is passed over.

    Args:
        preconditioner: Members, blocks and factors.
        wanted: The members that will be asked for.
        precision: How products are taken.

    Attributes:
        scratch_size: Elements of 16 bits that a step needs as scratch.
        held_bytes: What it needs to hold Ĝ.
    """

    def __init__(
        self, preconditioner: Preconditioner, wanted: Collection[int], precision: Precision
    ) -> None:
        self._weak, self._precision = weakref.ref(preconditioner), precision
        ratios = preconditioner.graft_ratio
        self._device = ratios.device
        self._waves, self._shape = make_waves(preconditioner, wanted, precision, self._device)
        self.scratch_size = max(wave.scratch for wave in self._waves)
        self.held_bytes = max(wave.held for wave in self._waves) * precision.held.itemsize
        self._buffers = Integers(Buffer.LENGTH, self._device)
        self._scales = torch.empty_like(ratios)
        # Of a wave's programs.
        self._squares = torch.zeros(max(w.squares for w in self._waves), device=self._device)
        # What scratch is seen from, as either type of numbers.
        anchor = torch.zeros(64, dtype=torch.bfloat16, device=self._device)
        self._anchors = {True: anchor, False: anchor.view(torch.float16)}
        # Of both roots of each of a wave's blocks.
        self._units = torch.ones(2 * max(len(w.lines) for w in self._waves), device=self._device)

    @property
    def _own(self) -> Preconditioner:
        """The owner, held weakly: see ``KernelProducts``."""
        owner = self._weak()
        assert owner is not None
        return owner

    def place(self, scratch: Tensor, held: Tensor, norms: Tensor) -> None:
        """Note where a step finds its buffers, and ‖G‖_F of each gradient."""
        self._buffers.write([self._from_anchor(scratch), held.data_ptr(), norms.data_ptr()])

    def compare(self, addresses: AddressTable, norms: Tensor) -> Tensor:
        """(members, 3): ⟨a, b⟩, ⟨a, a⟩ and ⟨b, b⟩, where a is Ĝ taken so, and b is Ĝ in float16.

        Args:
            addresses: Where the gradients are.
            norms: ‖G‖_F of each.
        """
        found = self._own.graft_ratio.new_zeros(len(self._scales), 3)
        scratch = self._empty(self.scratch_size, torch.bfloat16)
        for wave in self._waves:
            sums = found.new_zeros(wave.squares, 3)
            for chunk in wave.chunks:
                # Room for Ĝ of one chunk alone: the held stack seems to begin before it.
                held = self._empty(sum(map(held_size, chunk.blocks)), _HALF.held)
                begin = held.data_ptr() - wave.offsets[chunk.blocks[0]] * held.element_size()
                self._buffers.write([self._from_anchor(scratch), begin, norms.data_ptr()])
                for precision, into in ((_HALF, self._squares), (self._precision, sums)):
                    self._restore(wave, chunk, addresses, precision)
                    self._gather(wave, chunk, addresses, precision)
                    self._passes(wave, chunk, addresses, precision, into, compare=into is sums)
                del held
            members, starts, stops = wave.members.long().unbind(1)
            by_member = torch.segment_reduce(sums, "sum", lengths=stops - starts, unsafe=True)
            found.index_copy_(0, members, by_member)
        return found

    def _empty(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self._device)

    def _from_anchor(self, scratch: Tensor) -> int:
        """Elements from the anchor to the scratch; both are aligned to much more than that."""
        return (scratch.data_ptr() - self._anchors[True].data_ptr()) // scratch.element_size()

    def step(self, addresses: AddressTable, zero_nonfinite: bool) -> None:
        """Launch what writes G̃ = Ĝ ‖G‖ / ‖Ĝ‖ over the gradients. Allocates nothing.

        Args:
            addresses: Where they are.
            zero_nonfinite: Whether a non-finite gradient becomes zero; else it stays as it is.
        """
        for wave in self._waves:
            self._in_lanes(wave, lambda w, chunk: self._products(w, chunk, addresses))
            launch(
                kernels.graft_kernel,
                (len(wave.members),),
                wave.members,
                addresses.tensor,
                self._buffers.tensor,
                self._squares,
                self._scales,
                self._own.graft_ratio,
                self._own.ungrafted,
                ZERO_NONFINITE=zero_nonfinite,
                BLOCK=256,
            )
            self._in_lanes(wave, lambda w, chunk: self._write(w, chunk, addresses))

    def _write(self, wave: TableWave, chunk: Chunk, addresses: AddressTable) -> None:
        """G̃ of a chunk's blocks over the gradients."""
        if not wave.fits:
            self._products(wave, chunk, addresses)
        launch(
            kernels.scatter_kernel,
            (len(chunk.strips),),
            chunk.strips,
            wave.lines,
            addresses.tensor,
            self._buffers.tensor,
            self._scales,
            PRECISE=self._precision.precise,
            WIDE=chunk.wide and addresses.aligned,
            ROWS=STRIP,
            COLUMNS=_COLUMNS,
        )

    def _in_lanes(self, wave: TableWave, work: Callable[[TableWave, Chunk], None]) -> None:
        """Work on all chunks; in a graph, so that one fills the gaps of another."""
        if self._device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            for chunk in wave.chunks:
                work(wave, chunk)
            return
        here = torch.cuda.current_stream(self._device)
        lanes = [here, *_other_lanes(self._device)]
        for lane in lanes[1:]:
            lane.wait_stream(here)
        for chunk in wave.chunks:
            with torch.cuda.stream(lanes[chunk.lane]):
                work(wave, chunk)
        for lane in lanes[1:]:
            here.wait_stream(lane)

    def _products(self, wave: TableWave, chunk: Chunk, addresses: AddressTable) -> None:
        """Ĝ of a chunk's blocks into the held stack, and their squares."""
        self._restore(wave, chunk, addresses, self._precision)
        self._gather(wave, chunk, addresses, self._precision)
        self._passes(wave, chunk, addresses, self._precision, self._squares)

    def _restore(
        self, wave: TableWave, chunk: Chunk, addresses: AddressTable, precision: Precision
    ) -> None:
        """Roots of a chunk's blocks into the scratch."""
        for quantizer, words, tiles in chunk.roots:
            coded = quantizer.bits < 32
            launch(
                kernels.roots_kernel,
                (len(tiles),),
                tiles,
                wave.lines,
                addresses.tensor,
                self._buffers.tensor,
                self._anchors[precision.precise],
                self._units,
                codebook(quantizer.mapping, quantizer.bits, self._device)
                if coded
                else self._squares,
                PRECISE=precision.precise,
                BITS=quantizer.bits,
                WORDS=words,
                BLOCK=quantizer.block_size,
                ROWS=STRIP,
                COLUMNS=_COLUMNS,
            )

    def _gather(
        self, wave: TableWave, chunk: Chunk, addresses: AddressTable, precision: Precision
    ) -> None:
        """X ← G of a chunk's blocks."""
        launch(
            kernels.gather_kernel,
            (len(chunk.strips),),
            chunk.strips,
            wave.lines,
            addresses.tensor,
            self._buffers.tensor,
            self._anchors[precision.precise],
            PRECISE=precision.precise,
            WIDE=chunk.wide and addresses.aligned,
            ROWS=STRIP,
            COLUMNS=_COLUMNS,
        )

    def _passes(
        self,
        wave: TableWave,
        chunk: Chunk,
        addresses: AddressTable,
        precision: Precision,
        sums: Tensor,
        compare: bool = False,
    ) -> None:
        """Ĝ of a chunk's blocks from X, and sums over what each program has computed."""
        shape = self._shape
        source, target = int(Field.X), int(Field.Y)
        before: Pass | None = None
        for number, by in enumerate(self._own.rule, 1):
            last = number == len(self._own.rule)
            launch(
                kernels.pass_kernel,
                (len(chunk.tiles),),
                chunk.tiles,
                wave.lines,
                addresses.tensor,
                self._buffers.tensor,
                self._anchors[precision.precise],
                self._units,
                sums,
                chunk.square,
                SOURCE=source,
                TARGET=target,
                BY_LEFT=by.left,
                BY_RIGHT=by.right,
                BEFORE_LEFT=before is not None and before.left,
                BEFORE_RIGHT=before is not None and before.right,
                PRECISE=precision.precise,
                LAST=last,
                COMPARE=last and compare,
                TILE_M=shape.tile[0],
                TILE_N=shape.tile[1],
                DEPTH=shape.depth,
                num_warps=shape.warps,
                num_stages=shape.stages,
            )
            source, target, before = target, source, by
