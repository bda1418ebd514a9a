"""Emulation of a GPU on the meta device: autograd saves the tensors that it saves on a GPU.

The meta device itself decomposes attention, keeps dropout masks in float and has no autocast.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# Functions that CUDA's autocast runs in low precision, and those it runs in float32. All other
# functions run in the precision of their inputs.
_LOWER = {
    *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addbmm"),
    *("addmv", "addr", "baddbmm", "einsum", "chain_matmul", "multi_dot", "prelu", "conv1d"),
    *("conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    "scaled_dot_product_attention",
}
_FLOAT32 = {
    *("pow", "__pow__", "__rpow__", "exp", "expm1", "log", "log10", "log2", "log1p", "rsqrt"),
    *("reciprocal", "softmax", "log_softmax", "softplus", "layer_norm", "group_norm", "norm"),
    *("sum", "prod", "cumsum", "cumprod", "cross_entropy_loss", "nll_loss", "nll_loss_nd"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "cosine_similarity"),
    *("binary_cross_entropy_with_logits", "cdist", "dist"),
}


class GPUEmulation(TorchFunctionMode):
    """Replaces attention and dropout by their memory on a GPU, and casts as autocast does.

    ``lower`` is the low precision of autocast; ``None`` disables it.
    """

    def __init__(self, lower: torch.dtype | None) -> None:
        super().__init__()
        self._lower = lower
        # Autocast caches the cast of a weight during a forward pass.
        self._cast_weights: dict[Tensor, Tensor] | None = {}

    def end_forward_pass(self) -> None:
        """Drop the cached casts: autocast has none when checkpointing recomputes layers."""
        self._cast_weights = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(func, "__name__", ""), kwargs or {}
        if self._lower is not None and name in _LOWER | _FLOAT32:
            dtype = self._lower if name in _LOWER else torch.float32
            args = [self._cast(value, dtype) for value in args]
            given = {key: self._cast(value, dtype) for key, value in given.items()}
        return _REPLACED.get(name, func)(*args, **given)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return value
        if self._cast_weights is None or not (value.is_leaf and value.requires_grad):
            return value.to(dtype)
        if value not in self._cast_weights:
            self._cast_weights[value] = value.to(dtype)
        return self._cast_weights[value]


class _Attention(torch.autograd.Function):
    """Attention that saves one float per score row, as flash and memory-efficient kernels do."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = torch.empty_like(q)
        if v.shape[-1] != q.shape[-1]:
            out = q.new_empty(*q.shape[:-1], v.shape[-1])
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, sums, mask)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, _, mask = ctx.saved_tensors
        # The gradient of a bias has the size of all scores before it is reduced.
        return tuple(
            x.new_empty(x.shape) if needed else None
            for x, needed in zip((q, k, v, mask), ctx.needs_input_grad, strict=True)
        )


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> Any:
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return _Attention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """Apply dropout with a mask of bytes, as the CUDA kernel does."""
    return torch.native_dropout(input, p, train)[0] if train and p > 0 else input


_REPLACED = {"scaled_dot_product_attention": _attention, "dropout": _dropout}


@contextlib.contextmanager
def expose_torch_functions() -> Iterator[None]:
    """Expose the calls inside torch's Python functions to a torch function mode.

    By default a mode gets the outer call alone, and the inner calls run without it: attention in
    ``multi_head_attention_forward``, or all layers that a backward pass recomputes.
    """
    replaced = [
        *((functional, f"has_torch_function{kind}") for kind in ("", "_unary", "_variadic")),
        (torch.autograd, "has_torch_function"),
        # The function reads values of positions to detect packed sequences. None are packed here.
        (sys.modules.get("transformers.masking_utils"), "find_packed_sequence_indices"),
    ]
    with contextlib.ExitStack() as stack:
        for module, name in replaced:
            if hasattr(module, name):
                stack.enter_context(patch.object(module, name, lambda *_, **__: None))
        yield
