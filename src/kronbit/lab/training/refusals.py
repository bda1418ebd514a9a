"""Conflicting settings, refused before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kronbit.lab.errors import LabError
from kronbit.lab.recipe import Recipe

if TYPE_CHECKING:
    from kronbit.lab.training.running import Running
    from kronbit.lab.training.world import World


def refuse_conflicts(recipe: Recipe, world: World, running: Running) -> None:
    """Refuse settings that conflict with the device, the optimizer or each other.

    Args:
        recipe: The settings of the training.
        world: This process among the ranks.
        running: How the training is to run.

    Raises:
        LabError: If two settings conflict.
    """
    on_gpu = world.device.type == "cuda"
    if recipe.amp == "fp16" and not on_gpu:
        raise LabError("--amp fp16 needs a GPU: use --amp bf16 or --amp off on the CPU")
    hooked = recipe.optimizer in ("kfac", "adabk", "eva")
    leaves_out = f"leaves out the hooks of layers that {recipe.optimizer} needs"
    reasons = {
        "--cuda-graph needs a CUDA device": running.graph and not on_gpu,
        "--cuda-graph needs a single process": running.graph and world.parallel != "none",
        "--cuda-graph cannot be combined with --amp fp16": running.graph and recipe.amp == "fp16",
        "--cuda-graph cannot be combined with micro_batch": running.graph and recipe.micro_batch,
        f"--cuda-graph {leaves_out}": running.graph and hooked,
        f"--compile {leaves_out}": running.compile and hooked,
        "eva does not unscale the statistics of --amp fp16: use bf16": recipe.amp == "fp16"
        and recipe.optimizer == "eva",
    }
    for reason, holds in reasons.items():
        if holds:
            raise LabError(reason)
