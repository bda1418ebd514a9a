"""Versions of installed packages, read from their metadata without importing them."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

import kronbit
from kronbit.kernels import guard

# Distributions that kronbit works with, and their purpose.
INTEGRATIONS = {
    "triton": "kernels on NVIDIA GPUs",
    "transformers": "Trainer",
    "accelerate": "prepare, Trainer",
    "lightning": "LightningModule",
    "peft": "LoRA",
    "timm": "kronbit.integrations.timm",
    "torchtitan": "kronbit.integrations.torchtitan",
    "hydra-core": "_target_",
    "bitsandbytes": "base='adamw8bit'",
    "torchao": "base='adamw8bit'",
    "schedulefree": "base='schedulefree-adamw'",
}


def describe(device: torch.device) -> list[tuple[str, str]]:
    """Return (name, value) rows: versions, the device, the use of kernels, installed packages."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    why_not = guard.why_not(device)
    rows = [
        ("kronbit", kronbit.__version__),
        ("Python", platform.python_version()),
        ("torch", torch.__version__),
        ("device", f"{device.type} ({name})" if name else device.type),
        ("kernels", "in use" if why_not is None else f"not in use: {why_not}"),
    ]
    for distribution, purpose in INTEGRATIONS.items():
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        rows.append((distribution, f"{version} ({purpose})"))
    return rows
