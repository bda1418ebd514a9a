"""The functions of ``backend.Backend`` as Triton kernels. Only ``backend`` imports this module."""

from __future__ import annotations

import torch
from torch import Tensor

from kronbit.kernels.cholesky import Chain, factor_, shifted, whitened
from kronbit.kernels.compact import decode as decode_triangle
from kronbit.kernels.compact import encode as encode_triangle
from kronbit.kernels.evaluation import evaluate, room
from kronbit.kernels.keeping import replace_rows_
from kronbit.kernels.matmul import compose, correction, multiply
from kronbit.kernels.power import add_ridge_, norms, power_iteration
from kronbit.kernels.quantization import decode as decode_rows
from kronbit.kernels.quantization import decode_operand as operand_of_rows
from kronbit.kernels.quantization import encode as encode_rows
from kronbit.kernels.split import column_dots, normalise_columns, scale_rows
from kronbit.kernels.split import split as operand

__all__ = [
    "add_ridge_", "by_kernels", "chain", "cholesky_", "column_dots", "compose", "correction",
    "decode_rows", "decode_triangle", "encode_rows", "encode_triangle", "evaluate", "multiply",
    "normalise_columns", "norms", "operand", "operand_of_rows", "power_iteration", "replace_rows_",
    "room", "scale_rows", "shifted", "whitened",
]  # fmt: skip

by_kernels = True


def chain(device: torch.device, graphs: bool) -> Chain:
    """Return an object that launches repeated factorisations."""
    return Chain(device, graphs)


def cholesky_(A: Tensor, chain: Chain | None = None) -> tuple[Tensor, Tensor]:
    """Overwrite A by its lower triangular factors."""
    return A, factor_(A, chain)
