"""Build an optimizer from its import path, with options from text or YAML.

kohya's scripts, axolotl, torchtune and verl build optimizers from other packages in this way::

    kohya       --optimizer_type kronbit.Shampoo --optimizer_args bits=4 first_refresh=20
    torchtune   optimizer: {_component_: kronbit.Shampoo, lr: 1e-3, bits: 4}
    verl        optimizer_impl: kronbit, optimizer: Shampoo
    axolotl     (ShampooFactory, options), from a plugin's create_optimizer or get_trainer_cls

This script does the same with kronbit alone::

    python examples/import_path.py --optimizer_args bits=8 "betas=(0.9, 0.95)"
"""

from __future__ import annotations

import argparse
import ast
import importlib

import torch
from torch import nn

from kronbit.integrations.transformers import ShampooFactory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--optimizer_type", default="kronbit.Shampoo")
    parser.add_argument("--optimizer_args", nargs="*", default=["bits=4"])
    arguments = parser.parse_args()

    # kohya imports a class by its path, and passes literals as options next to a learning rate.
    options = {}
    for argument in arguments.optimizer_args:
        name, _, value = argument.partition("=")
        options[name] = ast.literal_eval(value)
    package, _, name = arguments.optimizer_type.rpartition(".")
    make = getattr(importlib.import_module(package), name)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5))
    by_path = make(list(model.parameters()), lr=1e-2, **options)

    # axolotl calls a factory with the model, options of the config, and the mesh of ranks.
    config = {"lr": 1e-2, "weight_decay": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
    by_factory = ShampooFactory()(model, device_mesh=None, optim_args="first_refresh=5", **config)

    torch.manual_seed(0)
    data, target = torch.randn(64, 20), torch.randn(64, 5)
    for optimizer in (by_path, by_factory):
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(data), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"{type(optimizer).__name__}: loss {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
