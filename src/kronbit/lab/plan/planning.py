"""The computation behind ``kronbit plan``: memory of a run for each way to store the state."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from kronbit.lab.errors import LabError, one_line
from kronbit.lab.optimizers import ALGORITHMS
from kronbit.lab.plan.activations import Estimate, Passes, measure
from kronbit.lab.plan.networks import Network, resolve_model
from kronbit.lab.plan.rows import Accounts, Row
from kronbit.lab.precision import AMP, DTYPES

# Sorted by the angle between their update and the exact one: docs/memory.md.
_MOST_EXACT_FIRST = ("32", "8", "8-paper", "6+4", "4", "4-eigen", "4-paper", "4-naive", "3")


@dataclass(frozen=True)
class Activations:
    """Bytes that the forward and backward pass of a batch allocate besides parameters."""

    saved: int | None  # saved by autograd when the backward pass starts
    peak: int | None  # of both passes, with the gradients that exist at that moment
    how: str  # how the numbers were obtained, or why they are unknown


@dataclass(frozen=True)
class Plan:
    """Memory of a training run, for each way to store the second-order state."""

    model: str
    algorithm: str
    parameters_count: int
    dtype: str  # of the parameters
    batch: int | None  # examples per pass
    shape: tuple[int, ...] | None  # of an example: (length,), or (channels, side, side)
    base: str
    activations: Activations
    rows: tuple[Row, ...]  # one per optimizer; the first is the base alone
    gpu_bytes: int | None  # None for no limit
    notes: tuple[str, ...]

    def row(self, way: str) -> Row | None:
        """Return the algorithm's row for one of ``WAYS``, such as ``"4"``; ``None`` if absent."""
        return next((row for row in self.rows if row.key == f"{self.algorithm}-{way}"), None)

    def best(self) -> Row | None:
        """Return the most exact row of the algorithm that fits, or ``None``."""
        ranked = (self.row(way) for way in _MOST_EXACT_FIRST)
        return next((row for row in ranked if row is not None and row.fits), None)


def parse_size(text: str) -> int:
    """Return the bytes of ``80GB``, ``24G``, ``80GiB`` or ``81920MiB``.

    GB and MB count as GiB and MiB: a card of 80 GB has 81,920 MiB.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([MGT])(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise LabError(f"{text!r} is not a size of memory: write 80GB, 24G, 80GiB or 81920MiB")
    return int(float(match[1]) * 1024 ** (2 + "MGT".index(match[2].upper())))


def make_plan(
    name: str,
    *,
    gpu: str | None = None,
    optimizer: str = "shampoo",
    order: int | None = None,
    checkpointing: bool = False,
    measured: bool = False,
    settings: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Plan:
    """Plan the memory of a training run.

    Args:
        name: The model; see ``resolve_model``.
        gpu: Memory of the GPU, such as ``80GB``.
        optimizer: ``shampoo`` (with rows of K-FAC and AdaBK), ``caspr``, ``kfac`` or ``adabk``.
        order: ``max_order`` of that optimizer.
        checkpointing: True to recompute layers in the backward pass.
        measured: True to run one batch on the GPU, if there is one.
        settings: Further options of kronbit's optimizers or of the base.
        **changes: Other values of ``Network``: ``batch``, ``length``, ``image``, ``dtype``, ``amp``
            and ``base``; ``None`` keeps the setting of the model's source. Activations are left
            out if no batch is known.
    """
    chosen = {"optimizer": optimizer, "order": order, **changes}
    for what, known in {"optimizer": ALGORITHMS, "dtype": DTYPES, "amp": AMP}.items():
        if chosen.get(what) is not None and chosen[what] not in known:
            raise LabError(f"--{what} must be one of {', '.join(known)}; got {chosen[what]!r}")
    for key in ("batch", "length", "image", "order"):
        if chosen.get(key) is not None and chosen[key] < 1:
            what = "seq" if key == "length" else key
            raise LabError(f"--{what} must be at least 1; got {chosen[key]}")
    limit = None if gpu is None else parse_size(gpu)
    changes = {key: value for key, value in changes.items() if value is not None}
    if "batch" in changes:
        changes["repeated"] = False
    network = replace(resolve_model(name), **changes)
    model = network.build("meta", checkpointing)
    passes = network.passes(model)
    activations, peak_at = _activations(network, model, passes, checkpointing, measured)
    accounts = Accounts(network, model, settings or {}, limit, peak_at)
    rows = accounts.rows(optimizer, order)
    if network.repeated:
        accounts.notes.append(
            "gradients of several passes are accumulated, so they are allocated throughout"
        )
    return Plan(
        model=name,
        algorithm=optimizer,
        parameters_count=sum(p.numel() for p in model.parameters()),
        dtype=network.dtype,
        batch=network.batch,
        shape=None if passes is None else passes.shape,
        base=network.base,
        activations=activations,
        rows=tuple(rows),
        gpu_bytes=limit,
        notes=tuple(accounts.notes),
    )


def to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as values that JSON can hold."""
    rows = [
        {**asdict(row), "total": row.total, "second_order": row.second_order} for row in plan.rows
    ]
    return {"format": 1, **asdict(plan), "rows": rows}


def _activations(
    network: Network, model: nn.Module, passes: Passes | None, checkpointing: bool, measured: bool
) -> tuple[Activations, Callable[[int], int] | None]:
    """Return the memory of a batch, and a function for the peak at any batch size, if known."""
    if network.batch is None:
        return Activations(None, None, "not counted: give --batch"), None
    if passes is None:
        how = "not known: the model has no embedding, 2-d convolution or linear layer"
        return Activations(None, None, how), None
    try:
        counted = Estimate(model, passes, network.batch)
    except Exception as error:  # a network that depends on values can raise anything
        how = f"not known: the model does not run on meta ({one_line(error)[:160]})"
        return Activations(None, None, how), None
    peak, how = counted.first.peak, "estimated: counted on the meta device, with fused attention"
    if measured and not torch.cuda.is_available():
        how += "; there is no CUDA device to measure"
    elif measured:
        try:
            peak = measure(lambda: network.build("cuda", checkpointing), passes, counted.batch)
            how = f"measured: forward and backward on {torch.cuda.get_device_name()}"
        except torch.OutOfMemoryError:
            how += "; this GPU is too small to measure"
    share = Fraction(peak, counted.first.peak)
    return Activations(counted.first.saved, peak, how), lambda b: int(counted.peak_at(b) * share)
