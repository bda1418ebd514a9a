"""Messages between ranks: numbers, and tensors as bytes in pieces that fit the workspace."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Streams: TypeAlias = list[list[Tensor]]  # tensors for each rank
_ALIGNMENT, _SMALLEST_PIECE = 16, 2**20  # bytes


class Link:
    """A process group that exchanges tensors of a device.

    Attributes:
        device: Device of the messages, which may differ from the device of the tensors.
        rank: This rank within the group.
        ranks: Number of ranks in the group.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        transport = message_device(group, device)
        if transport is None:
            raise ValueError(
                f"process_group cannot send tensors on {device.type}: initialise it with a backend "
                "for that device"
            )
        self.group, self.device = group, transport
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def any_rank(self, flag: bool) -> bool:
        """True on all ranks if the flag is true on any rank. Waits for the other ranks."""
        return any(self.sums([flag]))

    @contextmanager
    def together(self, problem: str) -> Iterator[None]:
        """Raise an error on all ranks if one of them fails inside. Waits for the other ranks.

        Ranks that have not failed raise a RuntimeError with the message ``problem``, in which
        ``{rank}`` is the first rank that has failed, and ``{ranks}`` the number of ranks.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # raised below: the other ranks wait for this one
            failure = error
        failed_here = failure is not None
        failed = self.sums([failed_here and rank == self.rank for rank in range(self.ranks)])
        if failure is not None:
            raise failure
        if any(failed):
            raise RuntimeError(problem.format(rank=failed.index(1), ranks=self.ranks))

    def sums(self, numbers: Sequence[int]) -> list[int]:
        """Return the sum of each number over all ranks."""
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, group=self.group)
        return tensor.tolist()

    def agree(self, *contents: bytes) -> list[bool]:
        """Return, for each of ``contents``, True if all ranks have the same. Compares hashes."""
        hashes = [hashlib.blake2b(content, digest_size=8).digest() for content in contents]
        numbers = [int.from_bytes(digest, "little", signed=True) for digest in hashes]
        local = torch.tensor(numbers, device=self.device)
        gathered = local.new_empty(self.ranks, len(numbers))
        dist.all_gather(list(gathered), local, group=self.group)
        return (gathered == gathered[0]).all(0).tolist()

    def objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Values are pickled."""
        gathered: list[Any] = [None] * self.ranks
        on_gpu = self.device.type == "cuda"
        with torch.cuda.device(self.device) if on_gpu else nullcontext():
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def send_to_first(self, value: Any, sender: int) -> Any:
        """Send an object to the first rank, which returns it; all other ranks return None."""
        box, device = [value], self.device
        first, other = (dist.get_global_rank(self.group, rank) for rank in (0, sender))
        if sender != 0 and self.rank == sender:
            dist.send_object_list(box, first, group=self.group, device=device)
        elif sender != 0 and self.rank == 0:
            dist.recv_object_list(box, other, group=self.group, device=device)
        return box[0] if self.rank == 0 else None


def message_device(group: ProcessGroup, device: torch.device) -> torch.device | None:
    """Return the device on which a group sends tensors of a device, or None if it cannot."""
    backends = dict(item.split(":") for item in dist.get_backend_config(group).split(","))
    backend = backends.get(device.type)
    if backend is not None and (backend != "gloo" or device.type == "cpu"):
        return device
    return torch.device("cpu") if "cpu" in backends else None


def gather(streams: Streams, link: Link, workspace: int) -> int:
    """Gather the tensors of each rank on all ranks.

    Args:
        streams: For each rank, the contiguous tensors that it sends, of the same shapes on all
            ranks. The tensors of other ranks are overwritten.
        link: The ranks.
        workspace: Limit on the bytes of the buffers. A small limit may be exceeded.

    Returns:
        The bytes that this rank has received.
    """
    lengths = _lengths(streams)
    piece = min(max(lengths), max(_SMALLEST_PIECE, workspace // (link.ranks + 1)))
    piece = -(-piece // _ALIGNMENT) * _ALIGNMENT
    if piece == 0:
        return 0
    sent = torch.empty(piece, dtype=torch.uint8, device=link.device)
    received = torch.empty(link.ranks * piece, dtype=torch.uint8, device=link.device).split(piece)
    for start in range(0, max(lengths), piece):
        copy_all(_overlaps(sent, streams[link.rank], start))
        dist.all_gather(list(received), sent, group=link.group)
        for rank, stream in enumerate(streams):
            if rank != link.rank:
                overlaps = _overlaps(received[rank], stream, start)
                copy_all((tensor, message) for message, tensor in overlaps)
    return sum(lengths) - lengths[link.rank]


def exchange(sent: Streams, received: Streams, link: Link) -> int:
    """Send tensors to each rank and receive tensors from it, by one uneven all-to-all.

    Args:
        sent: For each rank, contiguous tensors to send.
        received: For each rank, contiguous tensors that receive its values.
        link: The ranks.

    Returns:
        The bytes that this rank has sent to others.
    """
    out_sizes, in_sizes = _lengths(received), _lengths(sent)
    out = torch.empty(sum(out_sizes), dtype=torch.uint8, device=link.device)
    sources, targets = _bytes_of_all(sent), _bytes_of_all(received)
    packed = torch.cat(sources).to(link.device) if sources else out[:0]
    dist.all_to_all_single(out, packed, out_sizes, in_sizes, group=link.group)
    copy_all(zip(targets, out.split([target.numel() for target in targets]), strict=True))
    return sum(in_sizes) - in_sizes[link.rank]


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair to the first."""
    pairs = list(pairs)
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _lengths(streams: Streams) -> list[int]:
    return [sum(tensor.nbytes for tensor in stream) for stream in streams]


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, as a view."""
    return tensor.view(-1).view(torch.uint8)


def _bytes_of_all(streams: Streams) -> list[Tensor]:
    return [_bytes_of(tensor) for stream in streams for tensor in stream if tensor.numel()]


def _overlaps(
    buffer: Tensor, stream: Sequence[Tensor], start: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of a view of the buffer and the bytes of a tensor that it holds.

    The buffer holds the bytes of the stream from byte ``start`` on.
    """
    first, stop = 0, start + buffer.numel()
    for tensor in stream:
        last = first + tensor.nbytes
        a, b = max(first, start), min(last, stop)
        if a < b:
            yield buffer[a - start : b - start], _bytes_of(tensor)[a - first : b - first]
        first = last
