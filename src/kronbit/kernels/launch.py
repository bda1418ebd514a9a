"""Launching Triton kernels with little overhead.

``kernel[grid](...)`` finds the variant of the kernel for its arguments at every call, which takes
longer than most of our kernels. Here, the variant is looked up in one dict.

Up to Triton 3.6, the code that launches kernels of a signature is a C extension in Triton's cache.
All of these extensions have the same name, and Python keeps one module object per name. If two
threads load extensions at the same time, one may take the launcher of the other, which reads
arguments with the wrong types. So one thread of a process loads at a time. A lock file keeps other
processes from building the same extension at the same time.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver

from kronbit.interruptions import run_then

_THREADS = 16
_local = threading.local()
_loading = threading.Lock()
_COMPILED: dict[tuple[Any, ...], Callable[[tuple[int, ...], list[Any]], None]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run ``kernel[grid](*arguments, **constants)`` on the device of the first argument.

    A variant is compiled for the constexprs and for the alignment of tensors. It must not depend on
    the values of integers (kernels list all of them in ``do_not_specialize``), nor on the types of
    tensors, unless these follow from the constexprs.

    Args:
        kernel: Result of ``triton.jit`` on a function whose constexprs come last.
        grid: Numbers of programs.
        *arguments: Arguments that are not constexprs; the first is a tensor.
        **constants: The constexprs, and Triton's ``num_warps`` and ``num_stages``.
    """
    device = arguments[0].device
    if _several_gpus() and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, *arguments, **constants)
        return
    # Pass addresses instead of tensors: Triton would ask the driver about each tensor.
    plain = list(arguments)
    combined = 0
    for i, argument in enumerate(arguments):
        if isinstance(argument, Tensor):
            plain[i] = address = argument.data_ptr()
            combined |= address
    offsets: tuple[int, ...] = ()
    if combined % 16:
        offsets = tuple(a.data_ptr() % 16 for a in arguments if isinstance(a, Tensor))
    key = (id(kernel), device, *constants.values(), offsets)
    run = _COMPILED.get(key)
    if run is not None:
        run((*grid, 1, 1), plain)
        return
    waiting = getattr(_local, "waiting", None)
    if waiting is not None:
        waiting[key] = device, partial(kernel.warmup, *arguments, grid=grid, **constants)
        return
    if isinstance(kernel, JITFunction):
        load(kernel.warmup(*arguments, grid=grid, **constants))
    compiled = kernel[grid](*arguments, **constants)
    if compiled is not None:  # Triton's interpreter has nothing to keep
        values = [constants[name] for name in kernel.arg_names[len(arguments) :]]
        _COMPILED[key] = _runner(compiled, device.index, values)


def compile_together(work: Callable[[], object]) -> None:
    """Compile and load the kernels that ``work`` would launch, in threads.

    Compilers mostly run outside of Python, so threads help.

    Args:
        work: Called once. Kernels that are not compiled yet are not launched, so the results are
            undefined.
    """
    waiting: dict[tuple[Any, ...], tuple[torch.device, Callable[[], Any]]] = {}

    def collect() -> None:
        _local.waiting = waiting
        work()

    run_then(collect, partial(setattr, _local, "waiting", None))
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        for done in [threads.submit(_compile, *call) for call in waiting.values()]:
            done.result()


def _compile(device: torch.device, call: Callable[[], Any]) -> None:
    """Compile and load a kernel on its GPU. Every thread has its own current device."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        try:
            compiled = call()
        except SystemError:  # CPython's ast.parse may fail while another thread parses
            compiled = call()
        # A kernel that does not fit this GPU may not be needed; if it is, its launch fails again.
        with suppress(Exception):
            load(compiled)


def load(compiled: Any) -> None:
    """Load a compiled kernel onto the current GPU, while no other thread loads one.

    Args:
        compiled: Result of ``kernel.warmup``; None where a hook keeps Triton from compiling.
    """
    if compiled is None:
        return
    # One lock file serves all signatures that may share an extension.
    types = map(str, compiled.src.signature.values())
    words = " ".join("*" if name.startswith("*") else name for name in types)
    name = f"kronbit-launcher-{zlib.crc32(words.encode()):08x}.lock"
    with _loading, _locked(Path(knobs.cache.dir) / name):
        _ = compiled.run


def _locked(path: Path) -> ExitStack:
    """Return a context that holds an exclusive lock on a file, where files can be locked."""
    context = ExitStack()
    with suppress(ImportError, OSError):
        import fcntl

        path.parent.mkdir(parents=True, exist_ok=True)
        file = context.enter_context(path.open("ab"))  # closing it releases the lock
        fcntl.flock(file, fcntl.LOCK_EX)
    return context


def _runner(
    compiled: Any, device: int, values: list[Any]
) -> Callable[[tuple[int, ...], list[Any]], None]:
    """Return a function that launches a compiled kernel as Triton does, without its profiling."""
    stream = driver.active.get_current_stream
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def launch_it(grid: tuple[int, ...], arguments: list[Any]) -> None:
        x, y, z, *_ = grid
        run(x, y, z, stream(device), function, metadata, None, None, None, *arguments, *values)

    return launch_it


@cache
def _several_gpus() -> bool:
    return torch.cuda.is_available() and torch.cuda.device_count() > 1
