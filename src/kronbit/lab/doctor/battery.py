"""Checks of properties that trainers and users rely on, for any optimizer.

Each check trains a small model and raises ``BrokenError`` if the outcome is wrong. The checks
themselves use no code of kronbit.
"""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from kronbit.lab.doctor.subject import Subject

_RANKS = 2


class BrokenError(Exception):
    """A check has failed; the message says how."""


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise BrokenError(otherwise)


def _model(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    # Matrices have at least 4,096 elements: low-bit optimizers keep smaller ones in 32 bits.
    model = nn.Sequential(nn.Linear(72, 80), nn.Tanh(), nn.Linear(80, 66))
    return model.to(device=device, dtype=dtype)


def _start(
    subject: Subject, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Optimizer]:
    model = _model(device, dtype)
    return model, subject.make(model)


def _backward(model: nn.Module, seed: int) -> Tensor:
    p = next(model.parameters())
    x = torch.randn(16, 72, generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(x.to(device=p.device, dtype=p.dtype)).square().mean()
    loss.backward()
    return loss


def _train(model: nn.Module, optimizer: Optimizer, seeds: Iterable[int]) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        _backward(model, seed)
        optimizer.step()


def _copy(params: Iterable[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def _require_finite(params: Iterable[Tensor]) -> None:
    _require(all(bool(torch.isfinite(p).all()) for p in params), "parameters are not finite")


def _require_equal(actual: Iterable[Tensor], expected: Iterable[Tensor], what: str) -> None:
    largest = _distance(actual, expected)
    _require(largest == 0, f"{what} differs by up to {largest:.1e}")


def _distance(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest absolute difference of two elements; NaN if one of them is NaN."""
    pairs = zip(actual, expected, strict=True)
    largest = torch.stack([(p.float() - q.float()).abs().max() for p, q in pairs]).max()
    return float(largest.detach())


# -------------------------------------------------------------------------------------- steps


def closure(subject: Subject, device: torch.device) -> None:
    """``step(closure)`` calls the closure once, with gradients enabled, and returns its loss."""
    model, optimizer = _start(subject, device)
    losses = []

    def evaluate() -> Any:
        optimizer.zero_grad()
        losses.append(_backward(model, 0))
        return losses[-1]

    returned: Any = optimizer.step(evaluate)
    _require(len(losses) == 1, f"the closure was called {len(losses)} times")
    _require(returned is not None, "the closure's loss was not returned")
    same = float(returned.detach()) == float(losses[0].detach())
    _require(same, "a loss other than the closure's was returned")


def bf16_parameters(subject: Subject, device: torch.device) -> None:
    """Parameters in bf16 train and stay in bf16."""
    model, optimizer = _start(subject, device, torch.bfloat16)
    before = _copy(model.parameters())
    _train(model, optimizer, range(6))
    _require_finite(model.parameters())
    for p, q in zip(model.parameters(), before, strict=True):
        _require(p.dtype == torch.bfloat16, f"a parameter was converted to {p.dtype}")
        _require(not torch.equal(p, q), "a parameter has not moved")


def any_shape(subject: Subject, device: torch.device) -> None:
    """Scalars, vectors, convolutions, stacks of matrices and empty parameters train."""
    shapes = [(), (7,), (4, 3, 3, 3), (2, 5, 6), (0,), (0, 4)]
    params = nn.ParameterList(torch.ones(shape, device=device) for shape in shapes)
    before = _copy(params)
    optimizer = subject.make(params)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(device)
        optimizer.step()
    _require_finite(params)
    for p, q in zip(params, before, strict=True):
        moved = p.numel() == 0 or not torch.equal(p, q)
        _require(moved, f"a parameter of shape {tuple(p.shape)} has not moved")


def learning_rate_as_float(subject: Subject, device: torch.device) -> None:
    """A learning rate that is written to the groups, as schedulers do, takes effect."""
    model, optimizer = _start(subject, device)
    _train(model, optimizer, range(2))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = _copy(model.parameters())
    _train(model, optimizer, range(2, 4))
    _require_equal(model.parameters(), before, "a parameter at lr=0.0")


def neutral_first_step(subject: Subject, device: torch.device) -> None:
    """A step with zero gradients and lr=0 changes nothing; checkpointing creates state this way."""
    model, optimizer = _start(subject, device)
    before, rates = _copy(model.parameters()), [group["lr"] for group in optimizer.param_groups]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    _require_equal(model.parameters(), before, "a parameter after this step")
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    _train(model, optimizer, range(4))
    _require_finite(model.parameters())


def nan_gradient(subject: Subject, device: torch.device) -> None:
    """Parameters stay finite after one NaN in one gradient."""
    model, optimizer = _start(subject, device)
    _train(model, optimizer, range(3))
    optimizer.zero_grad()
    _backward(model, 3)
    grad = next(model.parameters()).grad
    assert grad is not None
    grad.view(-1)[0] = torch.nan
    optimizer.step()
    _train(model, optimizer, range(4, 6))
    _require_finite(model.parameters())


def later_group(subject: Subject, device: torch.device) -> None:
    """A group that is added after a step trains, as in gradual unfreezing."""
    model = _model(device)
    assert isinstance(model, nn.Sequential)
    optimizer = subject.make(model, model[2].parameters())
    _train(model, optimizer, range(2))
    later = list(model[0].parameters())
    before = _copy(later)
    optimizer.add_param_group({"params": later})
    _train(model, optimizer, range(2, 6))
    _require_finite(model.parameters())
    _require(not any(map(torch.equal, later, before)), "the new group has not moved")


# -------------------------------------------------------------------------------- checkpoints


def _half_way(
    subject: Subject, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Optimizer, nn.Module, Optimizer]:
    """Return a model and its optimizer after five steps, and an equal model with a new one."""
    model, optimizer = _start(subject, device, dtype)
    _train(model, optimizer, range(5))
    twin, again = _start(subject, device, dtype)
    twin.load_state_dict(model.state_dict())
    return model, optimizer, twin, again


def _require_same_end(
    model: nn.Module, optimizer: Optimizer, twin: nn.Module, again: Optimizer, what: str
) -> None:
    """Take five steps with both, and compare."""
    _train(model, optimizer, range(5, 10))
    _train(twin, again, range(5, 10))
    _require_equal(twin.parameters(), model.parameters(), what)


def resume(subject: Subject, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """A resumed run equals the uninterrupted one bit for bit."""
    model, optimizer, twin, again = _half_way(subject, device, dtype)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _require_same_end(model, optimizer, twin, again, "the resumed run")


def weights_only(subject: Subject, device: torch.device) -> None:
    """``torch.load(weights_only=True)``, which runs no code, loads the state dict."""
    model, optimizer, twin, again = _half_way(subject, device)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    _require_same_end(model, optimizer, twin, again, "the resumed run")


def pickled(subject: Subject, device: torch.device) -> None:
    """A pickled copy, parameters included, trains like the original."""
    model, optimizer = _start(subject, device)
    _train(model, optimizer, range(5))
    twin, again = pickle.loads(pickle.dumps((model, optimizer)))
    _require_same_end(model, optimizer, twin, again, "the copy's run")


def distributed_checkpoint(subject: Subject, device: torch.device) -> None:
    """``torch.distributed.checkpoint`` saves and loads the optimizer bit for bit."""
    from torch.distributed.checkpoint import state_dict, state_dict_loader, state_dict_saver

    model, optimizer, twin, again = _half_way(subject, device)
    with tempfile.TemporaryDirectory() as folder:
        saved: Any = state_dict.get_optimizer_state_dict(model, optimizer)
        state_dict_saver.save(saved, checkpoint_id=folder, no_dist=True)
        loaded: Any = state_dict.get_optimizer_state_dict(twin, again)
        state_dict_loader.load(loaded, checkpoint_id=folder, no_dist=True)
        state_dict.set_optimizer_state_dict(twin, again, loaded)
    _require_same_end(model, optimizer, twin, again, "the resumed run")


# ----------------------------------------------------------------------------- several ranks


def _rank(rank: int, subject: Subject, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=_RANKS)
    model = _model(torch.device("cpu"))
    fully_shard(model, mesh=init_device_mesh("cpu", (_RANKS,)))
    _train(model, subject.make(model), range(6))
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    if rank == 0:
        torch.save([p.detach() for p in whole], Path(folder) / "sharded.pt")
    dist.destroy_process_group()


def fsdp2(subject: Subject, device: torch.device) -> None:
    """Training on shards (FSDP2, two ranks on the CPU) equals training in one process."""
    model, threads = _model(torch.device("cpu")), torch.get_num_threads()
    torch.set_num_threads(1)  # as on the ranks, for the same order of sums
    try:
        _train(model, subject.make(model), range(6))
    finally:
        torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        # Forked ranks end without destructors: on exit, threads of gloo may abort a spawned rank.
        start: Any = torch.multiprocessing.start_processes  # type: ignore[attr-defined]
        start(_rank, (subject, folder), _RANKS, start_method="forkserver")
        sharded = torch.load(Path(folder) / "sharded.pt", weights_only=True)
    largest = _distance(sharded, model.parameters())
    _require(largest < 1e-5, f"differs from one process by up to {largest:.1e}")


CHECKS: dict[str, Callable[[Subject, torch.device], None]] = {
    "closure called once, its loss returned": closure,
    "bf16 parameters train": bf16_parameters,
    "resume to the bit": resume,
    "resume to the bit, bf16 parameters": partial(resume, dtype=torch.bfloat16),
    "torch.load(weights_only=True)": weights_only,
    "torch.distributed.checkpoint round trip": distributed_checkpoint,
    "FSDP2 on two ranks is one process": fsdp2,
    "parameters of any shape, empty ones": any_shape,
    "first step with zero gradients and lr=0": neutral_first_step,
    'group["lr"] = float': learning_rate_as_float,
    "a NaN gradient leaves parameters finite": nan_gradient,
    "pickle": pickled,
    "add_param_group after a step": later_group,
}


def examine(subject: Subject, device: torch.device, check: str) -> str:
    """Run one check, and return the problem; empty if it passed.

    Args:
        subject: The optimizer.
        device: Device of the check; checks with several ranks use the CPU.
        check: A key of ``CHECKS``.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            CHECKS[check](subject, device)
        except BrokenError as broken:
            return str(broken)
        except Exception as error:  # other optimizers can raise anything
            lines = str(error).strip().splitlines() or [""]
            return f"{type(error).__name__}: {lines[-1].strip()}"
    return ""
