"""Launching Triton kernels with little overhead.

``kernel[grid](...)`` works out at every call which variant of the kernel suits the arguments, which
takes longer than most of our kernels run. What that depends on is looked up here in one dict.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def _traits(argument: Any) -> Any:
    """What Triton compiles a variant for: types, alignment, and special integers."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument.bit_length() > 31
    return type(argument)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """``kernel[grid](*arguments, **constants)`` on the device of the first argument.

    Args:
        kernel: What ``triton.jit`` made of a function whose constexprs come last.
        grid: Numbers of programs.
        *arguments: All that are not constexprs.
        **constants: The constexprs, and Triton's own ``num_warps`` and ``num_stages``.
    """
    device = arguments[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, *arguments, **constants)
        return
    key = (id(kernel), device, tuple(constants.values()), tuple(map(_traits, arguments)))
    known = _COMPILED.get(key)
    if known is not None:
        compiled, values = known
        compiled[(*grid, 1, 1)[:3]](*arguments, *values)
        return
    compiled = kernel[grid](*arguments, **constants)
    if compiled is not None:  # Triton's interpreter has nothing to keep
        names = kernel.arg_names[len(arguments) :]
        _COMPILED[key] = compiled, tuple(constants[name] for name in names)
