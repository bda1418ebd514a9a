"""Recipes, schedules and data sets."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.cifar import write_cifar
from torch import nn

from kronbit.lab.data import Setting, open_data
from kronbit.lab.errors import LabError
from kronbit.lab.models import build
from kronbit.lab.optimizers import DEFAULT_VARIANTS, VARIANTS, make_optimizer, variant
from kronbit.lab.recipe import OPTIMIZERS, find_recipe, parse_settings, recipe_from, recipe_names
from kronbit.lab.schedules import factor, warmup_steps

CPU = torch.device("cpu")


def opened(options: dict[str, Any], folder: Path = Path("data"), **given: Any) -> Any:
    return open_data(options, Setting(folder, **{"batch": 8, "seed": 0, "device": CPU, **given}))


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_can_be_saved_loaded_and_built(name: str) -> None:
    recipe = find_recipe(name)
    assert recipe_from(yaml.safe_load(recipe.to_yaml()), name, name) == recipe
    options = dict(recipe.model)
    with torch.device("meta"):
        model = build(options.pop("name"), **options)
    for spec in ("base", "shampoo-32", "shampoo-4-paper", "shampoo-4"):
        optimizer = make_optimizer(variant(spec, recipe)[2], model, 10)
        assert optimizer.param_groups[0]["lr"] == recipe.lr
        for option, value in recipe.shampoo.items() if spec != "base" else ():
            assert optimizer.param_groups[0][option] == value


def test_recipes_have_the_settings_of_the_paper() -> None:
    resnet, swin = find_recipe("cifar100-resnet34"), find_recipe("cifar100-swin-tiny")
    assert (resnet.base, resnet.lr, resnet.base_options["weight_decay"]) == ("sgd", 0.1, 5e-4)
    assert (resnet.epochs, resnet.batch, resnet.schedule) == (200, 128, "multistep")
    assert (swin.base, swin.lr, swin.base_options["weight_decay"]) == ("adamw", 1e-3, 0.05)
    assert (swin.epochs, swin.batch, swin.schedule) == (100, 128, "cosine")
    for recipe in (resnet, swin):
        assert (recipe.shampoo["update_every"], recipe.shampoo["refresh_every"]) == (100, 500)
    gpt2, llama = find_recipe("owt-gpt2-124m"), find_recipe("c4-llama-130m")
    assert (gpt2.batch, gpt2.steps, gpt2.dtype, gpt2.warmup) == (480, 60_000, "bf16", 0.1)
    assert (llama.batch, llama.steps, llama.shampoo["max_order"]) == (512, 20_000, 10_000)
    paper = variant("shampoo-4-paper", gpt2)[2].second_order_options()
    assert paper["root"] == "schur_newton"
    assert "root" not in variant("shampoo-4", gpt2)[2].second_order_options()


def test_settings_are_assigned_to_sections_and_options() -> None:
    given = ["lr=1e-4", "epochs=3", "model.patch=4", "beta=0.9", "betas=[0.9, 0.95]", "amp=off"]
    made = find_recipe("cifar100-swin-tiny").with_settings(parse_settings(given))
    assert (made.lr, made.epochs, made.model["patch"], made.amp) == (1e-4, 3.0, 4, "off")
    assert made.options == {"beta": 0.9}
    assert made.base_options == {"weight_decay": 0.05, "betas": [0.9, 0.95]}
    assert made.with_settings({"steps": 7}).epochs is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("batch=zero", "batch must be int"),
        ("batch=0", "batch must be positive"),
        ("batch=1.5", "batch must be int"),
        ("epohcs=3", "did you mean 'epochs'"),
        ("schedule=cosinus", "did you mean cosine"),
        ("base=schedulefree-adamw", "schedule=schedule-free"),
        ("warmup=2", "share from 0 to 1"),
        ("holdout=1", "at least 0 and below 1"),
        ("lr", "key=value"),
        ("lr=[", "cannot read the value"),
    ],
)
def test_wrong_settings_are_refused_by_name(given: str, message: str) -> None:
    with pytest.raises(LabError, match=message.replace("(", r"\(")):
        find_recipe("pydoc-gpt").with_settings(parse_settings([given]))


def test_options_that_do_not_exist_are_refused_by_the_library() -> None:
    recipe = find_recipe("digits-cnn").with_settings({"wieght_decay": 0.1})
    with pytest.raises(LabError, match="did you mean 'weight_decay'"):
        make_optimizer(recipe, nn.Linear(3, 3), 0)


def test_errors_for_unknown_recipes_suggest_similar_names(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="nearest: cifar100-swin-tiny"):
        find_recipe("cifar-swin-tiny")
    with pytest.raises(LabError, match="there is no file"):
        find_recipe(str(tmp_path / "user.yaml"))
    path = tmp_path / "user.yaml"
    path.write_text("modle: {name: vit}\n")
    with pytest.raises(LabError, match="did you mean model"):
        find_recipe(str(path))
    path.write_text("just words\n")
    with pytest.raises(LabError, match="not a recipe"):
        find_recipe(str(path))
    path.write_text(find_recipe("digits-vit").to_yaml().replace("name: digits-vit", "name: user"))
    assert find_recipe(str(path)).name == "user"


def test_variants_change_options_of_the_recipe() -> None:
    recipe = find_recipe("pydoc-gpt")
    labels = [variant(spec, recipe)[1] for spec in DEFAULT_VARIANTS]
    assert labels[0] == "AdamW"
    assert len(set(labels)) == 5
    for spec in (*VARIANTS, *OPTIMIZERS):
        assert variant(spec, recipe)[2].optimizer == spec.split("-")[0]
    key, label, longer = variant("base longer=1.5 lr=3e-3", recipe)
    assert (longer.steps, longer.lr) == (round(1.5 * (recipe.steps or 0)), 3e-3)
    assert "1.5 x as long" in label
    assert variant("base base=torch.optim.RAdam lr=1", recipe)[1] == "RAdam, lr=1"
    assert key == "base-longer=1.5-lr=3e-3"
    with pytest.raises(LabError, match="did you mean shampoo-4"):
        variant("shampo-4", recipe)


@pytest.mark.parametrize("schedule", ["multistep", "cosine", "linear", "constant"])
def test_schedules_match_torch(schedule: str) -> None:
    steps, warmup = 100, 10
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    kinds = torch.optim.lr_scheduler
    rise = kinds.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
    main: Any = {
        "multistep": lambda: kinds.MultiStepLR(optimizer, [30 - warmup, 60 - warmup, 90 - warmup]),
        "cosine": lambda: kinds.CosineAnnealingLR(optimizer, steps - warmup),
        "linear": lambda: kinds.LinearLR(optimizer, 1.0, 0.0, steps - warmup),
        "constant": lambda: kinds.ConstantLR(optimizer, 1.0),
    }[schedule]()
    both = kinds.SequentialLR(optimizer, [rise, main], [warmup])
    for step in range(steps):
        rate = factor(schedule, step, steps, warmup)
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9), step
        optimizer.step()
        both.step()


def test_warm_up_is_a_share_of_steps_or_epochs() -> None:
    recipe = find_recipe("cifar100-resnet34")
    assert warmup_steps(recipe, 78_000, 390) == 1950
    assert warmup_steps(recipe.with_settings({"warmup": 0.1}), 78_000, 390) == 7800


@pytest.mark.parametrize("options", [{"name": "digits", "crop": 1}, {"name": "pydoc"}])
def test_batches_are_functions_of_seed_and_step(options: dict[str, Any]) -> None:
    one, same, other = opened(options), opened(options), opened(options, seed=1)
    for step in (3, 0, 500):  # in any order, and in another epoch
        for a, b in zip(one.batch(step), same.batch(step), strict=True):
            assert torch.equal(a, b)
        assert not torch.equal(one.batch(step)[0], other.batch(step)[0])
    assert not torch.equal(one.batch(0)[0], one.batch(1)[0])


@pytest.mark.parametrize("options", [{"name": "digits"}, {"name": "pydoc"}])
def test_ranks_divide_a_batch_and_the_held_out_set(options: dict[str, Any]) -> None:
    whole, parts = opened(options), [opened(options, rank=r, ranks=2) for r in range(2)]
    for step in (0, 7):
        for number, a in enumerate(whole.batch(step)):
            assert torch.equal(a, torch.cat([part.batch(step)[number] for part in parts]))
    count = [sum(len(x) for x, _ in data.held_out()) for data in (whole, *parts)]
    assert count[0] == count[1] + count[2]
    with pytest.raises(LabError, match="cannot be divided among 3 ranks"):
        opened(options, rank=0, ranks=3)


def test_an_epoch_sees_every_image_once() -> None:
    data = opened({"name": "digits"}, batch=100)
    labels = torch.cat([data.batch(step)[1] for step in range(14)])
    assert torch.equal(labels.bincount(), data._labels.bincount())


def test_the_next_token_is_the_target(tmp_path: Path) -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "val.bin")
    data = opened(
        {"name": "tokens", "train": "train.bin", "val": "val.bin", "length": 16}, tmp_path
    )
    x, y = data.batch(0)
    assert x.shape == (8, 16)
    assert torch.equal(x + 1, y)
    seen = torch.cat([x.flatten() for x, _ in data.held_out()])
    assert torch.equal(seen, torch.arange(len(seen)))  # adjacent windows without overlap
    assert data.outputs == 1000
    (tmp_path / "user.txt").write_text("naïve text " * 20, encoding="utf-8")
    text = opened({"name": "text", "path": "user.txt", "length": 8}, tmp_path)
    assert bytes(text.batch(0)[0][0].tolist()) in ("naïve text " * 20).encode()
    cached = {"name": "text", "path": "user.txt", "length": 8, "cache": "user.npy"}
    for _ in range(2):  # written, then read
        again = opened(cached, tmp_path)
        assert torch.equal(again.batch(3)[0], text.batch(3)[0])
        assert isinstance(again._train, np.memmap)
    with pytest.raises(LabError, match="cannot open the tokenizer"):
        opened({"name": "text", "path": "user.txt", "tokenizer": "no-such"}, tmp_path)


def test_cifar_is_read_in_its_published_layout(tmp_path: Path) -> None:
    pixels = write_cifar(tmp_path)
    data = opened({"name": "cifar100"}, tmp_path)
    x, y = next(data.held_out())
    mean = torch.tensor([0.5071, 0.4865, 0.4409]).view(3, 1, 1)
    std = torch.tensor([0.2673, 0.2564, 0.2762]).view(3, 1, 1)
    expected = (torch.tensor(pixels).view(-1, 3, 32, 32) / 255 - mean) / std
    torch.testing.assert_close(x, expected, atol=1e-5, rtol=1e-5)
    assert y.tolist() == list(range(40))


def test_a_part_of_the_training_images_is_held_out(tmp_path: Path) -> None:
    """Both parts together are the training set, and each has its share of every class."""
    write_cifar(tmp_path, 400)
    for options in ({"name": "digits"}, {"name": "cifar100"}):
        whole = opened(options, tmp_path)
        parts = [opened(options, tmp_path, holdout=0.25, seed=seed) for seed in (0, 1)]
        for part in parts:  # the same for every seed
            assert torch.equal(part._images, parts[0]._images)
            assert torch.equal(part._test_images, parts[0]._test_images)
        part = parts[0]
        assert part.examples == len(part._images)
        pixels = torch.cat([part._images, part._test_images]).flatten(1)
        expected = whole._images.flatten(1)
        assert sorted(pixels.tolist()) == sorted(expected.tolist())
        counts = (0.25 * whole._labels.bincount()).round().int()
        assert torch.equal(part._test_labels.bincount().int(), counts)
        seen = torch.cat([y for _, y in part.held_out()])
        assert torch.equal(seen, part._test_labels)
        drawn = torch.cat([part.batch(step)[1] for step in range(part.examples // 8)])
        assert (drawn.bincount() <= part._labels.bincount()).all()
    with pytest.raises(LabError, match="leaves 0 of 400"):
        opened({"name": "cifar100"}, tmp_path, holdout=0.9)
    with pytest.raises(LabError, match="leaves 1400 of 1400"):
        opened({"name": "digits"}, holdout=1e-4)


def test_the_last_tokens_are_held_out(tmp_path: Path) -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "val.bin")
    options = {"name": "tokens", "train": "train.bin", "val": "val.bin", "length": 16}
    data = opened(options, tmp_path, holdout=0.1)
    assert (data.examples, len(data._train), len(data._test)) == (900 // 16, 900, 100)
    assert max(int(data.batch(step)[1].max()) for step in range(50)) < 900
    assert next(data.held_out())[0].flatten()[0] == 900
    whole, part = opened({"name": "pydoc"}), opened({"name": "pydoc"}, holdout=0.1)
    both = np.concatenate([part._train, part._test])
    assert np.array_equal(both, whole._train)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    class Malicious:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    write_cifar(tmp_path)
    (tmp_path / "cifar-100-python" / "train").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(LabError, match="images do not need"):
        opened({"name": "cifar100"}, tmp_path)
    assert not (tmp_path / "ran").exists()


def draw(path: Path, shade: int, side: tuple[int, int]) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", side, (shade, shade, shade)).save(path, quality=100)


def test_tiny_imagenet_is_read_in_its_published_layout(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-imagenet-200"
    for number, name in enumerate(("n02", "n01")):
        for i in range(4):
            draw(
                folder / "train" / name / "images" / f"{name}_{i}.JPEG", 60 + 100 * number, (64, 64)
            )
    draw(folder / "val" / "images" / "val_0.JPEG", 60, (64, 64))
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t9\t9\n")
    data = opened({"name": "tiny-imagenet"}, tmp_path)
    assert (data.examples, data.outputs) == (8, 2)
    x, y = data.batch(0)
    darker = x.mean((1, 2, 3)) < x.mean()
    assert torch.equal(darker, y == 1)  # n02, the second in order, is the dark one
    assert [target.tolist() for _, target in data.held_out()] == [[1]]


def test_image_folders_are_decoded_by_workers(tmp_path: Path) -> None:
    folder = tmp_path / "imagenet"
    for number, name in enumerate(("a", "b")):
        for i in range(4):
            draw(folder / "train" / name / f"{i}.JPEG", 60 + 100 * number, (40 + i, 30))
        draw(folder / "val" / name / "0.JPEG", 60 + 100 * number, (50, 40))
    options = {"name": "image-folder", "image": 24, "flip": True, "jitter": 0.1, "workers": 1}
    data = opened(options, tmp_path)
    part = opened(options, tmp_path, batch=6, holdout=0.25)
    held_out_files = {path for path, _ in part._test.files}
    assert held_out_files | {path for path, _ in part._train.files} == {
        path for path, _ in data._train.files
    }
    assert [label for _, label in part._test.files] == [0, 1]
    assert part.examples == 6
    batches = [data.batch(step) for step in range(3)]
    x, y = batches[0]
    assert x.shape == (8, 3, 24, 24)
    assert torch.equal(x.mean((1, 2, 3)) > x.mean(), y == 1)
    again = opened({**options, "workers": 0}, tmp_path)
    for a, b in zip(batches[2], again.batch(2), strict=True):  # from a later step, without workers
        assert torch.equal(a, b)
    assert torch.cat([target for _, target in data.held_out()]).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "cifar100"}, "cifar-100-python: expected the files train and test"),
        ({"name": "tiny-imagenet"}, "val_annotations.txt"),
        ({"name": "image-folder"}, "image-net.org"),
        ({"name": "tokens", "train": "owt/train.bin", "val": "owt/val.bin"}, "uint16"),
        ({"name": "cifar10"}, "did you mean cifar100"),
        ({"name": "pydoc", "lenght": 3}, "lenght"),
        ({"name": "pydoc", "length": 10**7}, "too few"),
    ],
)
def test_errors_for_missing_data_say_where_to_get_it(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(LabError, match=message) as caught:
        opened(options, tmp_path)
    assert "\n" not in str(caught.value)
