"""Sharded parameters, and state on one rank each: what comes of it is what one process finds."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import in_turn, run_on_ranks
from support.shards import OPTIONS, Network, give_gradients, mesh_of, same, sharded, step, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import kronbit
from kronbit import CASPR, Shampoo
from kronbit.distributed.sharding import local

STEPS = 9


def check(optimizer: Any, model: nn.Module, alone: Any, network: nn.Module, where: str) -> None:
    """Weights, and the state of all ranks, are those of one process, to the bit."""
    for (name, p), q in zip(model.named_parameters(), network.parameters(), strict=True):
        assert torch.equal(whole(p), q), f"{where} {name}"
    found = kronbit.consolidate_state_dict(optimizer)
    if found:
        expected = alone.state_dict()
        for group in (*found["param_groups"], *expected["param_groups"]):
            group.pop("shard_state", None)
        same(found, expected, where)
    repaired = torch.tensor(optimizer.diagnostics()["jittered"])
    owners = optimizer._ranks.owners
    if owners is not None:  # each has counted its own; replicas, all of them
        dist.all_reduce(repaired, group=owners.link.group)
    assert repaired == alone.diagnostics()["jittered"] > 0


def walk_caspr(rank: int) -> list[int]:
    return walk(rank, CASPR)


def walk(rank: int, make: Any = Shampoo) -> list[int]:
    """Every way in which ranks can share parameters and state."""
    network = Network()
    alone = make(network.parameters(), process_group=False, **OPTIONS)
    for t in range(1, STEPS):
        step(network, alone, t)
    received = []
    for ranks in ([0, 1, 2, 3], [0, 1, 2], [0], [[0, 1], [2, 3]]):
        flat = torch.tensor(ranks).flatten().tolist()
        mesh = mesh_of(ranks)
        if rank in flat:
            model = sharded(mesh)
            optimizer = make(model.parameters(), **OPTIONS)
            for t in range(1, STEPS):
                step(model, optimizer, t)
            check(optimizer, model, alone, network, f"{ranks}")
            assert optimizer.memory()["base"] <= alone.memory()["base"] * (len(ranks) == 1 or 0.7)
        dist.barrier()
    for options in ({"shard_state": True}, {"process_group": dist.group.WORLD}, {}):
        model = Network()
        optimizer = make(model.parameters(), **options, **OPTIONS)
        for t in range(1, STEPS):
            step(model, optimizer, t)
        check(optimizer, model, alone, network, f"{options}")
        held = optimizer.memory()
        received.append(held["statistics"] + held["roots"])
        if "shard_state" in options:
            with pytest.raises(RuntimeError, match=r"kronbit\.consolidate_state_dict"):
                optimizer.state_dict()
    return received


def accelerated(rank: int) -> None:
    """As Accelerate prepares FSDP2: the optimizer is made before parameters are sharded."""
    switch = pytest.importorskip("accelerate.utils.fsdp_utils").fsdp2_switch_optimizer_parameters
    network = Network()
    alone = Shampoo(network.parameters(), process_group=False, **OPTIONS)
    model = Network()
    optimizer = Shampoo(model.parameters(), **OPTIONS)
    optimizer.load_state_dict(optimizer.state_dict())  # of parameters as they are
    names = {p.data_ptr(): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:  # placeholders, which know where parameters were
        for i, p in enumerate(group["params"]):
            address = p.data_ptr()
            group["params"][i] = torch.empty(1)
            group["params"][i].data_ptr = address
    mesh = mesh_of([0, 1])
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    new = dict(model.named_parameters())
    switch(optimizer, {address: new[name] for address, name in names.items()})
    for t in range(1, STEPS):
        step(network, alone, t)
        step(model, optimizer, t)
    check(optimizer, model, alone, network, "accelerate")
    assert optimizer._ranks.owners is not None


def made_on(ranks: list[int], **options: Any) -> tuple[nn.Module, Shampoo]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 66), nn.Tanh(), nn.Linear(66, 67))
    fully_shard(model, mesh=mesh_of(ranks))
    return model, Shampoo(model.parameters(), **{**OPTIONS, **options})


def told_of(full: bool, **options: Any) -> list[str]:
    """What is said of lost roots when a state dict after four steps is loaded."""
    how = StateDictOptions(full_state_dict=full, cpu_offload=True)
    model, optimizer = made_on([0, 1], **options)
    for _ in range(4):
        model(torch.ones(3, 70)).square().mean().backward()
        optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer, options=how)
    if full:  # which only the first rank has
        how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    twin, again = made_on([0, 1], **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_optimizer_state_dict(twin, again, saved, options=how)
    return [str(one.message) for one in caught if "roots" in str(one.message)]


def whole_files(rank: int) -> list[list[str]]:
    late = {"update_every": 1, "refresh_every": 8, "first_refresh": 6}
    return [told_of(True), told_of(True, update_every=1), told_of(False), told_of(True, **late)]


def test_what_a_full_state_dict_has_lost_is_said() -> None:
    """Accelerate's FULL_STATE_DICT, say: torch writes what the first rank owns, and no more."""
    first, second = run_on_ranks(2, whole_files)
    assert first == [[], [], [], []]
    (message,), (again,), *nothing = second
    assert message == again
    assert "kronbit.consolidate_state_dict" in message
    assert "SHARDED_STATE_DICT" in message
    assert nothing == [[], []]  # of a sharded one, and before the first refresh


def wrapped(rank: int) -> None:
    """Lightning's wrapper calls our methods with itself."""
    wrapper = pytest.importorskip("lightning.pytorch.core.optimizer").LightningOptimizer
    results = []
    for wrap in (lambda own: own, wrapper):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(70, 66), nn.Tanh(), nn.Linear(66, 67))
        fully_shard(model, mesh=mesh_of([0, 1]))
        optimizer = Shampoo(model[0].parameters(), **OPTIONS)
        for t in range(6):
            if t == 1:
                wrap(optimizer).add_param_group({"params": list(model[2].parameters())})
            model(torch.ones(3, 70)).square().mean().backward()
            optimizer.step()
        results.append([p.full_tensor() for p in model.parameters()])
    assert all(map(torch.equal, *results))


def test_a_group_may_be_added_through_a_wrapper() -> None:
    run_on_ranks(2, wrapped)


def test_parameters_that_are_sharded_after_the_optimizer_was_made() -> None:
    run_on_ranks(2, accelerated)


def test_ranks_find_what_one_process_finds() -> None:
    """To the bit, given equal gradients: FSDP2, uneven and empty shards, HSDP, replicas."""
    for found in zip(*run_on_ranks(4, in_turn, walk, walk_caspr), strict=True):
        parts, *complete = zip(*found, strict=True)
        for own in complete:
            assert set(own) == {sum(parts)}
        assert max(parts) < 0.6 * sum(parts)


class Tied(nn.Module):
    """An embedding whose weight is the last layer's, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner, self.last = (
            nn.Embedding(70, 33),
            nn.Linear(33, 33),
            nn.Linear(33, 70),
        )
        self.last.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.inner(self.embed(x))))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int, words: bool
) -> None:
    """Steps of two passes each, the first of which is not synchronised; by part of a batch."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for last in (False, True):
            if words:
                x = torch.randint(70, (12, 5), generator=generator)
            else:
                x = torch.randn(12, 70, generator=generator)
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last)
            model(x[rank::world]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_sharded(rank: int) -> None:
    """Training on three ranks, each with its part of a batch, and training in one process."""
    options = {**OPTIONS, "base": "sgd", "bits": 32}
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for words, more in (
        (False, {"reshard_after_forward": True}),
        (False, {"reshard_after_forward": False}),
        (False, {"mp_policy": half}),
        (True, {}),
    ):
        alone, start = (Tied() if words else Network() for _ in range(2))
        train(alone, Shampoo(alone.parameters(), process_group=False, **options), 0, 1, words)
        mesh = mesh_of([0, 1, 2])
        model = fully_shard(Tied(), mesh=mesh) if words else sharded(mesh, **more)
        optimizer = Shampoo(model.parameters(), **options)
        train(model, optimizer, rank, 3, words)
        for p, q, w in zip(model.parameters(), alone.parameters(), start.parameters(), strict=True):
            if q.requires_grad and not torch.equal(q, w):
                half = "mp_policy" in more
                error = float((whole(p) - q).detach().norm())
                limit = 0.3 * (q - w).detach().norm() if half else 1e-5 * q.detach().norm()
                assert error < limit, (more, error)


def test_training_on_shards_is_training_in_one_process() -> None:
    """Whatever is resharded, with weights in bf16 for the passes, with tied weights."""
    run_on_ranks(3, train_sharded)


def fail(rank: int) -> list[str]:
    """What goes wrong on one rank, all of them hear of."""
    told = []

    def attempt(optimizer: Shampoo) -> None:
        try:
            optimizer.step()
        except (RuntimeError, MemoryError, ValueError) as error:
            told.append(str(error))

    def no_room(*_: Any) -> None:
        raise MemoryError("no room")

    mesh = mesh_of([0, 1])
    for on_shards in (False, True):
        model = sharded(mesh) if on_shards else Network()
        shares: dict[str, Any] = {} if on_shards else {"shard_state": True}
        optimizer = Shampoo(model.parameters(), **shares, **OPTIONS)
        step(model, optimizer, 1)
        give_gradients(model, 2)
        gradient, model.second.bias.grad = model.second.bias.grad, None
        if rank == 0:
            model.second.bias.grad = gradient
        attempt(optimizer)
        model.second.bias.grad = gradient
        if rank == 1:
            for own in optimizer._plan.preconditioners.values():
                own._update_own = no_room  # type: ignore[method-assign]
        attempt(optimizer)
        attempt(Shampoo(model.parameters(), stagger=True, **shares, **OPTIONS))
    return told


def test_a_failure_of_one_owner_is_told_to_all() -> None:
    """And gradients that are still to be added up are, before anything else."""
    (_, first), (_, second) = run_on_ranks(2, in_turn, partial, fail)
    for rank, told in ((0, first), (1, second)):
        assert len(told) == 6
        for missing, failed, staggered in (told[:3], told[3:]):
            assert missing.startswith("the 2 ranks have gradients of different parameters")
            assert failed == "no room" if rank else "another one of the 2 ranks" in failed
            assert staggered.startswith("stagger=True spreads")


def partial(rank: int) -> None:
    """Gradients that are still to be added up."""
    mesh = mesh_of([0, 1])
    torch.manual_seed(0)
    weight, x = torch.randn(66, 70), torch.randn(8, 70)
    p = nn.Parameter(distribute_tensor(weight.clone(), mesh, [Replicate()]))
    q = nn.Parameter(weight.clone())
    options = {**OPTIONS, "base": "sgd", "bits": 32, "lr": 1e-4}
    one = Shampoo([q], process_group=False, **options)
    two = Shampoo([p], **options)
    for _ in range(STEPS):
        (distribute_tensor(x, mesh, [Shard(0)]) @ p.mT).square().sum().backward()
        (x @ q.mT).square().sum().backward()
        two.step()
        one.step()
        two.zero_grad()
        one.zero_grad()
    error = (p.full_tensor() - q).detach().norm() / (q.detach() - weight).norm()
    assert error < 1e-4, error


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def local_rows(rank: int, folder: str) -> None:
    """Each rank's rows are a matrix of their own; with as many ranks, checkpoints resume."""
    mesh = mesh_of([0, 1, 2])
    model, resumed = sharded(mesh), sharded(mesh)
    first, second = (
        Shampoo(own.parameters(), blocks="local", **OPTIONS) for own in (model, resumed)
    )
    own = [p for p in model.parameters() if p.requires_grad]
    alone = [nn.Parameter(local(p).detach().clone()) for p in own]
    one = Shampoo(alone, process_group=False, **OPTIONS)
    for t in range(1, STEPS):
        give_gradients(model, t)
        for p, q in zip(own, alone, strict=True):
            q.grad = None if p.grad is None else local(p.grad).clone()
        first.step()
        one.step()
        if t == 4:
            dcp.save(states(model, first), checkpoint_id=folder)
            found = states(resumed, second)
            # Layers that never had a gradient have no state in the base.
            planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
            dcp.load(found, checkpoint_id=folder, planner=planner)
            set_model_state_dict(resumed, found["model"])
            set_optimizer_state_dict(resumed, second, found["optimizer"])
        if t > 4:
            step(resumed, second, t)
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(local(p), local(q))
    for p, q in zip(own, alone, strict=True):
        assert torch.equal(local(p), q)
    assert first.diagnostics()["ranks"] == {}
    # Of two rows and one, the second rank's part is no matrix: they still agree.
    mesh = mesh_of([0, 1])
    if rank < 2:
        model = fully_shard(nn.Linear(67, 3), mesh=mesh)
        small = Shampoo(model.parameters(), blocks="local", nonfinite="raise", **OPTIONS)
        give_gradients(model, 1)
        small.step()
        if rank == 1:
            local(model.weight.grad).fill_(torch.nan)
        with pytest.raises(FloatingPointError, match="that of" if rank else "on another rank"):
            small.step()
    dist.barrier()
    with pytest.raises(RuntimeError, match="blocks='local' has cut each rank's rows"):
        kronbit.consolidate_state_dict(first)


def test_ranks_may_keep_to_their_own_rows(tmp_path: Path) -> None:
    run_on_ranks(3, local_rows, str(tmp_path))


def on_one_gpu(rank: int, on_shards: bool) -> None:
    """By kernels, and by what GPUs talk with: as one process without any of that."""
    network = Network().cuda()
    alone = Shampoo(network.parameters(), process_group=False, **OPTIONS)
    ways: list[dict[str, Any]] = [{"process_group": dist.group.WORLD}, {"shard_state": True}]
    for t in range(1, STEPS):
        step(network, alone, t)
    for options in [*ways, *([{}] if on_shards else [])]:
        if options:
            model: nn.Module = Network().cuda()
            given = {"process_group": dist.group.WORLD, **options}
        else:
            model, given = sharded(init_device_mesh("cuda", (1,))), {}
        optimizer = Shampoo(model.parameters(), **given, **OPTIONS)
        for t in range(1, STEPS):
            step(model, optimizer, t)
        for p, q in zip(model.parameters(), network.parameters(), strict=True):
            assert torch.equal(whole(p), q), options
        found = kronbit.consolidate_state_dict(optimizer)
        if found:
            fresh = Network().cuda()
            resumed = Shampoo(fresh.parameters(), process_group=False, **OPTIONS)
            kronbit.load_consolidated(resumed, found)
            same(resumed.state_dict()["state"], alone.state_dict()["state"], f"{options}")


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "world"), [("nccl", 1), ("gloo", 2)])
def test_ranks_on_a_gpu(backend: str, world: int) -> None:
    """There is one GPU: NCCL's only rank; and two that take turns, and talk on the host."""
    run_on_ranks(world, on_one_gpu, world == 1, backend=backend)
