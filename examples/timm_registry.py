"""4-bit Shampoo by name from timm's registry, for one of timm's networks.

Importing ``kronbit.integrations.timm`` registers the names. ``create_optimizer_v2`` then applies
layer decay, weight decay and fallbacks as for timm's optimizers (needs ``timm``)::

    python examples/timm_registry.py --opt caspr4bit
"""

from __future__ import annotations

import argparse

import timm
import torch
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2
from torch import nn

import kronbit.integrations.timm  # noqa: F401  registers the names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--opt", default="shampoo4bit")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    size = {"img_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 10}
    model = timm.create_model("vit_tiny_patch16_224", depth=2, **size).to(device)
    optimizer = create_optimizer_v2(
        model,
        opt=arguments.opt,
        lr=1e-3,
        weight_decay=0.05,
        layer_decay=0.9,
        fallback_list=["head.weight"],  # left to AdamW
        first_refresh=5,
        update_every=10,
        refresh_every=20,
    )
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, device=device).float().view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels, device=device)
    for step in range(arguments.steps):
        rows = torch.randint(len(x), (128,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        if step in (0, arguments.steps - 1):
            print(f"step {step}: loss {loss.item():.4f}")
    print(optimizer.summary())


if __name__ == "__main__":
    main()
