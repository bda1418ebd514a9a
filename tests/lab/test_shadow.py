"""The shadow of a run matches a separate replay, resumes, and skips what the optimizer skips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.numerics import angle, relative_error
from support.roots import SCHEDULE, backward, exact_root, network, stored_roots
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from kronbit import CASPR, KFAC, Shampoo
from kronbit.lab.errors import LabError
from kronbit.lab.training.shadow import Shadow
from kronbit.optimizer import SecondOrder


def watched(optimizer: SecondOrder, model: nn.Module, blocks: int = 4) -> Shadow:
    return Shadow(optimizer, {p: name for name, p in model.named_parameters()}, blocks)


def names(shadow: Shadow) -> tuple[str, ...]:
    return tuple(watch.name for watch in shadow.watches)


@pytest.mark.parametrize("bits", [32, 4])
@pytest.mark.parametrize("algorithm", [Shampoo, CASPR])
def test_shadow_agrees_with_a_separate_replay(
    algorithm: type[SecondOrder], bits: int, device: torch.device
) -> None:
    model = network(device)
    options = {**SCHEDULE, "bits": bits, "damping": 1e-4, "newton_steps": 40}
    optimizer = algorithm(model.named_parameters(), lr=1e-3, **options)
    shadow = watched(optimizer, model)
    assert names(shadow) == ("0.weight", "2.weight")
    exact = {
        f"{layer}.weight {side}": 1e-4 * torch.eye(n, dtype=torch.float64)
        for layer, side, n in ((0, "left", 64), (0, "right", 80), (2, "left", 48), (2, "right", 64))
    }
    refreshed = []
    for t in range(1, 13):
        backward(model, t)
        for name in exact if t % 2 == 0 else ():
            grad = model.get_submodule(name[0]).weight.grad.cpu().double()
            G = grad if "left" in name else grad.mT
            exact[name] = 0.95 * exact[name] + 0.05 * G @ G.mT
        shadow.before_step()
        optimizer.step()
        line = shadow.after_step()
        if line is None:
            continue
        refreshed.append(t)
        assert set(line["blocks"]) == set(exact)
        off_diagonals = []
        roots = {f"{name} {side}": root for name, side, root in stored_roots(optimizer)}
        for name, A in exact.items():
            root = roots[name.replace("weight", "weight block_0")]
            expected = exact_root(A, 1e-4, 4)
            assert line["blocks"][name]["nre"] == pytest.approx(
                relative_error(root, expected), rel=1e-3, abs=1e-9
            )
            assert line["blocks"][name]["angle"] == pytest.approx(
                angle(root, expected), rel=1e-3, abs=1e-5
            )
            off = [X - torch.diag(X.diagonal()) for X in (root.double(), expected)]
            off_diagonals.append((relative_error(*off), angle(*off)))
        for key, mean in zip(
            ("nre", "angle"), torch.tensor(off_diagonals).mean(0).tolist(), strict=True
        ):
            every = [errors[key] for errors in line["blocks"].values()]
            assert line[key] == pytest.approx(sum(every) / 4)
            assert line["off_diagonal"][key] == pytest.approx(mean, rel=2e-3, abs=1e-5)
        low, high = (0, 1e-3) if bits == 32 else (1e-3, 1)
        assert low <= line["nre"] < high
    assert refreshed == [2, 4, 6, 12]


def test_shadow_resumes_from_its_state(tmp_path: Path) -> None:
    def lines(optimizer: SecondOrder, model: nn.Module, shadow: Shadow, steps: range) -> list[Any]:
        written = []
        for t in steps:
            backward(model, t)
            shadow.before_step()
            optimizer.step()
            written.append(shadow.after_step())
        return written

    model = network()
    optimizer = Shampoo(model.named_parameters(), lr=1e-3, **SCHEDULE)
    shadow = watched(optimizer, model, 1)
    assert names(shadow) == ("0.weight",)
    lines(optimizer, model, shadow, range(9))
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**content, "shadow": shadow.state_dict()}, tmp_path / "c.pt")
    expected = lines(optimizer, model, shadow, range(9, 20))
    saved = torch.load(tmp_path / "c.pt", weights_only=True)
    twin = network()
    twin.load_state_dict(saved["model"])
    resumed = Shampoo(twin.named_parameters(), lr=1e-3, **SCHEDULE)
    resumed.load_state_dict(saved["optimizer"])
    again = watched(resumed, twin, 1)
    again.load_state_dict(saved["shadow"])
    assert lines(resumed, twin, again, range(9, 20)) == expected
    assert [t for t, line in zip(range(10, 21), expected, strict=True) if line] == [12, 18]
    with pytest.raises(LabError, match="not in the checkpoint"):
        watched(resumed, twin, 2).load_state_dict(saved["shadow"])


def test_shadow_skips_what_the_optimizer_skips() -> None:
    """The shadow skips non-finite gradients, missing gradients, and steps that are not taken."""
    model = network()
    optimizer = Shampoo(model.named_parameters(), lr=1e-3, update_every=1, refresh_every=100)
    shadow = watched(optimizer, model)

    def exact() -> list[Tensor]:
        return [A.clone() for A in shadow.state_dict().values()]

    def unchanged(before: list[Tensor]) -> list[bool]:
        return [torch.equal(a, b) for a, b in zip(before, exact(), strict=True)]

    before = exact()
    backward(model, 0)
    shadow.before_step()  # no step follows, as when a scaler finds an overflow
    assert shadow.after_step() is None
    assert all(unchanged(before))
    model[0].weight.grad[1, 1] = torch.inf  # 0.weight, whose sides come first
    model[2].weight.grad = None
    shadow.before_step()
    with pytest.warns(RuntimeWarning, match="non-finite"):
        optimizer.step()
    assert shadow.after_step() is None
    assert all(unchanged(before))
    backward(model, 1)
    model[2].weight.grad = None
    shadow.before_step()
    optimizer.step()
    shadow.after_step()
    assert unchanged(before) == [False, False, True, True]


def test_shadow_watches_the_largest_block_of_each_parameter() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(40, 24), nn.Linear(24, 70), nn.Conv2d(3, 8, 3), nn.Linear(30, 30)
    )
    groups = [
        {"params": list(model[:3].named_parameters())},
        {"params": [("3.weight", model[3].weight)], "precondition": False},
    ]
    optimizer = Shampoo(groups, lr=1e-3, max_order=32, update_every=1, refresh_every=1, bits=32)
    shadow = watched(optimizer, model, 2)
    # 24 x 40 is cut into 24 x 32 and 24 x 8, 70 x 24 into 32 x 24 twice and 6 x 24.
    assert names(shadow) == ("0.weight block_0", "1.weight block_0")
    assert names(watched(optimizer, model, 9))[2:] == ("2.weight",)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    shadow.before_step()
    grad = model[1].weight.grad.double()
    optimizer.step()
    line = shadow.after_step()
    assert line is not None
    exact = shadow.state_dict()["1.weight block_0 left"]
    expected = 0.95e-6 * torch.eye(32) + 0.05 * grad[:32] @ grad[:32].mT
    assert relative_error(exact, expected) < 1e-12


def test_shadow_watches_neither_staggered_refreshes_nor_layers() -> None:
    model = network()
    staggered = Shampoo(model.named_parameters(), lr=1e-3, stagger=True)
    layers = KFAC(model.named_parameters(), model=model, lr=1e-3)
    for optimizer in (staggered, layers):
        shadow = watched(optimizer, model)
        assert names(shadow) == ()
        backward(model, 0)
        shadow.before_step()
        optimizer.step()
        assert shadow.after_step() is None
        assert shadow.state_dict() == {}


@pytest.mark.parametrize("rank", [0, 1])
def test_shadow_watches_whole_parameters_on_the_first_rank(rank: int) -> None:
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        plain, sharded = network(), network()
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for linear in (sharded[0], sharded[2]):
            linear.weight = nn.Parameter(
                distribute_tensor(linear.weight.detach(), mesh, [Shard(0)])
            )
        for model, options, expected in (
            (plain, {}, ("0.weight", "2.weight")),
            (plain, {"shard_state": True}, ()),
            (sharded, {}, ()),
        ):
            optimizer = Shampoo(model.named_parameters(), lr=1e-3, **options)
            assert names(watched(optimizer, model)) == (() if rank else expected)
    finally:
        dist.destroy_process_group()
