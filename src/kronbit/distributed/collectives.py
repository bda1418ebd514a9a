"""Tensors from rank to rank, as bytes, in pieces that the workspace can take."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ALIGNED, _LEAST = 16, 2**20  # bytes of a piece


def digest(content: bytes) -> int:
    """A number of 64 bits that tells contents apart."""
    found = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, a view."""
    return tensor.view(-1).view(torch.uint8)


def gather(
    streams: Sequence[Sequence[Tensor]], group: ProcessGroup, device: torch.device, workspace: int
) -> int:
    """Give every rank what each of them has.

    Args:
        streams: Of each rank, contiguous tensors that it has the values of; all ranks know their
            shapes, and take the values there.
        group: The ranks.
        device: Where bytes travel; tensors may be elsewhere.
        workspace: Bound of the bytes that are on their way at a time, but for small ones.

    Returns:
        The bytes that this rank has received from others.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    lengths = [sum(tensor.nbytes for tensor in own) for own in streams]
    piece = min(max(lengths), max(_LEAST, workspace // (ranks + 1)))
    piece = -(-piece // _ALIGNED) * _ALIGNED
    if piece == 0:
        return 0
    sent = torch.empty(piece, dtype=torch.uint8, device=device)
    everything = torch.empty(ranks * piece, dtype=torch.uint8, device=device)
    for start in range(0, max(lengths), piece):
        mine = list(_overlaps(streams[rank], start, start + piece))
        if mine:
            torch._foreach_copy_([sent[here] for here, _ in mine], [own for _, own in mine])
        dist.all_gather(list(everything.split(piece)), sent, group=group)
        for other, stream in enumerate(streams):
            theirs = list(_overlaps(stream, start, start + piece)) if other != rank else []
            if theirs:
                got = everything[other * piece : (other + 1) * piece]
                torch._foreach_copy_([own for _, own in theirs], [got[here] for here, _ in theirs])
    return sum(lengths) - lengths[rank]


def _overlaps(stream: Sequence[Tensor], start: int, stop: int) -> Iterator[tuple[slice, Tensor]]:
    """What of a stream lies between two bytes: where it is there, and the bytes themselves."""
    first = 0
    for tensor in stream:
        last = first + tensor.nbytes
        a, b = max(first, start), min(last, stop)
        if a < b:
            yield slice(a - start, b - start), as_bytes(tensor)[a - first : b - first]
        first = last


def exchange(
    sent: Sequence[Sequence[Tensor]],
    received: Sequence[Sequence[Tensor]],
    group: ProcessGroup,
    device: torch.device,
) -> int:
    """Send tensors to each rank and take others from each, in one uneven all-to-all.

    Args:
        sent: For each rank, contiguous tensors.
        received: From each rank, contiguous tensors that take its values.
        group: The ranks.
        device: Where bytes travel.

    Returns:
        The bytes that this rank has sent to others.
    """
    rank = dist.get_rank(group)
    out_sizes, in_sizes = ([sum(x.nbytes for x in own) for own in way] for way in (received, sent))
    out = torch.empty(sum(out_sizes), dtype=torch.uint8, device=device)
    mine = [as_bytes(tensor) for own in sent for tensor in own if tensor.numel()]
    into = torch.cat(mine).to(device) if mine else out[:0]
    dist.all_to_all_single(out, into, out_sizes, in_sizes, group=group)
    targets = [as_bytes(tensor) for own in received for tensor in own if tensor.numel()]
    if targets:
        torch._foreach_copy_(targets, list(out.split([target.numel() for target in targets])))
    return sum(in_sizes) - in_sizes[rank]
