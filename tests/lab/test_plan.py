"""Plans match real optimizers and measurements."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.planned import mlp
from torch import Tensor, nn

from kronbit import CASPR, KFAC, AdaBK, Shampoo
from kronbit.lab.errors import LabError
from kronbit.lab.plan.activations import Estimate, Passes
from kronbit.lab.plan.networks import PRESETS, resolve_model
from kronbit.lab.plan.planning import make_plan, parse_size, to_json
from kronbit.lab.plan.rows import CONTEXT, WAYS
from kronbit.lab.plan.table import show

MLP, HERE = "support.planned:mlp", Path(__file__).parent
MEASURED = HERE.parents[1] / "results" / "memory" / "llama7b_memory_h200.json"


class Peeking(nn.Module):
    """A network that reads a value of its input, which the meta device cannot provide."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum().item() else x


def no_module() -> int:
    return 3


# ---------------------------------------------------------------------------------- second order


@pytest.mark.parametrize(("name", "kind"), [("shampoo", Shampoo), ("caspr", CASPR)])
def test_state_sizes_match_a_real_optimizer(name: str, kind: type[Shampoo]) -> None:
    plan = make_plan(MLP, optimizer=name, order=100, settings={"momentum": 0.5}, base="sgd")
    for row_key, (_, options) in WAYS.items():
        model = mlp()
        opt = kind(model.parameters(), base="sgd", momentum=0.5, max_order=100, **options)
        model(torch.randn(8, 96)).sum().backward()
        opt.step()
        row = plan.row(row_key)
        assert row is not None
        planned = {"statistics": row.statistics, "roots": row.roots, "base": row.base}
        assert planned == {key: opt.memory()[key] for key in planned}, row_key
        assert row.ratio == pytest.approx(plan.row("32").second_order / row.second_order)
    assert plan.rows[0].second_order == 0
    weights = sum(p.numel() for p in mlp().parameters())
    assert plan.rows[0].base == plan.rows[0].gradients == 4 * weights


@pytest.mark.parametrize("kind", [KFAC, AdaBK])
@pytest.mark.parametrize("bits", [4, 32])
def test_rows_of_layers_match_kfac_and_adabk(kind: type[KFAC], bits: int) -> None:
    model = mlp()
    opt = kind(model.parameters(), base="adamw", model=model, bits=bits)
    model(torch.randn(8, 96)).sum().backward()
    opt.step()
    # --order cuts Shampoo's matrices, not those of layers.
    row = next(row for row in make_plan(MLP, order=50).rows if row.key == f"kfac-{bits}")
    assert (row.statistics, row.roots) == (opt.memory()["statistics"], opt.memory()["roots"])
    # Y Yᵀ and X Xᵀ of both layers, which have biases, are collected before an update.
    collected = 4 * (160**2 + 97**2 + 70**2 + 161**2)
    assert row.workspace == 256 * 2**20 + collected


def test_settings_get_a_row_and_apply_to_all_rows() -> None:
    plain = make_plan(MLP)
    plan = make_plan(MLP, settings={"bits": 8, "method": "eigen", "offload_statistics": True})
    row, other = plan.row("set"), plan.row("8-paper")
    assert row is not None
    assert row.label == "+ Shampoo, bits=8, method=eigen"
    assert row.statistics == other.statistics == 0 < row.host < other.host
    assert other.host == plain.row("8-paper").statistics
    assert row.total == row.parameters + row.gradients + row.base + row.roots + row.workspace
    with_copies = make_plan(MLP, settings={"keep_gradients": True}).row("4")
    assert with_copies.workspace == plain.row("4").workspace + with_copies.gradients


def test_workspace_counts_only_beyond_activations() -> None:
    small, large = (make_plan(MLP, batch=batch).row("4") for batch in (2, 2**20))
    assert small.workspace + small.activations == 256 * 2**20
    assert large.workspace == 0
    assert large.activations > 256 * 2**20
    # A single block may need more than the workspace.
    tight = make_plan(MLP, settings={"workspace_mb": 0})
    assert tight.row("4").workspace == 4 * (4 * 160**2 + 4 * 160 * 96)
    assert tight.row("32").workspace == 4 * 11 * 160**2


# ---------------------------------------------------------------------------------- measurements


def test_the_plan_of_llama_7b_matches_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    runs = json.loads(MEASURED.read_text())["runs"]
    names = {
        "base": "8-bit adamw",
        "shampoo-4-paper": "+ 4-bit shampoo (paper)",
        "shampoo-4": "+ 4-bit shampoo, cholesky, compact",
    }
    counted: list[Estimate] = []

    def recorded(model: nn.Module, passes: Passes, batch: int) -> Estimate:
        counted.append(Estimate(model, passes, batch))
        return counted[0]

    monkeypatch.setattr("kronbit.lab.plan.planning.Estimate", recorded)
    plan = make_plan(
        "llama2-7b", batch=64, gpu="80GB", order=2048, base="adamw8bit", checkpointing=True
    )
    # At 64, memory peaks in the backward pass of the last layers; at 128, in that of the logits.
    for batch in (64, 128):
        activations = counted[0].peak_at(batch) - plan.rows[0].gradients
        for key, name in names.items():
            row = next(row for row in plan.rows if row.key == key)
            measured = runs[name][str(batch)]["peak_allocated_mib"]
            total = row.total - row.activations + activations
            assert total / 2**20 == pytest.approx(measured, rel=0.01)
            assert row.largest_batch >= batch
    assert plan.row("32").largest_batch == 0  # nor did it fit in the measurement


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("swin-tiny", {"batch": 32}),
        ("swin-tiny", {"batch": 32, "amp": "bf16"}),
        ("gpt2-124m", {"batch": 8, "length": 256}),
        ("gpt2-124m", {"batch": 8, "length": 256, "dtype": "fp32", "amp": "bf16"}),
        ("llama-130m", {"batch": 8, "length": 512, "checkpointing": True}),
        ("resnet50", {"batch": 32}),
    ],
)
def test_estimates_are_near_measurements(name: str, options: dict[str, Any]) -> None:
    estimated, measured = (make_plan(name, **options, measured=real) for real in (False, True))
    assert estimated.activations.how.startswith("estimated")
    assert measured.activations.how.startswith("measured")
    assert estimated.activations.peak == pytest.approx(measured.activations.peak, rel=0.15)


# -------------------------------------------------------------------------------------- networks


def test_presets_have_the_published_sizes() -> None:
    pytest.importorskip("transformers")
    published = {
        "gpt2-124m": 124_439_808 + (50304 - 50257) * 768,
        "llama2-7b": 6_738_415_616,
        "llama3-8b": 8_030_261_248,
        "llama2-70b": 68_976_648_192,
        "vit-b32": 88_224_232,
        "resnet50": 25_557_032,
        "swin-tiny": 28_288_354,
        "llama-130m": 134_105_856,
        "llama-350m": 367_969_280,
    }
    assert published.keys() == PRESETS.keys()
    for name, count in published.items():
        network = resolve_model(name)
        model = network.build("meta")
        assert sum(p.numel() for p in model.parameters()) == count, name
        tokens = name.startswith(("gpt2", "llama"))
        assert network.passes(model) == Passes((256,) if tokens else (3, 224, 224), tokens)
        expected = torch.bfloat16 if tokens else torch.float32
        assert {p.dtype for p in model.parameters()} == {expected}


def test_a_folder_with_a_transformers_config_is_planned(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    plan = make_plan(str(tmp_path), batch=2, length=16, dtype="fp32")
    model = transformers.LlamaForCausalLM(config)
    assert plan.parameters_count == sum(p.numel() for p in model.parameters())
    assert plan.shape == (16,)
    assert plan.activations.peak > plan.activations.saved > 0
    transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        image_size=16, patch_size=4, architectures=["ViTForImageClassification"],
    ).save_pretrained(tmp_path)  # fmt: skip
    plan = make_plan(str(tmp_path / "config.json"), batch=2)
    assert plan.shape == (3, 16, 16)
    assert plan.activations.peak


def test_recipes_are_planned_with_their_settings(tmp_path: Path) -> None:
    plan = make_plan("cifar100-resnet34")
    assert (plan.shape, plan.batch, plan.base) == ((3, 32, 32), 128, "sgd")
    assert plan.rows[0].label == "SGDM"
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "model: {name: digits-cnn}\ndata: {name: digits}\nsteps: 3\nbatch: 64\nmicro_batch: 16\n"
        "shampoo: {max_order: 32, update_rectify: 2}\nkfac: {max_order: 2000}\noptions: {bits: 3}\n"
    )
    plan = make_plan(str(file))
    assert (plan.shape, plan.batch) == ((1, 8, 8), 16)
    assert plan.activations.peak > plan.rows[0].gradients
    assert "several passes" in plan.notes[0]
    assert plan.row("set").second_order == plan.row("3").second_order
    alone = make_plan(str(file), batch=16, order=64)
    assert alone.notes == ()
    assert alone.row("32").second_order > plan.row("32").second_order


def test_a_network_that_needs_values_is_planned_without_activations() -> None:
    plan = make_plan("tests.lab.test_plan:Peeking", batch=4, gpu="1GB")
    assert plan.activations.peak is None
    assert plan.activations.how.startswith("not known: the model does not run on meta (")
    assert plan.row("4").fits
    assert plan.row("4").largest_batch is None
    assert "not in the totals" in shown(plan, 80)


# ----------------------------------------------------------------------------------------- output


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 2**30), ("80GiB", 80 * 2**30), ("24G", 24 * 2**30), ("81920MiB", 80 * 2**30)],
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_fits_agrees_with_totals_and_largest_batches() -> None:
    total = make_plan(MLP, batch=1024).row("4").total
    for spare, fits in ((0, True), (-1, False)):
        mib = (total + CONTEXT + spare) / 2**20
        row = make_plan(MLP, batch=1024, gpu=f"{mib:.20f}MiB").row("4")
        assert row.fits is fits
    plan = make_plan(MLP, batch=4096, gpu="2GB")
    for factor, fits in ((1, True), (2, False)):
        other = make_plan(MLP, batch=factor * plan.row("4").largest_batch, gpu="2GB")
        assert other.row("4").fits is fits
    assert plan.best().key == "shampoo-32"


def shown(plan: Any, width: int, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show(plan, Console(file=file, width=width, force_terminal=False))
    file.seek(0)
    return file.read()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [60, 160])
def test_the_table_matches_the_json(width: int, encoding: str) -> None:
    plan = make_plan(MLP, batch=2**20, gpu="3GB")
    text = shown(plan, width, encoding)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    data = json.loads(json.dumps(to_json(plan)))
    assert data["gpu_bytes"] == 3 * 2**30
    kinds = ("parameters", "gradients", "base", "statistics", "roots", "activations", "workspace")
    signs = "PGBSAW" if encoding == "ascii" else "█▓▒▚░▖"
    mark, scale, widths = "|" if encoding == "ascii" else "│", 1.1 * data["gpu_bytes"], set()
    for row in data["rows"]:
        assert row["total"] == sum(row[kind] for kind in kinds)
        line = next(line for line in lines if line.startswith(row["label"]))
        assert f"{row['total'] / 2**20:,.0f} MiB" in line
        assert line.split()[-1 if width == 60 else -2] == ("yes" if row["fits"] else "no")
        bar = line[len(row["label"]) :]
        filled = sum(bar.count(sign) for sign in signs) + (row["total"] > data["gpu_bytes"])
        widths.add(round(filled * scale / row["total"]))
    assert max(widths) - min(widths) <= 0.1 * max(widths) + 2  # one scale for all
    assert all(mark in line for line in lines if line.startswith(("AdamW", "+ ")))
    assert "The most exact second-order state that fits in 3,072 MiB: 32-bit Shampoo." in lines or (
        width == 60
    )


# ----------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("llama2-7", {}, "nearest: llama2-7b"),
        ("xyzzy", {}, "presets: gpt2-124m"),
        (str(HERE), {}, "has no config.json"),
        ("no_such_package:build", {}, "cannot import no_such_package:build"),
        ("tests.lab.test_plan:missing", {}, "cannot import tests.lab.test_plan:missing"),
        ("tests.lab.test_plan:HERE", {}, "is not callable"),
        ("tests.lab.test_plan:no_module", {}, "returns int, not an nn.Module"),
        ("no_such.yaml", {}, "there is no file no_such.yaml"),
        (MLP, {"gpu": "80"}, "'80' is not a size"),
        (MLP, {"gpu": "0GB"}, "'0GB' is not a size"),
        (MLP, {"gpu": "many GB"}, "write 80GB"),
        (MLP, {"optimizer": "shampo"}, "--optimizer must be one of"),
        (MLP, {"dtype": "fp8"}, "--dtype must be one of fp32, bf16"),
        (MLP, {"amp": "on"}, "--amp must be one of"),
        (MLP, {"batch": 0}, "--batch must be at least 1"),
        (MLP, {"base": "adamm"}, "did you mean 'adam"),
        (MLP, {"settings": {"max_ordr": 3}}, "did you mean 'max_order'"),
        (MLP, {"settings": {"bits": 5}}, "bits must be one of"),
        (MLP, {"checkpointing": True}, "leave --checkpointing out"),
        ("tests.lab.test_plan:nn.ReLU", {}, "has no parameters"),
        ("tests.lab.test_plan:Failing", {}, "cannot be built: on purpose"),
    ],
)
def test_errors_are_one_line_and_name_the_cause(
    name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(LabError) as error:
        make_plan(name, **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


class Failing(nn.Module):
    def __init__(self) -> None:
        raise RuntimeError("on\npurpose")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text("{}")
    for name in ("gpt2-124m", str(tmp_path)):
        with pytest.raises(LabError, match="pip install transformers"):
            make_plan(name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LabError, match=r"needs bitsandbytes or torchao: .*pip install"):
        make_plan(MLP, base="adamw8bit")


def test_models_without_layers_have_no_rows_of_layers() -> None:
    plan = make_plan("support.planned:Attending", batch=2, length=32)
    assert not any(row.key.startswith("kfac") for row in plan.rows)
    assert plan.notes[0].startswith("K-FAC and AdaBK are left out: K-FAC finds nothing")
