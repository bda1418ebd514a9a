"""The ordinary step on a GPU, in a few launches that form one CUDA graph.

Ĝ = L̂ G R̂ is the preconditioned gradient, and G̃ = Ĝ ‖G‖ / ‖Ĝ‖ the grafted one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from kronbit.blocks.groups import DeviceStacks
from kronbit.gpu.addresses import AddressTable, Integers
from kronbit.gpu.precision import Precision
from kronbit.gpu.tables import Chunk, TableWave, held_size, make_tables
from kronbit.kernels import grouped as kernels
from kronbit.kernels.launch import launch
from kronbit.quantization import codebook
from kronbit.quantization.reference import SCALE_BITS, SCALE_MAPPING

_COLUMNS = 256  # columns of a strip that are copied together
_DECODED = 128  # columns of a strip that are decoded together


class GroupedProducts:
    """Preconditions members of one device by kernels.

    An ``AddressTable`` holds the members' gradients in order; more entries may follow. A member
    whose address is 0 is skipped.

    Args:
        stacks: Members, blocks and factors.
        wanted: The members that are preconditioned.
        precision: Precision of the products.
        channels_last: Members whose gradients are in channels-last order.

    Attributes:
        scratch_bytes: Size of a step's scratch memory; a multiple of the alignment.
        held_bytes: Size of the memory that holds Ĝ.
    """

    def __init__(
        self,
        stacks: DeviceStacks,
        wanted: Collection[int],
        precision: Precision,
        channels_last: Collection[int] = (),
    ) -> None:
        self._stacks, self._precision, self._device = stacks, precision, stacks.device
        self._tables = tables = make_tables(stacks, wanted, precision, channels_last)
        self.scratch_bytes = tables.scratch * torch.bfloat16.itemsize
        self.held_bytes = tables.held * precision.held.itemsize
        self._buffers = Integers(kernels.BUFFERS, self._device)
        self._scales = torch.empty_like(stacks.graft_ratio)
        # One sum of squares per program of a product.
        self._squares = torch.zeros(tables.squares, dtype=torch.float32, device=self._device)
        # Scratch is addressed relative to the anchor, whichever 16-bit dtype it holds.
        anchor = torch.zeros(64, dtype=torch.bfloat16, device=self._device)
        self._anchors = {True: anchor, False: anchor.view(torch.float16)}
        # The units of both roots of each block; see ``kernels.grouped``.
        self._units = torch.ones(2 * len(tables.lines), dtype=torch.float32, device=self._device)

    def set_buffers(self, scratch: int, held: int, norms: Tensor) -> None:
        """Write the addresses of a step's buffers, and of ‖G‖_F of each gradient."""
        anchor = self._anchors[True]
        from_anchor = (scratch - anchor.data_ptr()) // anchor.itemsize  # both are aligned
        self._buffers.write([from_anchor, held, norms.data_ptr()])

    def compare(self, addresses: AddressTable, norms: Tensor, half: Precision) -> Tensor:
        """Return ⟨a, b⟩, ⟨a, a⟩, ⟨b, b⟩, (members, 3): a is Ĝ in this precision, b in ``half``.

        Args:
            addresses: Table of the gradients.
            norms: ‖G‖_F of each gradient.
            half: Precision of b.
        """
        tables = self._tables
        scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=self._device)
        sums = torch.zeros(tables.squares, 3, dtype=torch.float32, device=self._device)
        for chunk in (chunk for wave in tables.waves for chunk in wave.chunks):
            # Hold Ĝ of this chunk alone, at the offsets that it has in the whole held stack.
            size = sum(map(held_size, chunk.blocks))
            held = torch.empty(size, dtype=half.held, device=self._device)
            begin = held.data_ptr() - tables.offsets[chunk.blocks[0]] * held.element_size()
            self.set_buffers(scratch.data_ptr(), begin, norms)
            self._products(chunk, addresses, half, None)
            self._products(chunk, addresses, self._precision, sums)
            del held
        of_members = sums.new_zeros(len(self._scales), 3)
        members, starts, stops = tables.members.long().unbind(1)
        by_member = torch.segment_reduce(sums, "sum", lengths=stops - starts, unsafe=True)
        return of_members.index_copy_(0, members, by_member)

    def step(self, addresses: AddressTable) -> None:
        """Launch the kernels that write G̃ over the gradients. Allocates nothing."""
        for wave in self._tables.waves:
            for chunk in wave.chunks:
                self._products(chunk, addresses, self._precision, None)
            self._graft(wave, addresses)
            self._write(wave, addresses)

    def _graft(self, wave: TableWave, addresses: AddressTable) -> None:
        """Compute ‖G‖ / ‖Ĝ‖ of a wave's members."""
        read = self._tables.members, wave.members.start, addresses.tensor, self._buffers.tensor
        written = self._scales, self._stacks.graft_ratio, self._stacks.ungrafted
        launch(
            kernels.graft_kernel, (len(wave.members),), *read, self._squares, *written, BLOCK=256
        )

    def _write(self, wave: TableWave, addresses: AddressTable) -> None:
        """Write G̃ of a wave over the gradients."""
        scatter, scales = kernels.scatter_kernel, (self._precision.precise, self._scales)
        if wave.fits:
            for wide, run in groupby(wave.chunks, lambda chunk: chunk.wide):
                strips = [chunk.strips for chunk in run]
                span = range(strips[0].start, strips[-1].stop)
                self._move(scatter, span, wide, addresses, *scales)
            return
        for chunk in wave.chunks:
            self._products(chunk, addresses, self._precision, None)
            self._move(scatter, chunk.strips, chunk.wide, addresses, *scales)

    def _move(
        self,
        kernel: Any,
        strips: range,
        wide: bool,
        addresses: AddressTable,
        precise: bool,
        numbers: Tensor,
    ) -> None:
        """Gather or scatter rows, with one program for each strip of gradients."""
        tables = self._tables.programs[-1], strips.start, self._tables.lines
        arguments = *tables, addresses.tensor, self._buffers.tensor, numbers
        constants = {"ROWS": kernels.STRIP, "COLUMNS": _COLUMNS, "PRECISE": precise}
        constants |= {"WIDE": wide and addresses.aligned}
        launch(kernel, (len(strips),), *arguments, **constants)

    def _products(
        self, chunk: Chunk, addresses: AddressTable, precision: Precision, sums: Tensor | None
    ) -> None:
        """Compute Ĝ of a chunk's blocks into the held stack, and ‖Ĝ‖² of each program.

        If ``sums`` is given, leave the held stack unchanged, and write sums for ``compare``.
        """
        if not chunk.wide:
            precision = replace(precision, direct=False)
        self._restore(chunk, addresses, precision)
        if not precision.direct:
            to_X = precision.precise, self._anchors[precision.precise]
            self._move(kernels.gather_kernel, chunk.strips, chunk.wide, addresses, *to_X)
        self._passes(chunk, addresses, precision, sums)

    def _restore(self, chunk: Chunk, addresses: AddressTable, precision: Precision) -> None:
        """Restore the roots of a chunk's blocks into the scratch."""
        where = self._tables.lines, addresses.tensor, self._buffers.tensor
        scratch = self._anchors[precision.precise], self._units
        squares = codebook(SCALE_MAPPING, SCALE_BITS, self._device)
        for kind, number in chunk.roots:
            programs = self._tables.programs[number]
            bits, mapping, block_size = kind.quantizer.code_format
            # At 32 bits there are no codes; any tensor will do.
            table = codebook(mapping, bits, self._device) if bits < 32 else self._squares
            constants = {"PRECISE": precision.precise, "DIRECT": precision.direct, "BITS": bits}
            constants |= {"WORDS": kind.words, "COMPACT": kind.compact, "TILE": kind.tile}
            constants |= {"TILES": kernels.tiles_per_program(kind.tile), "BLOCK": block_size}
            constants |= {"ROWS": kernels.STRIP, "COLUMNS": _DECODED}
            arguments = programs, *where, *scratch, table, squares
            launch(kernels.roots_kernel, (len(programs),), *arguments, **constants)

    def _passes(
        self, chunk: Chunk, addresses: AddressTable, precision: Precision, sums: Tensor | None
    ) -> None:
        """Compute Ĝ of a chunk's blocks from X or G."""
        programs = self._tables.programs[chunk.tiles]
        tables = programs, self._tables.lines, addresses.tensor, self._buffers.tensor
        scratch = self._anchors[precision.precise], self._units
        source, target = kernels.X.value, kernels.Y.value
        for number, by in enumerate(self._stacks.rule, 1):
            last = number == len(self._stacks.rule)
            constants = {"SOURCE": source, "TARGET": target, "BY_LEFT": by.left}
            constants |= {"BY_RIGHT": by.right, "PRECISE": precision.precise}
            constants |= {"DIRECT": precision.direct and number == 1, "LAST": last}
            constants |= {"COMPARE": last and sums is not None, **self._tables.shape}
            arguments = *tables, *scratch, self._squares if sums is None else sums, chunk.square
            launch(kernels.pass_kernel, (len(programs),), *arguments, **constants)
            source, target = target, source
