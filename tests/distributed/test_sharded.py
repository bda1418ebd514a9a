"""Sharded parameters, and state on one rank each, give the results of one process."""

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
    """Compare weights and the state of all ranks with one process, bit for bit."""
    for (name, p), q in zip(model.named_parameters(), network.parameters(), strict=True):
        assert torch.equal(whole(p), q), f"{where} {name}"
    state_dict = kronbit.consolidate_state_dict(optimizer)
    if state_dict:
        expected = alone.state_dict()
        for group in (*state_dict["param_groups"], *expected["param_groups"]):
            group.pop("shard_state", None)
        same(state_dict, expected, where)
    repaired = torch.tensor(optimizer.diagnostics()["jittered"])
    owners = optimizer._ranks.owners
    if owners is not None:  # owners count their own repairs, replicas count all
        dist.all_reduce(repaired, group=owners.link.group)
    assert repaired == alone.diagnostics()["jittered"] > 0


def compare_caspr(rank: int) -> list[int]:
    return compare_divisions(rank, CASPR)


def compare_divisions(rank: int, make: Any = Shampoo) -> list[int]:
    """Train with each division of parameters and state; return the bytes of state by division."""
    network = Network()
    alone = make(network.parameters(), process_group=False, **OPTIONS)
    for t in range(1, STEPS):
        step(network, alone, t)
    sizes = []
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
        sizes.append(held["statistics"] + held["roots"])
        if "shard_state" in options:
            with pytest.raises(RuntimeError, match=r"kronbit\.consolidate_state_dict"):
                optimizer.state_dict()
    return sizes


def accelerated(rank: int) -> None:
    """Prepare FSDP2 as Accelerate does, which builds the optimizer before it shards parameters."""
    switch = pytest.importorskip("accelerate.utils.fsdp_utils").fsdp2_switch_optimizer_parameters
    network = Network()
    alone = Shampoo(network.parameters(), process_group=False, **OPTIONS)
    model = Network()
    optimizer = Shampoo(model.parameters(), **OPTIONS)
    optimizer.load_state_dict(optimizer.state_dict())  # of parameters that are not sharded yet
    names = {p.data_ptr(): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:  # placeholders with the addresses of parameters
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


def warnings_of_lost_roots(full: bool, **options: Any) -> list[str]:
    """Return the warnings of lost roots when a state dict after four steps is loaded."""
    how = StateDictOptions(full_state_dict=full, cpu_offload=True)
    model, optimizer = made_on([0, 1], **options)
    for _ in range(4):
        model(torch.ones(3, 70)).square().mean().backward()
        optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer, options=how)
    if full:  # only the first rank has the state dict
        how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    twin, again = made_on([0, 1], **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_optimizer_state_dict(twin, again, saved, options=how)
    return [str(one.message) for one in caught if "roots" in str(one.message)]


def whole_files(rank: int) -> list[list[str]]:
    late = {"update_every": 1, "refresh_every": 8, "first_refresh": 6}
    return [
        warnings_of_lost_roots(True),
        warnings_of_lost_roots(True, update_every=1),
        warnings_of_lost_roots(False),
        warnings_of_lost_roots(True, **late),
    ]


def test_a_full_state_dict_without_roots_gives_a_warning() -> None:
    """A full state dict of torch has only the state that the first rank owns."""
    first, second = run_on_ranks(2, whole_files)
    assert first == [[], [], [], []]
    (message,), (again,), *nothing = second
    assert message == again
    assert "kronbit.consolidate_state_dict" in message
    assert "SHARDED_STATE_DICT" in message
    assert nothing == [[], []]  # a sharded state dict, and one before the first refresh


def wrapped(rank: int) -> None:
    """Train with Lightning's wrapper, which calls methods of the optimizer on itself."""
    wrapper = pytest.importorskip("lightning.pytorch.core.optimizer").LightningOptimizer
    results = []
    for wrap in (lambda optimizer: optimizer, wrapper):
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


def test_parameters_may_be_sharded_after_the_optimizer_was_built() -> None:
    run_on_ranks(2, accelerated)


def test_ranks_match_one_process_bit_for_bit() -> None:
    """FSDP2, uneven and empty shards, HSDP and replicas, given equal gradients."""
    for sizes in zip(*run_on_ranks(4, in_turn, compare_divisions, compare_caspr), strict=True):
        parts, *complete = zip(*sizes, strict=True)
        for size in complete:
            assert set(size) == {sum(parts)}
        assert max(parts) < 0.6 * sum(parts)


class Tied(nn.Module):
    """An embedding that shares its weight with the last layer."""

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
    """Take steps of two passes, the first not synchronised, on this rank's part of a batch."""
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
    """Compare training on three ranks, each with its part of a batch, with one process."""
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


def test_training_on_shards_matches_training_in_one_process() -> None:
    """With and without resharding after the forward pass, in mixed precision, with tied weights."""
    run_on_ranks(3, train_sharded)


def fail(rank: int) -> list[str]:
    """Return the errors that a rank raises if something fails on one of them."""
    messages = []

    def attempt(optimizer: Shampoo) -> None:
        try:
            optimizer.step()
        except (RuntimeError, MemoryError, ValueError) as error:
            messages.append(str(error))

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
            for preconditioner in optimizer._plan.preconditioners.values():
                preconditioner._update_own = no_room  # type: ignore[method-assign]
        attempt(optimizer)
        attempt(Shampoo(model.parameters(), stagger=True, **shares, **OPTIONS))
    return messages


def test_a_failure_of_one_owner_raises_an_error_on_all_ranks() -> None:
    """The same processes check partial gradients, which must be added up."""
    (_, first), (_, second) = run_on_ranks(2, in_turn, partial, fail)
    for rank, messages in ((0, first), (1, second)):
        assert len(messages) == 6
        for missing, failed, staggered in (messages[:3], messages[3:]):
            assert missing.startswith("the 2 ranks have gradients of different parameters")
            assert failed == "no room" if rank else "another one of the 2 ranks" in failed
            assert staggered.startswith("stagger=True spreads")


def partial(rank: int) -> None:
    """Compare one process with gradients that are partial sums."""
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
    """Compare blocks="local" with one process per rank, and resume from a checkpoint."""
    mesh = mesh_of([0, 1, 2])
    model, resumed = sharded(mesh), sharded(mesh)
    first, second = (
        Shampoo(network.parameters(), blocks="local", **OPTIONS) for network in (model, resumed)
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    alone = [nn.Parameter(local(p).detach().clone()) for p in trained]
    one = Shampoo(alone, process_group=False, **OPTIONS)
    for t in range(1, STEPS):
        give_gradients(model, t)
        for p, q in zip(trained, alone, strict=True):
            q.grad = None if p.grad is None else local(p.grad).clone()
        first.step()
        one.step()
        if t == 4:
            dcp.save(states(model, first), checkpoint_id=folder)
            content = states(resumed, second)
            # Layers that never had a gradient have no state in the base.
            planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
            dcp.load(content, checkpoint_id=folder, planner=planner)
            set_model_state_dict(resumed, content["model"])
            set_optimizer_state_dict(resumed, second, content["optimizer"])
        if t > 4:
            step(resumed, second, t)
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(local(p), local(q))
    for p, q in zip(trained, alone, strict=True):
        assert torch.equal(local(p), q)
    assert first.diagnostics()["ranks"] == {}
    # Three rows on two ranks: the second rank's part is no matrix, and the ranks still agree.
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


def test_local_blocks_precondition_the_rows_of_each_rank(tmp_path: Path) -> None:
    run_on_ranks(3, local_rows, str(tmp_path))


def on_one_gpu(rank: int, on_shards: bool) -> None:
    """Compare ranks on a GPU with one process."""
    network = Network().cuda()
    alone = Shampoo(network.parameters(), process_group=False, **OPTIONS)
    divisions: list[dict[str, Any]] = [{"process_group": dist.group.WORLD}, {"shard_state": True}]
    for t in range(1, STEPS):
        step(network, alone, t)
    for options in [*divisions, *([{}] if on_shards else [])]:
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
        state_dict = kronbit.consolidate_state_dict(optimizer)
        if state_dict:
            fresh = Network().cuda()
            resumed = Shampoo(fresh.parameters(), process_group=False, **OPTIONS)
            kronbit.load_consolidated(resumed, state_dict)
            same(resumed.state_dict()["state"], alone.state_dict()["state"], f"{options}")


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "world"), [("nccl", 1), ("gloo", 2)])
def test_ranks_on_a_gpu_match_one_process(backend: str, world: int) -> None:
    """One GPU serves one rank with NCCL, or two ranks that communicate on the host with gloo."""
    run_on_ranks(world, on_one_gpu, world == 1, backend=backend)
