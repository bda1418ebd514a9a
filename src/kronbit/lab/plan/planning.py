"""What ``kronbit plan`` computes: whether a training fits, for every way to keep the state."""

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
from kronbit.lab.plan.activations import Passes, estimate, measure
from kronbit.lab.plan.networks import Network, resolve_model
from kronbit.lab.plan.rows import Accounts, Row
from kronbit.lab.precision import AMP, DTYPES

# By the angle between their update and the exact one: docs/memory.md.
_MOST_EXACT_FIRST = ("32", "8", "8-paper", "6+4", "4", "4-eigen", "4-paper", "4-naive", "3")


@dataclass(frozen=True)
class Activations:
    """Memory of forward and backward besides parameters, for one batch.

    Attributes:
        saved: What autograd has saved when the backward pass begins; ``None`` if not known.
        peak: The fullest moment of both passes, with the gradients that are there by then.
        how: Whether that is estimated or measured, and how; or why it is not known.
    """

    saved: int | None
    peak: int | None
    how: str


@dataclass(frozen=True)
class Plan:
    """Memory of a training, for every way to keep the second-order state.

    Attributes:
        model: As it was given.
        algorithm: Whose ways: ``shampoo``, ``caspr``, ``kfac`` or ``adabk``.
        parameters_count: How many there are.
        dtype: Of them.
        batch: Examples per pass; ``None`` if not given.
        shape: Of an example: (length,) of tokens, or (channels, side, side); ``None`` if not known.
        base: The first-order optimizer.
        activations: Of a batch.
        rows: The base alone first.
        gpu_bytes: The limit, if there is one.
        notes: What else is to be said.
    """

    model: str
    algorithm: str
    parameters_count: int
    dtype: str
    batch: int | None
    shape: tuple[int, ...] | None
    base: str
    activations: Activations
    rows: tuple[Row, ...]
    gpu_bytes: int | None
    notes: tuple[str, ...]

    def row(self, way: str) -> Row | None:
        """The row of the algorithm that keeps its state so, such as ``"4"``."""
        return next((row for row in self.rows if row.key == f"{self.algorithm}-{way}"), None)

    def best(self) -> Row | None:
        """The most exact way of the algorithm that fits."""
        ranked = (self.row(way) for way in _MOST_EXACT_FIRST)
        return next((row for row in ranked if row is not None and row.fits), None)


def parse_size(text: str) -> int:
    """Bytes of ``80GB``, ``24G``, ``80GiB`` or ``81920MiB``.

    GB and MB count as GiB and MiB: a card of 80 GB has 81,920 MiB.

    Raises:
        LabError: If it is not such a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([MGT])(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise LabError(f"{text!r} is not a size of memory: write 80GB, 24G, 80GiB or 81920MiB")
    return int(float(match[1]) * 1024 ** (2 + "MGT".index(match[2].upper())))


def make_plan(
    name: str,
    *,
    batch: int | None = None,
    length: int | None = None,
    image: int | None = None,
    gpu: str | None = None,
    optimizer: str = "shampoo",
    order: int | None = None,
    base: str | None = None,
    dtype: str | None = None,
    amp: str | None = None,
    checkpointing: bool = False,
    measured: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Plan:
    """Plan a training. What is ``None`` is as the model's source says.

    Args:
        name: The model; see ``resolve_model``.
        batch: Examples per pass; without any, activations are left out.
        length: Of sequences.
        image: Side of images.
        gpu: Memory of the GPU, such as ``80GB``.
        optimizer: ``shampoo`` (with rows of K-FAC and AdaBK), ``caspr``, ``kfac`` or ``adabk``.
        order: ``max_order`` of that optimizer.
        base: The first-order optimizer.
        dtype: Of the parameters: ``fp32`` or ``bf16``.
        amp: Autocast: ``off``, ``bf16`` or ``fp16``.
        checkpointing: Whether layers are computed again in the backward pass.
        measured: Runs one batch on the GPU, if there is one.
        settings: Other options of kronbit's optimizers, or of the base.

    Raises:
        LabError: If something is wrong with any of these.
    """
    _check(optimizer, dtype, amp, batch=batch, seq=length, image=image, order=order)
    limit = None if gpu is None else parse_size(gpu)
    wishes: dict[str, Any] = {"batch": batch, "length": length, "image": image, "base": base}
    wishes |= {"dtype": dtype, "amp": amp, "repeated": None if batch is None else False}
    given = {key: value for key, value in wishes.items() if value is not None}
    network = replace(resolve_model(name), **given)
    model = network.build("meta", checkpointing)
    passes = _passes(network, model)
    activations, peak_at = _activations(network, model, passes, checkpointing, measured)
    accounts = Accounts(network, model, settings or {}, limit, peak_at)
    rows = accounts.rows(optimizer, order)
    if network.repeated:
        accounts.notes.append("gradients of several passes are summed up, and held all along")
    return Plan(
        model=name,
        algorithm=optimizer,
        parameters_count=sum(p.numel() for p in model.parameters()),
        dtype=network.dtype,
        batch=network.batch,
        shape=passes.inputs.shape if isinstance(passes, Passes) else None,
        base=network.base,
        activations=activations,
        rows=tuple(rows),
        gpu_bytes=limit,
        notes=tuple(accounts.notes),
    )


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values."""
    rows = [
        {**asdict(row), "total": row.total, "second_order": row.second_order} for row in plan.rows
    ]
    return {"format": 1, **asdict(plan), "rows": rows}


def _check(optimizer: str, dtype: str | None, amp: str | None, **numbers: int | None) -> None:
    known = {"optimizer": ALGORITHMS, "dtype": DTYPES, "amp": AMP}
    for (what, names), value in zip(known.items(), (optimizer, dtype, amp), strict=True):
        if value is not None and value not in names:
            raise LabError(f"--{what} must be one of {', '.join(names)}; got {value!r}")
    for what, number in numbers.items():
        if number is not None and number < 1:
            raise LabError(f"--{what} must be at least 1; got {number}")


def _passes(network: Network, model: nn.Module) -> Passes | str:
    """How the network is run, or why that is not known."""
    try:
        return Passes(network.inputs(model), network.amp, network.repeated)
    except LabError as error:
        return str(error)


def _activations(
    network: Network,
    model: nn.Module,
    passes: Passes | str,
    checkpointing: bool,
    measured: bool,
) -> tuple[Activations, Callable[[int], int] | None]:
    """Those of a batch, and the peak at any batch, if it is known."""
    if network.batch is None:
        return Activations(None, None, "not counted: give --batch"), None
    if isinstance(passes, str):
        return Activations(None, None, f"not known: {passes}"), None
    try:
        counted = estimate(model, passes, network.batch)
    except Exception as error:  # a network that cannot run without values raises anything
        why_not = f"not known: it does not run on meta ({one_line(error)[:160]})"
        return Activations(None, None, why_not), None
    saved, peak = counted.first.saved, counted.first.peak
    how, share = "estimated: counted on the meta device, with fused attention", Fraction(1)
    if measured and not torch.cuda.is_available():
        how += "; there is no CUDA device to measure"
    elif measured:
        try:
            seen = measure(lambda: network.build("cuda", checkpointing), passes, network.batch)
            how = f"measured: forward and backward on {torch.cuda.get_device_name()}"
            share = Fraction(seen, peak)
        except torch.OutOfMemoryError:
            how += "; this GPU is too small to measure"
    return Activations(saved, int(peak * share), how), lambda batch: int(
        counted.peak_at(batch) * share
    )
