"""Training on several ranks gives the results of one process."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import SECONDS, in_turn, run_on_ranks, run_script_on_ranks
from support.shards import OPTIONS, assert_same
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from kronbit import CASPR, KFAC, Shampoo
from kronbit.baselines import MFAC
from kronbit.step.preconditioner import Preconditioner

OPTIMIZERS: dict[str, Any] = {"Shampoo": Shampoo, "CASPR": CASPR}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 66), nn.Tanh(), nn.Linear(66, 9), nn.Linear(9, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> None:
    """Take ten steps, each with one unsynchronised pass. A rank sees its share of every batch."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        for last in (False, True):
            x = torch.randn(12, 70, generator=generator)[rank::world]
            unsynchronised = isinstance(model, DistributedDataParallel) and not last
            with model.no_sync() if unsynchronised else nullcontext():
                model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_on_rank(rank: int, name: str, options: dict[str, Any], equal: bool) -> list[Any]:
    """Return weights and state after training. With ``equal``, every rank sees whole batches."""
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters(), **options)
    part = (0, 1) if equal else (rank, dist.get_world_size())
    train(DistributedDataParallel(model), optimizer, *part)
    state = optimizer.state_dict()["state"]
    leaves = [leaf for entry in state.values() for leaf in tree_leaves(entry)]
    return [x.detach().numpy() for x in [*model.parameters(), *leaves] if isinstance(x, Tensor)]


@pytest.mark.parametrize(("name", "world"), [("Shampoo", 2), ("CASPR", 4)])
def test_ranks_with_equal_gradients_match_one_process(name: str, world: int) -> None:
    """Weights and state are bit-identical, and every rank holds the complete state."""
    reference = network()
    optimizer = OPTIMIZERS[name](reference.parameters(), **OPTIONS)
    train(reference, optimizer, 0, 1)
    results = run_on_ranks(world, train_on_rank, name, OPTIONS, True)
    for result in results:
        for p, q, first in zip(reference.parameters(), result[:6], results[0][:6], strict=True):
            assert np.array_equal(q, first)
            assert np.array_equal(q, p.detach().numpy())
        assert len(result) == len(results[0]) > 6
        assert all(map(np.array_equal, result, results[0]))


def test_ranks_that_split_a_batch_match_one_process() -> None:
    options = {**OPTIONS, "base": "sgd", "bits": 32}
    reference, start = network(), network()
    train(reference, Shampoo(reference.parameters(), **options), 0, 1)
    for result in run_on_ranks(3, train_on_rank, "Shampoo", options, False):
        for p, q, w in zip(reference.parameters(), result[:6], start.parameters(), strict=True):
            assert (torch.from_numpy(q) - p.detach()).norm() < 1e-5 * p.detach().norm()
            assert not torch.equal(p, w)


def refuse_unsupported_parameters(rank: int) -> list[str]:
    """Return the errors for parameters that are sharded in unsupported ways."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, plain = network(), network()
    fully_shard(model, mesh=mesh)
    columns = nn.Linear(8, 6, bias=False)
    columns.weight = nn.Parameter(distribute_tensor(columns.weight, mesh, [Shard(1)]))
    other_mesh = fully_shard(nn.Linear(8, 6), mesh=DeviceMesh("cpu", [1, 0]))
    partitioned = nn.Linear(8, 6, bias=False)
    partitioned.weight.ds_id = 0
    flat = nn.Linear(8, 6, bias=False)
    flat.weight._is_flat_param = True
    optimizer = Shampoo(plain.parameters(), lr=0.1)
    messages = []
    for call in (
        lambda: Shampoo(torch.optim.SGD(columns.parameters(), lr=0.1)),
        lambda: CASPR(columns.named_parameters(), lr=0.1),
        lambda: optimizer.add_param_group({"params": list(columns.parameters())}),
        lambda: MFAC(torch.optim.SGD(model.parameters(), lr=0.1)),
        lambda: KFAC(torch.optim.SGD(model.parameters(), lr=0.1), model=model),
        lambda: Shampoo(partitioned.parameters(), lr=0.1),
        lambda: Shampoo(flat.parameters(), lr=0.1),
        lambda: Shampoo([*model.parameters(), *other_mesh.parameters()], lr=0.1),
    ):
        remedy = "fully_shard|DistributedDataParallel|an optimizer for each"
        with pytest.raises(TypeError, match=remedy) as error:
            call()
        messages.append(str(error.value).split(":")[0].split(" (DeviceMesh")[0])
    assert len(optimizer.param_groups) == 1
    # Parameters left to the base optimizer may be sharded in any way that it supports.
    group = {"params": list(columns.parameters()), "precondition": False}
    optimizer = Shampoo([{"params": list(plain.parameters())}, group], lr=0.1)
    for p in (*plain.parameters(), *columns.parameters()):
        p.grad = torch.ones_like(p)
    before = columns.weight.full_tensor().clone()
    optimizer.step()
    assert not torch.equal(columns.weight.full_tensor(), before)
    return messages


def disagree(rank: int) -> dict[str, str]:
    """Return the errors if parameters, options or gradients differ between ranks."""
    errors = {}

    def step(name: str, width: int = 66, **options: Any) -> Shampoo:
        torch.manual_seed(0)
        model = nn.Linear(70, width)
        optimizer = Shampoo(model.parameters(), **{**OPTIONS, "update_every": 1, **options})
        before = model.weight.detach().clone()
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + rank * (name in ("gradients", "apart")))
        try:
            optimizer.step()
        except RuntimeError as error:
            errors[name] = str(error)
            assert torch.equal(model.weight, before)
        return optimizer

    step("parameters", width=66 + rank)
    step("options", bits=4 + 4 * rank)
    optimizer = step("gradients", process_group=dist.group.WORLD)
    late = nn.Parameter(torch.ones(66 + rank, 70))
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones_like(late)
    with pytest.raises(RuntimeError, match="rank 1 of 2 has group 1, parameter 0 of shape"):
        optimizer.step()
    with pytest.warns(RuntimeWarning, match="gradients differ between the 2 ranks"):
        optimizer = step("apart")
    assert optimizer.diagnostics()["ranks"]["apart"] == 1
    optimizer = step("apart", process_group=False)
    assert optimizer.diagnostics()["ranks"] == {}
    return errors


def fail_to_update(rank: int) -> str:
    """Return the error if the update of one rank fails."""
    model = nn.Linear(70, 66)
    optimizer = Shampoo(model.parameters(), **{**OPTIONS, "update_every": 1})
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if rank == 1:

        def fail(*_: Any) -> None:
            raise MemoryError("no room")

        Preconditioner._update_assigned = fail
    try:
        optimizer.step()
    except (MemoryError, RuntimeError) as error:
        return str(error)
    return "nothing"


def time_out(rank: int) -> str:
    """Return the error of rank 0 if rank 1 misses the step. Rank 0 then continues alone."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = nn.Linear(70, 66)
    optimizer = Shampoo(model.parameters(), process_group=group, **OPTIONS)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    message = ""
    if rank == 0:
        before, saved = model.weight.detach().clone(), optimizer.state_dict()
        with pytest.raises(RuntimeError) as error:
            optimizer.step()
        message = str(error.value)
        assert torch.equal(model.weight, before)
        rebuilt = Shampoo(model.parameters(), process_group=False, **OPTIONS)
        rebuilt.load_state_dict(saved)
        rebuilt.step()
        assert not torch.equal(model.weight, before)
    return message


def test_incompatible_parameters_and_ranks_are_refused() -> None:
    """Errors name the parameter or the difference between ranks, and no rank hangs."""
    start = time.monotonic()
    refusals, disagreements, (first, second), (late, _) = zip(
        *run_on_ranks(
            2, in_turn, refuse_unsupported_parameters, disagree, fail_to_update, time_out
        ),
        strict=True,
    )
    assert time.monotonic() - start < SECONDS / 2
    for messages in refusals:
        assert messages == [
            "group 0, parameter 0 is a DTensor with placement S(1), not Shard(0)",
            "weight is a DTensor with placement S(1), not Shard(0)",
            "group 1, parameter 0 is a DTensor with placement S(1), not Shard(0)",
            "group 0, parameter 0 is a DTensor, of which this rank holds a part",
            "group 0, parameter 0 is a DTensor, of which this rank holds a part",
            "group 0, parameter 0 is partitioned by DeepSpeed's ZeRO, which hides its shape",
            "group 0, parameter 0 is a FlatParameter of FSDP 1, which joins matrices into a vector",
            "group 0, parameter 6 is sharded over another mesh",
        ]
    for errors in disagreements:
        assert list(errors) == ["parameters", "options", "gradients"]
        shapes = "rank 1 of 2 has group 0, parameter 0 of shape (67, 70) and torch.float32, where"
        assert errors["parameters"].startswith(shapes)
        bits = "rank 1 of 2 has group 0: bits=8, where rank 0 has group 0: bits=4: ranks must"
        assert errors["options"].startswith(bits)
        assert "average them before the step" in errors["gradients"]
    assert first.startswith("an update or a refresh has failed on rank 1 of 2")
    assert second == "no room"
    assert "Timed out" in late or "timeout" in late.lower()


def train_kfac(rank: int) -> list[Any]:
    """Train with K-FAC: ranks average statistics and divide updates among them."""
    torch.manual_seed(0)
    reference_model, model = (
        nn.Sequential(nn.Linear(70, 66), nn.Tanh(), nn.Linear(66, 64)) for _ in "ab"
    )
    model.load_state_dict(reference_model.state_dict())
    options = {"update_every": 2, "refresh_every": 4, "bits": 32, "lr": 0.1, "base": "sgd"}
    reference = KFAC(
        reference_model.parameters(), model=reference_model, process_group=False, **options
    )
    train(reference_model, reference, 0, 1)
    parallel = DistributedDataParallel(model)
    optimizer = KFAC(model.parameters(), model=model, **options)
    train(parallel, optimizer, rank, dist.get_world_size())
    for p, q in zip(model.parameters(), reference_model.parameters(), strict=True):
        assert (p - q).detach().norm() < 1e-5 * q.detach().norm()
    figures = optimizer.diagnostics()["ranks"]
    assert figures["replicas"] == 3
    assert figures["apart"] == 0
    return [figures["received_bytes"], *[p.detach().numpy() for p in model.parameters()]]


def test_kfac_divides_layers_among_ranks() -> None:
    first, *others = run_on_ranks(3, train_kfac)
    assert first[0] > 0
    for result in others:
        assert all(map(np.array_equal, result[1:], first[1:]))


def fail(rank: int, how: str) -> None:
    if rank == 1:
        if how == "raises":
            raise ValueError("expected failure")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "message"), [("raises", "expected failure"), ("is killed", "exit code -9")]
)
def test_the_failure_of_a_rank_is_reported(how: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_on_ranks(2, fail, how)


EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(example: str, ranks: int, *arguments: str) -> str:
    return run_script_on_ranks(ranks, str(EXAMPLES / example), *arguments)


def test_the_ddp_example_resumes_bit_identically(tmp_path: Path) -> None:
    once, twice = tmp_path / "once.pt", tmp_path / "twice.pt"
    output = torchrun("ddp.py", 2, "--steps", "40", "--checkpoint", str(once))
    assert "2 ranks, steps 0 to 40" in output
    assert float(output.split()[-4]) > 80
    for steps in ("25", "40"):
        torchrun("ddp.py", 2, "--steps", steps, "--checkpoint", str(twice))
    assert_same(*(torch.load(path, weights_only=True) for path in (twice, once)))
    assert not list(tmp_path.glob("*.new"))


def test_the_fsdp_example_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    checkpoint = ["--checkpoint", str(tmp_path / "digits")]
    assert "2 ranks, steps 0 to 25" in torchrun("fsdp2.py", 2, "--steps", "25", *checkpoint)
    output = torchrun("fsdp2.py", 3, "--steps", "50", *checkpoint)
    assert "3 ranks, steps 25 to 50" in output
    assert float(output.split()[-4]) > 80


def save_and_load_sharded(rank: int, folder: str, dies: bool) -> Any:
    """Load and return the step. If ``dies``, save twice instead; rank 1 dies in the second save."""
    spec = importlib.util.spec_from_file_location("fsdp2", EXAMPLES / "fsdp2.py")
    assert spec is not None
    example = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(example)
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    training = example.Training(model, Shampoo(model.parameters(), **OPTIONS))
    if not dies:
        example.load(Path(folder), training)
        expected = network()
        optimizer = Shampoo(expected.parameters(), process_group=False, **OPTIONS)
        for _ in range(training.step):
            for p in expected.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q)
        return training.step
    for last in (5, 7):
        while training.step < last:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            training.optimizer.step()
            training.step += 1
        if rank == 1 and last == 7:
            FileSystemWriter.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        example.save(Path(folder), training)
    return None


def test_a_rank_that_dies_while_saving_does_not_damage_the_last_checkpoint(tmp_path: Path) -> None:
    folder = str(tmp_path / "digits")
    with pytest.raises(AssertionError, match="exit code -9"):
        run_on_ranks(2, save_and_load_sharded, folder, True)
    assert run_on_ranks(2, save_and_load_sharded, folder, False) == [5, 5]
