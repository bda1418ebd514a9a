"""Names of precisions in recipes and options, and the dtypes they stand for."""

from __future__ import annotations

from collections.abc import Mapping

import torch

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
AMP: Mapping[str, torch.dtype | None] = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: str, amp: str) -> torch.autocast:
    """Return autocast for a device type; it is disabled if ``amp`` is ``off``."""
    return torch.autocast(device, AMP[amp], enabled=AMP[amp] is not None)
