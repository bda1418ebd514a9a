"""``kronbit errors`` and the shadow of a run match separate computations."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from support.numerics import METHODS, angle, relative_error, spd
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from kronbit import CASPR, KFAC, Config, Shampoo
from kronbit.lab.errors import LabError
from kronbit.lab.quantisation.errors import (
    KEPT,
    Deviation,
    Statistic,
    contraction,
    kept_root,
    rectification,
    singular_values,
    static_table,
    synthetic_matrix,
)
from kronbit.lab.quantisation.report import (
    Held,
    checkpoint_errors,
    read_preconditioners,
    synthetic_errors,
)
from kronbit.lab.quantisation.tables import show_errors
from kronbit.lab.training.shadow import Shadow
from kronbit.optimizer import SecondOrder

SCHEDULE: dict[str, Any] = {"update_every": 2, "refresh_every": 6, "first_refresh": 2}


CPU = torch.device("cpu")


def network(device: torch.device = CPU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(80, 64), nn.Tanh(), nn.Linear(64, 48)).to(device)


def backward(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    model.zero_grad()
    x = torch.randn(96, 80).to(next(model.parameters()).device)
    (model(x) - x[:, :48].tanh()).square().mean().backward()


def train(optimizer: SecondOrder, model: nn.Module, steps: int) -> None:
    for seed in range(steps):
        backward(model, seed)
        optimizer.step()


def run(steps: int = 6, **options: Any) -> Shampoo:
    """Train a small network; the last of six steps is a refresh."""
    model = network()
    optimizer = Shampoo(model.named_parameters(), lr=1e-3, **{**SCHEDULE, **options})
    train(optimizer, model, steps)
    return optimizer


def held(optimizer: SecondOrder) -> list[Held]:
    return list(read_preconditioners("the test", optimizer.state_dict()))


def stored_roots(optimizer: SecondOrder) -> Iterator[tuple[str, str, Tensor]]:
    names = dict(zip(*_params_and_names(optimizer), strict=True))
    assert optimizer._keeper.plan is not None
    for p, key, row, sides in optimizer._keeper.plan.blocks():
        for side, factors in sides.items():
            yield f"{names[p]} {key}", side, factors.roots(slice(row, row + 1))[0]


def _params_and_names(optimizer: SecondOrder) -> tuple[list[Tensor], list[str]]:
    groups = optimizer.param_groups
    return (
        [p for group in groups for p in group["params"]],
        [name for group in groups for name in group["param_names"]],
    )


def exact_root(A: Tensor, damping: float, p: int) -> Tensor:
    """Return the root in float64, by an inverse and square roots instead of powers of λ."""
    A = A.double()
    A = A + damping * torch.linalg.eigvalsh(A).max() * torch.eye(len(A), dtype=A.dtype)
    root = torch.linalg.inv(A)
    for _ in range(p.bit_length() - 1):
        lam, V = torch.linalg.eigh(root)
        root = (V * lam.sqrt()) @ V.mT
    return root


# -------------------------------------------------------------------------------------- one matrix


def test_deviation_is_nre_and_angle() -> None:
    exact, noise = torch.randn(2, 20, 20, dtype=torch.float64)
    for size in (1e-3, 1.0):
        error = Deviation.of(exact + size * noise, exact)
        assert error.nre == pytest.approx(relative_error(exact + size * noise, exact))
        assert error.angle == pytest.approx(angle(exact + size * noise, exact))
    # With an orthogonal error of 1e-9, the cosine would have no correct digit.
    orthogonal = noise - exact * (noise * exact).sum() / exact.square().sum()
    error = Deviation.of(exact + 1e-9 * orthogonal * exact.norm() / orthogonal.norm(), exact)
    assert error.angle == pytest.approx(torch.rad2deg(torch.tensor(1e-9)).item(), rel=1e-3)


@pytest.mark.parametrize("exponent", [-0.25, -0.5, -1.0])
def test_statistic_has_the_exact_root(exponent: float) -> None:
    A = spd(1, 30, 1e5)[0]
    config = Config(exponent=exponent, damping=1e-3)
    root = Statistic.of(A, config).root()
    assert relative_error(root, exact_root(A, 1e-3, round(-1 / exponent))) < 1e-9
    scaled = Statistic.of(A, replace(config, trace_scaling=True)).root()
    divided = A / A.trace().sqrt()
    assert relative_error(scaled, exact_root(divided, 1e-3, round(-1 / exponent))) < 1e-9


@pytest.mark.parametrize(("method", "storage"), KEPT)
def test_kept_root_is_the_root_that_an_optimizer_stores(method: str, storage: str) -> None:
    """A 32-bit checkpoint is loaded into a 4-bit optimizer, which refreshes without updates."""
    wide = run(bits=32)
    options: dict[str, Any] = {"bits": 4, "method": method, "storage": storage}
    (p,) = [p for p in wide.state if p.shape == (64, 80)]
    narrow = Shampoo([nn.Parameter(p.detach().clone())], lr=0.0, **options)
    state = {**wide.state_dict()["state"][0], "base": {}}
    group = {**wide.state_dict()["param_groups"][0], "params": [0], "param_names": ["0"]}
    group |= {"update_every": 10**6, "refresh_every": 1, "first_refresh": None}
    narrow.load_state_dict({"state": {0: state}, "param_groups": [group]})
    (q,) = narrow.param_groups[0]["params"]
    q.grad = torch.randn_like(q)
    narrow.step()
    config = replace(narrow.config, **{name: group[name] for name in ("damping", "newton_steps")})
    for side, (_, _, root) in zip(("left", "right"), _unnamed_roots(narrow), strict=True):
        statistic = Statistic.of(wide.state[p]["block_0"][side]["matrix"], config)
        exact = statistic.root()
        error = relative_error(root, exact)
        assert 1e-3 < error < 1
        # Rounding errors change a few codes.
        assert relative_error(kept_root(statistic, config), root) < 0.05 * error


def _unnamed_roots(optimizer: SecondOrder) -> Iterator[tuple[str, str, Tensor]]:
    optimizer.param_groups[0]["param_names"] = ["0"]
    return stored_roots(optimizer)


def test_contraction_ends_where_quantising_the_matrix_is_no_worse() -> None:
    rows_of = contraction(synthetic_matrix(256))
    errors = [{row.label: row.whole.nre for row in rows} for rows in rows_of.values()]
    assert next(iter(rows_of)) == 1
    assert errors[0]["U, rectified"] < 0.5 * errors[0]["A"]
    assert errors[-1]["A"] < errors[-1]["U, rectified"]
    # Without contraction, the errors are those of the table.
    table = static_table(synthetic_matrix(256), mappings=["linear2"], kept=())
    expected = {row.label: row.whole.nre for row in table}
    assert errors[0] == pytest.approx({label: expected[label] for label in errors[0]}, rel=1e-6)


def test_four_bjorck_steps_are_enough() -> None:
    errors_of = rectification(synthetic_matrix(128), steps=6)
    for errors in errors_of.values():
        assert errors[0] > 0.1
        assert errors[1] < errors[0] / 3
        assert errors[4] < 1e-4
        assert errors[6] > errors[4] / 10  # only float32's rounding is left


def test_singular_values_stay_where_eigenvectors_are_quantised() -> None:
    statistic = synthetic_matrix(256)
    values = singular_values(statistic)
    exact = statistic.damped.sort().values
    assert torch.equal(values["exact"], exact)
    for name, most in (("U, rectified", 0.2), ("U", 0.6), ("C", 1.5)):
        assert (values[name] / exact - 1).abs().max() < most
    assert (values["A"] / exact - 1).abs().max() > 2


# ------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("storage", ["paper", "compact"])
@pytest.mark.parametrize(("method", "bits"), METHODS)
def test_a_checkpoint_decodes_to_the_optimizers_roots(method: str, bits: int, storage: str) -> None:
    optimizer = run(method=method, bits=bits, storage=storage, min_quantized_numel=64 * 64)
    entries = {(f"{entry.parameter} {entry.block}", entry.side): entry for entry in held(optimizer)}
    every = list(stored_roots(optimizer))
    assert len(every) == len(entries) == 4
    for name, side, root in every:
        entry = entries[name, side]
        assert torch.equal(entry.root().float(), root)
        assert entry.factors.order == len(root)
        small = len(root) < 64
        assert entry.factors.format.statistic.bits == (32 if small else bits)


def test_errors_are_those_of_a_separate_computation() -> None:
    optimizer = run(bits=4, damping=1e-4)
    report = checkpoint_errors(optimizer.state_dict(), matrices=0)
    assert [errors.name for errors in report.held] == [
        "0.weight left",
        "0.weight right",
        "2.weight left",
        "2.weight right",
    ]
    roots = {f"{name} {side}": root for name, side, root in stored_roots(optimizer)}
    for errors in report.held:
        root = roots[f"{errors.parameter} {errors.block} {errors.side}"]
        (source,) = [h for h in held(optimizer) if f"{h.parameter} {h.side}" == errors.name]
        A = source.factors.method.matrix(source.factors.tensors)[0]
        exact = exact_root(A, 1e-4, 4)
        assert errors.whole is not None
        assert errors.off_diagonal is not None
        assert errors.whole.nre == pytest.approx(relative_error(root, exact), rel=1e-6)
        assert errors.whole.angle == pytest.approx(angle(root, exact), rel=1e-6, abs=1e-6)
        off = [X - X.diagonal().diag() for X in (root.double(), exact)]
        assert errors.off_diagonal.angle == pytest.approx(angle(*off), rel=1e-6, abs=1e-6)
        lam = torch.linalg.eigvalsh(A.double())
        assert errors.condition == pytest.approx(
            float((lam[-1] + 1e-4 * lam[-1]) / (lam[0] + 1e-4 * lam[-1])), rel=1e-3
        )
        assert errors.updates_since == 0
        assert errors.refreshed is None


@pytest.mark.gpu
def test_errors_are_the_same_on_a_gpu() -> None:
    state = run(bits=4).state_dict()
    actual, expected = (
        checkpoint_errors(state, matrices=1, bits=(4,), device=where) for where in ("cuda", "cpu")
    )
    for a, b in zip(actual.held, expected.held, strict=True):
        assert a.whole is not None
        assert b.whole is not None
        assert a.whole.nre == pytest.approx(b.whole.nre, rel=1e-4, abs=1e-6)
    # Some codes of kernels and torch differ; Newton's iteration may diverge.
    for c, d in zip(actual.studies[0].rows, expected.studies[0].rows, strict=True):
        assert c.whole.nre == pytest.approx(d.whole.nre, rel=0.5 if "naive" in c.way else 0.05)


def test_updates_after_a_refresh_are_counted() -> None:
    optimizer = run(steps=10, bits=32, newton_steps=40, damping=1e-3)
    for errors in checkpoint_errors(optimizer.state_dict(), matrices=0).held:
        assert errors.updates_since == 2  # at steps 8 and 10
        assert errors.whole is not None
        assert errors.refreshed is not None
        assert errors.whole.nre > 0.01
        assert errors.refreshed.nre < 1e-4
    fresh = run(steps=1)
    assert all(errors.whole is None for errors in checkpoint_errors(fresh.state_dict()).held)
    staggered = run(steps=30, stagger=True, first_refresh=None)
    for errors in checkpoint_errors(staggered.state_dict(), matrices=0).held:
        assert errors.updates_since is None
        assert errors.refreshed is not None


def test_roots_of_layers_have_exponent_minus_one() -> None:
    model = network()
    optimizer = KFAC(
        model.named_parameters(), model=model, lr=1e-3, bits=4, update_every=1, refresh_every=2
    )
    train(optimizer, model, 2)
    report = checkpoint_errors(optimizer.state_dict(), matrices=1, bits=(4,))
    assert report.studies[0].statistic.config.exponent == -1
    assert all(errors.whole is not None and errors.whole.nre < 0.2 for errors in report.held)


def test_the_largest_matrices_are_studied_and_the_report_can_be_printed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": {}, "optimizer": run(steps=7).state_dict()}, path)
    report = checkpoint_errors(path, matrices=2, bits=(4,))
    # 0.weight is 64 x 80 and 2.weight 48 x 64. Of two factors of order 64, the first is studied.
    assert [study.name for study in report.studies] == ["0.weight right", "0.weight left"]
    assert all(study.quantized_to == 4 for study in report.studies)
    for printed in (report, synthetic_errors(64)):
        json.dumps(printed.to_dict(), allow_nan=False)
        written = io.StringIO()
        show_errors(printed, Console(width=80, file=written))
        text = written.getvalue()
        assert "cholesky, compact" in text
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= 80
    assert checkpoint_errors(run(bits=32).state_dict(), 1).studies[0].quantized_to is None


def test_checkpoints_are_found_in_files_and_folders(tmp_path: Path) -> None:
    state = run().state_dict()
    expected = checkpoint_errors(state, matrices=0).held
    torch.save(state, tmp_path / "bare.pt")
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    torch.save({"optimizer": {"state": {}, "param_groups": []}}, place / "step-00000001.pt")
    torch.save({"format": 1, "optimizer": state}, place / "step-00000020.pt")
    for source in (tmp_path / "bare.pt", str(tmp_path / "run"), place / "step-00000020.pt"):
        assert checkpoint_errors(source, matrices=0).held == expected


def tampered(state: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield damaged state dicts and parts of the expected messages."""
    for damage, message in (
        (lambda s: s["state"][0]["block_0"]["left"].pop("codes"), "['codes'] is missing"),
        (lambda s: s["state"][0]["block_0"]["left"]["diagonal"].fill_(torch.nan), "non-finite"),
        (lambda s: s["state"][0]["block_0"].pop("right"), "['right'] is missing"),
        (lambda s: s["state"][0].update(block_0=3), "['block_0']"),
        (lambda s: s["state"][0].pop("step"), "['step'] is missing"),
        (lambda s: s["param_groups"][0].update(kronbit_format=9), "kronbit_format"),
        (lambda s: s["param_groups"][0].update(bits=5), "bits"),
        (lambda s: s["param_groups"][0].update(bits=8), "['codes'] has shape"),
        (lambda s: s["param_groups"][0].update(params=7), "param_groups"),
        (lambda s: s["param_groups"][0].update(param_names=["a"]), "param_names"),
        (lambda s: s.update(param_groups=None), "param_groups"),
        (lambda s: s["state"].clear(), "no second-order state"),
    ):
        damaged = copy.deepcopy(state)
        damage(damaged)
        yield damaged, message


def test_unreadable_checkpoints_are_named(tmp_path: Path) -> None:
    path = tmp_path / "some.pt"
    for damaged, message in tampered(run().state_dict()):
        torch.save(damaged, path)
        with pytest.raises(LabError) as refused:
            checkpoint_errors(path)
        assert "some.pt" in str(refused.value)
        assert message in str(refused.value)
    whole = path.read_bytes()
    adamw = torch.optim.AdamW(network().parameters())
    for content, message in (
        (whole[: len(whole) // 2], "cannot read"),
        (b"", "cannot read"),
        (adamw.state_dict(), "no second-order state"),
        ({"model": {}}, "no optimizer"),
        ([1, 2], "no optimizer"),
    ):
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        with pytest.raises(LabError, match=message):
            checkpoint_errors(path)
    with pytest.raises(LabError, match=r"no checkpoint .*nowhere"):
        checkpoint_errors(tmp_path / "nowhere")
    with pytest.raises(LabError, match="without checkpoints"):
        checkpoint_errors(tmp_path)


def test_figures_are_drawn(tmp_path: Path) -> None:
    from kronbit.lab.quantisation.figures import draw_errors

    drawn: list[str] = []
    paths = draw_errors(synthetic_errors(64, bits=(4,)), tmp_path / "figures", drawn.append)
    names = ["mapping", "errors", "contraction", "rectification", "singular_values"]
    assert [path.name for path in paths] == drawn == [f"{name}.png" for name in names]
    for path in paths:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 10_000
    with pytest.raises(LabError, match="at least one"):
        draw_errors(checkpoint_errors(run().state_dict(), matrices=0), tmp_path)


# --------------------------------------------------------------------------------- during a run


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
            right = exact_root(A, 1e-4, 4)
            assert line["blocks"][name]["nre"] == pytest.approx(
                relative_error(root, right), rel=1e-3, abs=1e-9
            )
            assert line["blocks"][name]["angle"] == pytest.approx(
                angle(root, right), rel=1e-3, abs=1e-5
            )
            off = [X - torch.diag(X.diagonal()) for X in (root.double(), right)]
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
    right = 0.95e-6 * torch.eye(32) + 0.05 * grad[:32] @ grad[:32].mT
    assert relative_error(exact, right) < 1e-12


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
