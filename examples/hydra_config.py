"""Build an optimizer from a YAML file with Hydra's ``_target_``, one line per option.

The command line can override options (needs ``hydra-core``)::

    python examples/hydra_config.py
    python examples/hydra_config.py optimizer.bits=8 optimizer.base=sgd optimizer.lr=0.1
"""

from __future__ import annotations

from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from sklearn.datasets import load_digits
from torch import nn


def main() -> None:
    file = OmegaConf.load(Path(__file__).with_suffix(".yaml"))
    config = OmegaConf.merge(file, OmegaConf.from_cli())
    torch.manual_seed(0)
    model: nn.Module = instantiate(config.model)
    optimizer = instantiate(config.optimizer, params=model.parameters())

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images).float() / 16, torch.tensor(labels)
    for step in range(config.steps):
        rows = torch.randint(len(x), (128,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        if step in (0, config.steps - 1):
            print(f"step {step}: loss {loss.item():.4f}")
    print(optimizer.summary())


if __name__ == "__main__":
    main()
