"""``kronbit errors`` matches separate computations, for one matrix and for checkpoints."""

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
from rich.console import Console
from support.numerics import METHODS, angle, relative_error, spd
from support.roots import ROOTS, SCHEDULE, backward, exact_root, network, stored_roots
from torch import Tensor, nn

from kronbit import KFAC, Config, Shampoo
from kronbit.lab.errors import LabError
from kronbit.lab.quantization.errors import (
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
from kronbit.lab.quantization.report import (
    Held,
    checkpoint_errors,
    read_preconditioners,
    synthetic_errors,
)
from kronbit.lab.quantization.tables import show_errors
from kronbit.optimizer import SecondOrder


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


def test_errors_match_a_separate_computation() -> None:
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
    # Kernels and torch compute some codes differently, and Newton's iteration may diverge.
    for c, d in zip(actual.studies[0].rows, expected.studies[0].rows, strict=True):
        assert c.whole.nre == pytest.approx(d.whole.nre, rel=0.5 if "naive" in c.way else 0.05)


def test_updates_after_a_refresh_are_counted() -> None:
    optimizer = run(steps=10, bits=32, newton_steps=40, damping=1e-3)
    held = checkpoint_errors(optimizer.state_dict(), matrices=0).held
    assert len(held) == ROOTS
    for errors in held:
        assert errors.updates_since == 2  # at steps 8 and 10
        assert errors.whole is not None
        assert errors.refreshed is not None
        assert errors.whole.nre > 0.01
        assert errors.refreshed.nre < 1e-4
    fresh = run(steps=1)
    held = checkpoint_errors(fresh.state_dict()).held
    assert [errors.whole for errors in held] == [None] * ROOTS
    staggered = run(steps=30, stagger=True, first_refresh=None)
    held = checkpoint_errors(staggered.state_dict(), matrices=0).held
    assert len(held) == ROOTS
    for errors in held:
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
    assert len(report.held) == ROOTS
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
    """Yield damaged state dicts, each with a part of the expected message."""
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
    from kronbit.lab.quantization.figures import draw_errors

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
