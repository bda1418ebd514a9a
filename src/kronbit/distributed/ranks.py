"""The other ranks, as an optimizer sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from kronbit.blocks.blocking import Blocking, Route
from kronbit.blocks.gradients import plain_dtypes
from kronbit.config import GLOBAL_OPTIONS, GROUP_OPTIONS, Config
from kronbit.distributed.collectives import Link, message_device
from kronbit.distributed.exchange import Exchange
from kronbit.distributed.owners import Owners
from kronbit.distributed.sharding import is_distributed, local_gradients, placement_of
from kronbit.messages import NamedParameter, parameter_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from kronbit.blocks.gradients import StepGradients


class Ranks:
    """The ranks that take steps together: where state is, and which rank does which work.

    Args:
        exchange: Divides work among ranks that hold the same state; None without such ranks.
        owners: Owners of the parameters; None if every rank has the state of all parameters.
        link: All ranks that take steps together; None if this rank works alone.
        localises: True if parameters are DTensors, of which this rank uses the local part.

    Attributes:
        alone: True if this rank preconditions its gradients as they are.
        agreed: True after ``agree``.
    """

    def __init__(
        self,
        exchange: Exchange | None = None,
        owners: Owners | None = None,
        link: Link | None = None,
        localises: bool = False,
    ) -> None:
        self.exchange, self.owners = exchange or Exchange(), owners
        self._link, self.localises = link, localises
        self.alone = owners is None and not localises
        self.agreed = False

    def owns(self, p: Tensor) -> bool:
        """True if this rank has the state of a parameter."""
        return self.owners is None or self.owners.owns(p)

    def route(self, route: Route, p: Tensor, config: Config) -> Blocking | str:
        """Return how this rank cuts a parameter, or why it does not precondition it."""
        return route(p, config) if self.owns(p) else "another rank has it"

    @property
    def first(self) -> bool:
        """True if this rank is the first of all that take steps together."""
        links = self.exchange.link, None if self.owners is None else self.owners.link
        return all(link is None or link.rank == 0 for link in links)

    def whole(
        self, gradients: StepGradients, any_due: Callable[[], bool]
    ) -> AbstractContextManager[Any]:
        """Provide gradients as this rank preconditions them; see ``Owners.whole``."""
        if self.owners is not None:
            return self.owners.whole(gradients, careful=any_due())
        if self.localises:
            grads = local_gradients(gradients)
            gradients = gradients._replace(grads=grads, dtypes=plain_dtypes(grads))
        return nullcontext(gradients)

    def grow(self, larger: Ranks) -> None:
        """Become ``larger``, which includes new parameters. Known parameters keep their owners."""
        if self.owners is not None and larger.owners is not None:
            larger.owners.owner_of |= self.owners.owner_of
        if self.exchange.link is not None and larger.exchange.link is not None:
            larger.exchange = self.exchange
        vars(self).update(vars(larger))  # in place: a trainer's wrapper cannot set our attributes

    def figures(self) -> dict[str, int]:
        """Return the figures that ``diagnostics`` shows; see ``Exchange`` and ``Owners``."""
        figures = {}
        if self.exchange.link is not None:
            figures = {"replicas": self.exchange.link.ranks, "apart": self.exchange.apart}
            figures["received_bytes"] = self.exchange.received
        if self.owners is not None:
            figures |= {"owners": self.owners.link.ranks, "gradient_bytes": self.owners.bytes}
        return figures

    def refuse_partial_state(self) -> None:
        """Raise an error if this rank has only a part of the state."""
        if self.owners is not None:
            raise RuntimeError(
                "with shard_state=True, a rank has only a part of the state: call "
                "kronbit.consolidate_state_dict(optimizer) on all ranks, and save its result on "
                "the first"
            )

    def any_rank(self, flag: bool) -> bool:
        """True if the flag is true on any rank that waits for this one during the step."""
        if self._link is not None and (self.owners is not None or self.localises):
            return self._link.any_rank(flag)
        return flag

    def together(self) -> AbstractContextManager[None]:
        """Raise an error on all owners if one of them fails inside; see ``Owners.together``."""
        return nullcontext() if self.owners is None else self.owners.together()

    def agree(self, agreement_lines: Callable[[], list[str]]) -> None:
        """Compare the ``agreement_lines`` of all ranks, before their first step.

        Raises:
            RuntimeError: On every rank, if they differ.
        """
        ranks = [] if self._link is None else self._link.objects(agreement_lines())
        for rank, lines in enumerate(ranks):
            for expected, line in zip_longest(ranks[0], lines, fillvalue="nothing more"):
                if line != expected:
                    raise RuntimeError(
                        f"rank {rank} of {len(ranks)} has {line}, where rank 0 has {expected}: "
                        "ranks must have the same parameters and options. Set process_group "
                        "to the ranks that do, or to False to let every rank work alone"
                    )
        self.agreed = True


def agreement_lines(
    optimizer: Optimizer, base: Optimizer, config: Config, state: Mapping[Tensor, Any]
) -> list[str]:
    """Describe, line by line, everything that must be equal on ranks that step together."""
    lines = [type(optimizer).__name__, f"base {type(base).__name__}"]
    lines += [f"{name}={getattr(config, name)!r}" for name in sorted(GLOBAL_OPTIONS)]
    for index, group in enumerate(optimizer.param_groups):
        options = config.for_group(group)
        lines += [f"group {index}: {name}={getattr(options, name)!r}" for name in GROUP_OPTIONS]
        lines += [
            f"{parameter_name(group, index, number)} of shape {tuple(p.shape)} and {p.dtype}"
            for number, p in enumerate(group["params"])
        ]
    steps = {entry.get("step", 0) for entry in state.values()}
    return [*lines, f"parameters after {sorted(steps) or [0]} steps"]


def find_ranks(
    parameters: Sequence[NamedParameter],
    config: Config,
    process_group: ProcessGroup | Literal[False] | None,
    route: Route,
) -> Ranks:
    """Find the other ranks, from the names, parameters and options of all groups.

    Raises:
        ValueError: If ranks cannot communicate, or options do not suit them.
    """
    alone = Ranks(localises=any(is_distributed(p) for _, p, _ in parameters))
    blockings, placements = {}, {}
    for _, p, options in parameters:
        blocking, placement = route(p, options), placement_of(p)
        if isinstance(blocking, Blocking):
            blockings[p] = blocking
        # Even without rows on this rank: all ranks must reach the same decision.
        if options.precondition and placement is not None:
            placements[p] = placement
    if not (blockings or placements) or not (dist.is_available() and dist.is_initialized()):
        return alone
    device, exchange = parameters[0][1].device, None
    placement = next(iter(placements.values()), None)  # all are on one mesh
    if placement is None:
        link = _link(process_group, device)
        if link is None:
            return alone
        if not config.shard_state:
            exchange = Exchange(link, given=process_group is not None)
            return Ranks(exchange, link=link, localises=alone.localises)
    else:
        link, copies = Link(placement.group(), device), placement.copies()
        if copies is not None and process_group is not False:
            exchange = Exchange(Link(copies, device), given=True)
        if config.blocks == "local":
            return Ranks(exchange, link=link, localises=True)
        blockings = {p: blockings[p] for p in blockings if p in placements}
    if any(options.stagger for _, _, options in parameters):
        raise ValueError(
            "stagger=True spreads the blocks of all parameters over steps, but if parameters have "
            "owners (FSDP2, shard_state=True), no rank has all blocks: omit stagger"
        )
    owners = Owners(link, config, placement)
    owners.choose(blockings)
    return Ranks(exchange, owners, link)


def _link(process_group: ProcessGroup | Literal[False] | None, device: torch.device) -> Link | None:
    """Return the ranks of a process group (default: all), or None if this rank works alone."""
    group = process_group or dist.group.WORLD
    if process_group is False or group is None or dist.get_rank(group) < 0:
        return None
    if process_group is None and (
        dist.get_world_size(group) == 1 or message_device(group, device) is None
    ):
        return None
    return Link(group, device)
