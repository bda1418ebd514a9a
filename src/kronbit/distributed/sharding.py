"""Parameters that are sharded over ranks: their placement, and checks that it is supported."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from kronbit.blocks.gradients import StepGradients


def is_distributed(p: Tensor) -> TypeGuard[DTensor]:
    """True if a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # imported if any DTensor exists
    return module is not None and isinstance(p, module.DTensor)


class Placement(NamedTuple):
    """The mesh of a parameter whose rows lie on several ranks.

    Attributes:
        mesh: The ranks.
        dim: Axis of the mesh along which rows are divided.
    """

    mesh: DeviceMesh
    dim: int

    def group(self) -> ProcessGroup:
        """Return the ranks among which rows are divided."""
        return self.mesh.get_group(self.dim)

    def copies(self) -> ProcessGroup | None:
        """Return the ranks that have the same rows as this one, or None if there are no others."""
        others = [i for i in range(self.mesh.ndim) if i != self.dim and self.mesh.size(i) > 1]
        return self.mesh.get_group(others[0]) if others else None


def refuse(name: str, p: Tensor, shards: bool, known: Iterable[Tensor] = ()) -> None:
    """Refuse a parameter whose matrix cannot be assembled.

    ``shards`` is True if rows on several ranks can be assembled. ``known`` are the parameters
    accepted so far.

    Raises:
        TypeError: If it is refused. The message names the parameter and the remedy.
    """
    problem = _problem(p, shards, known)
    if problem is not None:
        raise TypeError(f"{name} is {problem}")


def _problem(p: Tensor, shards: bool, known: Iterable[Tensor]) -> str | None:
    """Return why the matrix of a parameter cannot be assembled, with the remedy, or None."""
    if hasattr(p, "ds_id") or hasattr(p, "ds_tensor"):
        return (
            "partitioned by DeepSpeed's ZeRO, which hides its shape: use fully_shard (FSDP2), or "
            "DistributedDataParallel"
        )
    if getattr(p, "_is_flat_param", False):
        return (
            "a FlatParameter of FSDP 1, which joins matrices into a vector: use fully_shard (FSDP2)"
        )
    if not is_distributed(p):
        return None
    if not shards:
        return (
            "a DTensor, of which this rank holds a part: only Shampoo and CASPR support sharded "
            "parameters; use one of them, or DistributedDataParallel"
        )
    parts = [placement for placement in p.placements if not placement.is_replicate()]
    fault = None
    if len(parts) > 1:
        fault = f"with placements {p.placements} on several axes of a mesh"
    elif parts and parts[0] != torch.distributed.tensor.Shard(0):
        fault = f"with placement {parts[0]}, not Shard(0)"
    elif sum(size > 1 for size in p.device_mesh.shape) > 2:
        fault = f"on a mesh of {p.device_mesh.ndim} axes"
    if fault is not None:
        return (
            f"a DTensor {fault}: shard parameters with fully_shard along their first axis only, "
            "or put this one into a group with precondition=False"
        )
    placement, others = placement_of(p), filter(None, map(placement_of, known))
    if placement is not None and next(others, placement) != placement:
        return (
            f"sharded over another mesh ({placement.mesh}) than earlier parameters: build an "
            "optimizer for each mesh"
        )
    return None


def placement_of(p: Tensor) -> Placement | None:
    """Return the placement of a parameter's rows, or None if this rank has all of them."""
    if not is_distributed(p):
        return None
    sharded = [i for i, placement in enumerate(p.placements) if placement.is_shard()]
    return Placement(p.device_mesh, sharded[0]) if sharded else None


def local(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor, which shares its memory."""
    return tensor._local_tensor if is_distributed(tensor) else tensor


def local_gradients(gradients: StepGradients) -> list[Tensor]:
    """Return the local parts of gradients, redistributed to the placements of the parameters."""
    for i, (p, grad) in enumerate(zip(gradients.params, gradients.grads, strict=True)):
        if is_distributed(p) and is_distributed(grad) and grad.placements != p.placements:
            p.grad = gradients.grads[i] = grad.redistribute(placements=p.placements)
    return list(map(local, gradients.grads))


def first_rows(p: Tensor) -> str:
    """Return a prefix for keys that identifies this rank's rows of a parameter."""
    placement = placement_of(p)
    if placement is None:
        return ""
    rank, ranks = placement.mesh.get_local_rank(placement.dim), placement.mesh.size(placement.dim)
    rows = p.shape[0]
    return f"rows_{min(rank * -(-rows // ranks), rows)}_"  # only the last ranks may have fewer
