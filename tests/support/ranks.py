"""Run functions on several ranks, each in a separate process, for distributed tests."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pickle
import queue
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 120  # time limit; ranks are slow on few cores
# Ranks are forked from a process that has imported these modules, as importing torch takes seconds.
_IMPORTED = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "kronbit",
    "pytest",
]


def run_on_ranks(
    world: int, function: Callable[..., Any], *args: Any, backend: str = "gloo"
) -> list[Any]:
    """Call ``function(rank, *args)`` on every rank of a process group.

    Args:
        world: Number of ranks.
        function: Function at the top level of its module. Its result must not hold shared tensors.
        *args: Further arguments.
        backend: Backend of the process group. With "torchrun", the function gets the environment of
            torchrun, and makes the group itself.

    Returns:
        The results of all ranks, in order.

    Raises:
        AssertionError: If a rank fails or the time limit is exceeded. The message has the
            tracebacks of all ranks.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    answers = context.Queue()
    call = pickle.dumps((function, args))
    modules = _files_of(function, *args)
    processes = [
        context.Process(target=_rank, args=(rank, world, port, answers, backend, modules, call))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    failed: dict[int, str] = {}
    end = time.monotonic() + SECONDS
    try:
        while len(results) + len(failed) < world and time.monotonic() < end:
            try:
                rank, good, answer = answers.get(timeout=1)
            except queue.Empty:
                dead = [
                    rank
                    for rank, process in enumerate(processes)
                    if process.exitcode and rank not in failed
                ]
                if dead:  # died without an answer, for example by a signal
                    failed |= {rank: f"exit code {processes[rank].exitcode}" for rank in dead}
                    break
                continue
            (results if good else failed)[rank] = answer
            if failed:  # other ranks may wait for the failed one
                end = min(end, time.monotonic() + 5)
    finally:
        for process in processes:
            process.join(timeout=0 if failed or len(results) < world else 30)
            if process.is_alive():
                process.kill()
                process.join()
    if failed or len(results) < world:
        lost = sorted(set(range(world)) - set(results) - set(failed))
        errors = [f"rank {rank}:\n{text}" for rank, text in sorted(failed.items())]
        raise AssertionError("\n".join([*errors, f"no answer from {lost}" if lost else ""]))
    return [results[rank] for rank in range(world)]


def _files_of(*values: Any) -> dict[str, str]:
    """Return the files of test modules by name: their folders are not on a rank's ``sys.path``."""
    names = {value.__module__ for value in values if isinstance(value, FunctionType)}
    return {name: sys.modules[name].__file__ for name in names if name.startswith("tests.")}


def _load(name: str, path: str) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def run_script_on_ranks(world: int, script: str, *arguments: str) -> str:
    """Run a script as torchrun does, in processes that have imported torch.

    Args:
        world: Number of ranks.
        script: Path of a file, or name of a module.
        *arguments: Arguments of the script.

    Returns:
        The output of the first rank.
    """
    first: str = run_on_ranks(world, _script, script, arguments, backend="torchrun")[0]
    return first


def _script(rank: int, script: str, arguments: tuple[str, ...]) -> str:
    sys.argv = [script, *arguments]
    run = runpy.run_path if script.endswith(".py") else runpy.run_module
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            run(script, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"exit code {end.code}\n{output.getvalue()}") from end
    return output.getvalue()


def in_turn(rank: int, *functions: Callable[[int], Any]) -> list[Any]:
    """Call functions one after another on the same ranks, because ranks take long to start."""
    return [function(rank) for function in functions]


def _rank(
    rank: int,
    world: int,
    port: int,
    answers: Any,
    backend: str,
    modules: dict[str, str],
    call: bytes,
) -> None:
    torch.set_num_threads(1)
    try:
        for name, path in modules.items():
            _load(name, path)
        function, args = pickle.loads(call)
        if backend == "torchrun":  # the script makes its process group
            known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
            os.environ |= {name: str(value) for name, value in known.items()}
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            answer = function(rank, *args)
        else:
            init_method = f"tcp://127.0.0.1:{port}"
            dist.init_process_group(backend, rank=rank, world_size=world, init_method=init_method)
            answer = function(rank, *args)
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        answers.put((rank, False, traceback.format_exc()))
        raise SystemExit(1) from None
    answers.put((rank, True, answer))
