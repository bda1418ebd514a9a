"""Precisions by the names that recipes and options give them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
AMP: Mapping[str, torch.dtype | None] = {
    "off": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def autocast(device: str, amp: str) -> torch.autocast:
    """Autocast on a kind of device, or a context that changes nothing if ``amp`` is ``off``."""
    return torch.autocast(device, AMP[amp], enabled=AMP[amp] is not None)
