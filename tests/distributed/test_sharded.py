"""Training with sharded parameters or sharded state gives the results of one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import in_turn, run_on_ranks
from support.shards import (
    OPTIONS,
    Network,
    assert_same,
    give_gradients,
    mesh_of,
    sharded,
    step,
    whole,
)
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


def check(optimizer: Any, model: nn.Module, reference: Any, network: nn.Module, where: str) -> None:
    """Assert that weights and the state of all ranks are bit-identical to those of one process."""
    for (name, p), q in zip(model.named_parameters(), network.parameters(), strict=True):
        assert torch.equal(whole(p), q), f"{where} {name}"
    consolidated = kronbit.consolidate_state_dict(optimizer)
    if consolidated:
        expected = reference.state_dict()
        for group in (*consolidated["param_groups"], *expected["param_groups"]):
            group.pop("shard_state", None)
        assert_same(consolidated, expected, where)
    repaired = torch.tensor(optimizer.diagnostics()["jittered"])
    owners = optimizer._ranks.owners
    if owners is not None:  # owners count their parameters, replicas count all
        dist.all_reduce(repaired, group=owners.link.group)
    assert repaired == reference.diagnostics()["jittered"] > 0


def compare_caspr(rank: int) -> list[int]:
    return compare_layouts(rank, CASPR)


def compare_layouts(rank: int, make: Any = Shampoo) -> list[int]:
    """Compare every layout of parameters and state with one process."""
    network = Network()
    reference = make(network.parameters(), process_group=False, **OPTIONS)
    for t in range(1, STEPS):
        step(network, reference, t)
    sizes = []
    for ranks in ([0, 1, 2, 3], [0, 1, 2], [0], [[0, 1], [2, 3]]):
        flat = torch.tensor(ranks).flatten().tolist()
        mesh = mesh_of(ranks)
        if rank in flat:
            model = sharded(mesh)
            optimizer = make(model.parameters(), **OPTIONS)
            for t in range(1, STEPS):
                step(model, optimizer, t)
            check(optimizer, model, reference, network, f"{ranks}")
            assert optimizer.memory()["base"] <= reference.memory()["base"] * (
                len(ranks) == 1 or 0.7
            )
        dist.barrier()
    for options in ({"shard_state": True}, {"process_group": dist.group.WORLD}, {}):
        model = Network()
        optimizer = make(model.parameters(), **options, **OPTIONS)
        for t in range(1, STEPS):
            step(model, optimizer, t)
        check(optimizer, model, reference, network, f"{options}")
        memory = optimizer.memory()
        sizes.append(memory["statistics"] + memory["roots"])
        if "shard_state" in options:
            with pytest.raises(RuntimeError, match=r"kronbit\.consolidate_state_dict"):
                optimizer.state_dict()
    return sizes


def shard_like_accelerate(rank: int) -> None:
    """Shard the parameters after the optimizer is made, as Accelerate does for FSDP2."""
    switch = pytest.importorskip("accelerate.utils.fsdp_utils").fsdp2_switch_optimizer_parameters
    network = Network()
    reference = Shampoo(network.parameters(), process_group=False, **OPTIONS)
    model = Network()
    optimizer = Shampoo(model.parameters(), **OPTIONS)
    optimizer.load_state_dict(optimizer.state_dict())  # while parameters are unsharded
    names = {p.data_ptr(): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:  # placeholders with the addresses of the parameters
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
        step(network, reference, t)
        step(model, optimizer, t)
    check(optimizer, model, reference, network, "accelerate")
    assert optimizer._ranks.owners is not None


def build_on(ranks: list[int], **options: Any) -> tuple[nn.Module, Shampoo]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 66), nn.Tanh(), nn.Linear(66, 67))
    fully_shard(model, mesh=mesh_of(ranks))
    return model, Shampoo(model.parameters(), **{**OPTIONS, **options})


def warnings_after_loading(full: bool, **options: Any) -> list[str]:
    """Return the warnings about lost roots after loading a state dict of four steps."""
    how = StateDictOptions(full_state_dict=full, cpu_offload=True)
    model, optimizer = build_on([0, 1], **options)
    for _ in range(4):
        model(torch.ones(3, 70)).square().mean().backward()
        optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer, options=how)
    if full:  # only rank 0 has a full state dict
        how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    twin, again = build_on([0, 1], **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_optimizer_state_dict(twin, again, saved, options=how)
    return [str(warning.message) for warning in caught if "roots" in str(warning.message)]


def load_state_dicts(rank: int) -> list[list[str]]:
    late = {"update_every": 1, "refresh_every": 8, "first_refresh": 6}
    return [
        warnings_after_loading(True),
        warnings_after_loading(True, update_every=1),
        warnings_after_loading(False),
        warnings_after_loading(True, **late),
    ]


def test_loading_a_full_state_dict_warns_about_lost_roots() -> None:
    """A full state dict (FULL_STATE_DICT of Accelerate) holds only the state that rank 0 owns."""
    first, second = run_on_ranks(2, load_state_dicts)
    assert first == [[], [], [], []]
    (message,), (again,), *others = second
    assert message == again
    assert "kronbit.consolidate_state_dict" in message
    assert "SHARDED_STATE_DICT" in message
    assert others == [[], []]  # a sharded state dict, and one before the first refresh


def add_group_by_wrapper(rank: int) -> None:
    """Add a group through Lightning's wrapper, which passes itself as ``self`` to our methods."""
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


def test_a_wrapper_can_add_a_group() -> None:
    run_on_ranks(2, add_group_by_wrapper)


def test_parameters_may_be_sharded_after_the_optimizer_is_made() -> None:
    run_on_ranks(2, shard_like_accelerate)


def test_every_layout_matches_one_process() -> None:
    """FSDP2 (also uneven and empty shards), HSDP and replicas are bit-identical to one process."""
    for results in zip(*run_on_ranks(4, in_turn, compare_layouts, compare_caspr), strict=True):
        parts, *complete = zip(*results, strict=True)
        for sizes in complete:
            assert set(sizes) == {sum(parts)}
        assert max(parts) < 0.6 * sum(parts)


class Tied(nn.Module):
    """A network whose last layer shares the weight of the embedding."""

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
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int, tokens: bool
) -> None:
    """Take steps of two passes, the first unsynchronised. A rank sees its share of every batch."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for last in (False, True):
            if tokens:
                x = torch.randint(70, (12, 5), generator=generator)
            else:
                x = torch.randn(12, 70, generator=generator)
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last)
            model(x[rank::world]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_sharded(rank: int) -> None:
    """Compare training on three ranks, each with its share of a batch, with one process."""
    options = {**OPTIONS, "base": "sgd", "bits": 32}
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for tokens, more in (
        (False, {"reshard_after_forward": True}),
        (False, {"reshard_after_forward": False}),
        (False, {"mp_policy": half}),
        (True, {}),
    ):
        reference, start = (Tied() if tokens else Network() for _ in range(2))
        train(
            reference, Shampoo(reference.parameters(), process_group=False, **options), 0, 1, tokens
        )
        mesh = mesh_of([0, 1, 2])
        model = fully_shard(Tied(), mesh=mesh) if tokens else sharded(mesh, **more)
        optimizer = Shampoo(model.parameters(), **options)
        train(model, optimizer, rank, 3, tokens)
        networks = model.parameters(), reference.parameters(), start.parameters()
        moved = [(p, q, w) for p, q, w in zip(*networks, strict=True) if not torch.equal(q, w)]
        assert len(moved) == (4 if tokens else 6)
        for p, q, w in moved:
            mixed = "mp_policy" in more
            error = float((whole(p) - q).detach().norm())
            limit = 0.3 * (q - w).detach().norm() if mixed else 1e-5 * q.detach().norm()
            assert error < limit, (more, error)


def test_training_on_shards_matches_one_process() -> None:
    """Results agree with and without resharding, with bf16 passes, and with tied weights."""
    run_on_ranks(3, train_sharded)


def fail_on_one_rank(rank: int) -> list[str]:
    """Return the errors of this rank after failures of one rank."""
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
        sharding: dict[str, Any] = {} if on_shards else {"shard_state": True}
        optimizer = Shampoo(model.parameters(), **sharding, **OPTIONS)
        step(model, optimizer, 1)
        give_gradients(model, 2)
        gradient, model.second.bias.grad = model.second.bias.grad, None
        if rank == 0:
            model.second.bias.grad = gradient
        attempt(optimizer)
        model.second.bias.grad = gradient
        if rank == 1:
            for preconditioner in optimizer._keeper.plan.preconditioners.values():
                preconditioner._update_assigned = no_room  # type: ignore[method-assign]
        attempt(optimizer)
        attempt(Shampoo(model.parameters(), stagger=True, **sharding, **OPTIONS))
    return messages


def test_all_ranks_learn_of_the_failure_of_one_owner() -> None:
    """Partial gradients are reduced before the step, and errors reach every rank."""
    (_, first), (_, second) = run_on_ranks(2, in_turn, reduce_partial_gradients, fail_on_one_rank)
    for rank, messages in ((0, first), (1, second)):
        assert len(messages) == 6
        for missing, failed, staggered in (messages[:3], messages[3:]):
            assert missing.startswith("the 2 ranks have gradients of different parameters")
            assert failed == "no room" if rank else "another of the 2 ranks" in failed
            assert staggered.startswith("stagger=True spreads")


def reduce_partial_gradients(rank: int) -> None:
    """Step with gradients whose placement is Partial."""
    mesh = mesh_of([0, 1])
    torch.manual_seed(0)
    weight, x = torch.randn(66, 70), torch.randn(8, 70)
    p = nn.Parameter(distribute_tensor(weight.clone(), mesh, [Replicate()]))
    q = nn.Parameter(weight.clone())
    options = {**OPTIONS, "base": "sgd", "bits": 32, "lr": 1e-4}
    reference = Shampoo([q], process_group=False, **options)
    sharded_optimizer = Shampoo([p], **options)
    for _ in range(STEPS):
        (distribute_tensor(x, mesh, [Shard(0)]) @ p.mT).square().sum().backward()
        (x @ q.mT).square().sum().backward()
        sharded_optimizer.step()
        reference.step()
        sharded_optimizer.zero_grad()
        reference.zero_grad()
    error = (p.full_tensor() - q).detach().norm() / (q.detach() - weight).norm()
    assert error < 1e-4, error


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def keep_local_rows(rank: int, folder: str) -> None:
    """Treat each rank's rows as a matrix, and resume on the same number of ranks."""
    mesh = mesh_of([0, 1, 2])
    model, resumed = sharded(mesh), sharded(mesh)
    first, second = (
        Shampoo(network.parameters(), blocks="local", **OPTIONS) for network in (model, resumed)
    )
    params = [p for p in model.parameters() if p.requires_grad]
    copies = [nn.Parameter(local(p).detach().clone()) for p in params]
    reference = Shampoo(copies, process_group=False, **OPTIONS)
    for t in range(1, STEPS):
        give_gradients(model, t)
        for p, q in zip(params, copies, strict=True):
            q.grad = None if p.grad is None else local(p.grad).clone()
        first.step()
        reference.step()
        if t == 4:
            dcp.save(states(model, first), checkpoint_id=folder)
            loaded = states(resumed, second)
            # Layers without a gradient have no state in the base optimizer.
            planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
            dcp.load(loaded, checkpoint_id=folder, planner=planner)
            set_model_state_dict(resumed, loaded["model"])
            set_optimizer_state_dict(resumed, second, loaded["optimizer"])
        if t > 4:
            step(resumed, second, t)
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(local(p), local(q))
    for p, q in zip(params, copies, strict=True):
        assert torch.equal(local(p), q)
    assert first.diagnostics()["ranks"] == {}
    # One of three rows is on rank 1: a single row is not a matrix, but the ranks still agree.
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


def test_local_blocks_match_one_process_per_rank(tmp_path: Path) -> None:
    run_on_ranks(3, keep_local_rows, str(tmp_path))


def train_on_one_gpu(rank: int, on_shards: bool) -> None:
    """Compare ranks on a GPU, with kernels and collectives, with one process."""
    network = Network().cuda()
    reference = Shampoo(network.parameters(), process_group=False, **OPTIONS)
    layouts: list[dict[str, Any]] = [{"process_group": dist.group.WORLD}, {"shard_state": True}]
    for t in range(1, STEPS):
        step(network, reference, t)
    for options in [*layouts, *([{}] if on_shards else [])]:
        if options:
            model: nn.Module = Network().cuda()
            arguments = {"process_group": dist.group.WORLD, **options}
        else:
            model, arguments = sharded(init_device_mesh("cuda", (1,))), {}
        optimizer = Shampoo(model.parameters(), **arguments, **OPTIONS)
        for t in range(1, STEPS):
            step(model, optimizer, t)
        for p, q in zip(model.parameters(), network.parameters(), strict=True):
            assert torch.equal(whole(p), q), options
        consolidated = kronbit.consolidate_state_dict(optimizer)
        if consolidated:
            fresh = Network().cuda()
            resumed = Shampoo(fresh.parameters(), process_group=False, **OPTIONS)
            kronbit.load_consolidated(resumed, consolidated)
            expected = reference.state_dict()["state"]
            assert_same(resumed.state_dict()["state"], expected, f"{options}")


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "world"), [("nccl", 1), ("gloo", 2)])
def test_ranks_on_a_gpu(backend: str, world: int) -> None:
    """One rank with NCCL, and two gloo ranks that share a GPU, match one process."""
    run_on_ranks(world, train_on_one_gpu, world == 1, backend=backend)
