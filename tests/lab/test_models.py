"""Networks of the lab match published parameter counts, plain formulas, and timm."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.numerics import no_host_sync, relative_error
from torch import Tensor, nn

from kronbit.lab.errors import LabError
from kronbit.lab.models import MODELS, build, logits
from kronbit.lab.models.swin import SwinTiny
from kronbit.lab.models.transformer import DropPath, rates
from kronbit.lab.training.passes import Captured, Eager, Objective, Repeatable

SMALL_GPT2 = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
SMALL_LLAMA = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def without_storage(name: str, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return build(name, **options)


# Published counts for 1000 classes, from the model cards of torchvision and timm.
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("resnet34", {"classes": 1000, "stem": "imagenet"}, 21_797_672),
        ("resnet50", {}, 25_557_032),
        ("vit-small", {"image": 224, "patch": 16, "classes": 1000}, 22_050_664),
        ("vit-base-32", {}, 88_224_232),
        ("swin-tiny", {"image": 224, "patch": 4, "window": 7, "classes": 1000}, 28_288_354),
        ("gpt2", {}, 124_439_808),
    ],
)
def test_parameter_counts_match_published_ones(
    name: str, options: dict[str, Any], expected: int
) -> None:
    if name == "gpt2":
        pytest.importorskip("transformers")
    assert parameters(without_storage(name, **options)) == expected


def test_small_images_change_counts_by_stem_and_head() -> None:
    stem, head = 64 * 3 * (7 * 7 - 3 * 3), 513 * 900
    assert parameters(without_storage("resnet34")) == 21_797_672 - stem - head
    # torchvision's vgg19_bn without its three linear layers
    linear = (512 * 49 + 1) * 4096 + (4096 + 1) * 4096 + (4096 + 1) * 1000
    assert parameters(without_storage("vgg19")) == 143_678_248 - linear + 513 * 100
    # Every block has one bias per offset and head; windows of the last stage have 2 x 2 tokens.
    heads, offsets = (2 * 3 + 2 * 6 + 6 * 12), 13**2 - 7**2
    biases = heads * offsets + 2 * 24 * (13**2 - 3**2)
    patches = 96 * 3 * (4 * 4 - 2 * 2)
    assert parameters(without_storage("swin-tiny")) == 28_288_354 - biases - patches - 769 * 900


def small(name: str) -> tuple[nn.Module, Tensor, int]:
    """Return a network that is fast on a CPU, an input, and the number of logits."""
    image = torch.randn(2, 3, 32, 32)
    if name in ("gpt2", "llama"):
        options = SMALL_GPT2 if name == "gpt2" else SMALL_LLAMA
        return build(name, **options), torch.randint(0, 50, (2, 16)), 50
    if name == "digits-cnn":
        return build(name), torch.randn(2, 1, 8, 8), 10
    if name == "vit-base-32":
        return (
            build(name, depth=1, width=48, heads=3, image=64, classes=7),
            image.repeat(1, 1, 2, 2),
            7,
        )
    if name.startswith("vit"):
        return build(name, depth=2, width=48, heads=3, classes=7), image, 7
    return build(name, classes=7), image, 7


@pytest.mark.parametrize("name", MODELS)
def test_networks_give_logits_and_gradients_to_all_parameters(name: str) -> None:
    if name in ("gpt2", "llama"):
        pytest.importorskip("transformers")
    model, x, outputs = small(name)
    model.eval()  # in training, a bias before a batch norm has no effect
    for norm in model.modules():  # a branch that starts at 0 passes no gradient to its weights
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.ones_(norm.weight)
    output = logits(model, x)
    expected = (*x.shape, outputs) if x.dtype == torch.int64 else (2, outputs)
    assert output.shape == expected
    output.square().sum().backward()
    for key, p in model.named_parameters():
        assert p.grad is not None, key
        assert p.grad.isfinite().all(), key
        assert p.grad.any(), key


def test_networks_accept_other_image_sizes() -> None:
    image = torch.randn(1, 3, 64, 64)
    assert logits(build("vgg19", classes=5), image.repeat(2, 1, 1, 1)).shape == (2, 5)
    assert logits(build("resnet34", stem="imagenet"), image.repeat(2, 1, 1, 1)).shape == (2, 100)
    assert logits(build("swin-tiny", image=64, patch=4, window=7), image).shape == (1, 100)


def test_a_residual_branch_starts_at_zero() -> None:
    block = build("resnet34").get_submodule("blocks.1")
    x = torch.rand(2, 64, 4, 4)
    assert torch.equal(block(x), x)


def test_drop_path_keeps_the_mean_and_drops_whole_examples() -> None:
    assert rates(0.2, 5) == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2])
    drop = DropPath(0.25)
    x = torch.ones(4000, 2, 3)
    y = drop(x)
    assert y.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert torch.equal(y.amax((1, 2)), y.amin((1, 2)))
    assert float(y.mean()) == pytest.approx(1.0, abs=0.05)
    assert torch.equal(drop.eval()(x), x)
    image = torch.randn(8, 3, 32, 32)
    for name, size in (("vit", {"depth": 2, "width": 48}), ("swin-tiny", {})):
        model = build(name, **size, drop_path=0.5)
        assert not torch.equal(model(image), model(image))
        assert torch.equal(model.eval()(image), model(image))


@pytest.mark.parametrize(("image", "patch", "window"), [(32, 2, 4), (64, 4, 7)])
def test_swin_attends_within_windows(image: int, patch: int, window: int) -> None:
    """Each token of the first two blocks depends only on the tokens of its window."""
    model = build("swin-tiny", image=image, patch=patch, window=window).double()
    side = image // patch
    for block, shift in ((model.layers[0], 0), (model.layers[1], window // 2)):
        x = torch.randn(1, side**2, 96, dtype=torch.float64, requires_grad=True)
        # Tokens share a window if their rows and columns do, after the shift.
        place = (torch.arange(side) - shift) % side
        padded = -(-side // window) * window
        edge = (place >= padded - shift).long() if shift else torch.zeros(side).long()
        label = 100 * (place // window) + edge
        tokens = torch.cartesian_prod(label, label)
        together = (tokens[:, None] == tokens[None, :]).all(-1)
        y = block(x)
        for token in (0, side // 2 * side + side // 2, side**2 - 1):
            (grad,) = torch.autograd.grad(y[0, token].sum(), x, retain_graph=True)
            depends = grad[0].abs().amax(-1) > 1e-12
            assert torch.equal(depends, together[token])


def test_errors_name_the_nearest_name() -> None:
    with pytest.raises(LabError, match=r"resnet43.*resnet34"):
        build("resnet43")
    with pytest.raises(LabError, match=r"clases.*vgg19.*classes"):
        build("vgg19", clases=3)
    with pytest.raises(LabError, match="patch=5 must divide image=32"):
        build("vit", patch=5)
    with pytest.raises(LabError, match="heads=5 must divide width=192"):
        build("vit", heads=5)
    with pytest.raises(LabError, match=r"image=32.*multiple of 8 patches of 8"):
        build("swin-tiny", patch=8)
    with pytest.raises(LabError, match="stem must be cifar or imagenet"):
        build("resnet50", stem="tiny")


def test_errors_name_the_nearest_field_of_a_configuration() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(LabError, match=r"n_layers.*gpt2.*n_layer"):
        build("gpt2", n_layers=3)
    with pytest.raises(LabError, match=r"'gpt2'.*heads"):
        build("gpt2", n_head=7)


def test_errors_name_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(LabError, match="pip install transformers"):
        build("llama")


def timm_resnet34() -> nn.Module:
    import timm

    model = timm.create_model("resnet34", num_classes=100)
    model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


def timm_swin(image: int, patch: int, window: int) -> nn.Module:
    from timm.models.swin_transformer import SwinTransformer

    return SwinTransformer(
        img_size=image,
        patch_size=patch,
        window_size=window,
        embed_dim=96,
        depths=(2, 2, 6, 2),
        num_heads=(3, 6, 12, 24),
        num_classes=100,
        drop_path_rate=0.0,
    )


def timm_named(name: str, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, **options)


class TimmVGG(nn.Module):
    """timm's VGG19 features with a head for small images."""

    def __init__(self) -> None:
        super().__init__()
        self.features = timm_named("vgg19_bn").features
        self.head = nn.Linear(512, 100)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


TIMM_REFERENCES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], int]] = {
    "vgg19": (lambda: build("vgg19"), TimmVGG, 32),
    "resnet34": (lambda: build("resnet34"), timm_resnet34, 32),
    "resnet50": (lambda: build("resnet50"), lambda: timm_named("resnet50"), 224),
    "vit-small": (
        lambda: build("vit-small"),
        lambda: timm_named("vit_small_patch16_224", img_size=32, patch_size=4, num_classes=100),
        32,
    ),
    "vit-base-32": (
        lambda: build("vit-base-32"),
        lambda: timm_named("vit_base_patch32_224"),
        224,
    ),
    "swin-tiny": (lambda: build("swin-tiny"), lambda: timm_swin(32, 2, 4), 32),
    "swin-tiny-64": (
        lambda: build("swin-tiny", image=64, patch=4, window=7),
        lambda: timm_swin(64, 4, 7),
        64,
    ),
}


@pytest.fixture
def full_float32() -> Any:
    """Disable TF32 while two networks are compared."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before


@pytest.mark.gpu
@pytest.mark.usefixtures("full_float32")
@pytest.mark.parametrize("name", TIMM_REFERENCES)
def test_networks_match_timm(name: str) -> None:
    pytest.importorskip("timm")
    make_model, make_reference, side = TIMM_REFERENCES[name]
    with torch.device("cuda"):
        model, reference = make_model(), make_reference()
    assert parameters(model) == parameters(reference)
    # Tensors come in the same order and have the same distributions.
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.shape == q.shape
        deviation, mean = torch.std_mean(torch.stack((p, q)).detach().flatten(1), 1, correction=0)
        assert deviation[0].item() == pytest.approx(deviation[1].item(), rel=0.3, abs=1e-3)
        assert mean[0].item() == pytest.approx(mean[1].item(), abs=0.05)
    with torch.no_grad():
        for p in reference.parameters():  # now no branch or bias is 0
            p.add_(torch.randn_like(p), alpha=0.05)
    entries = zip(model.state_dict().items(), reference.state_dict().values(), strict=True)
    model.load_state_dict({key: value for (key, _), value in entries})
    x = torch.randn(4, 3, side, side, device="cuda")
    for network in (model, reference):
        network.train()
    assert relative_error(model(x), reference(x)) < 1e-4
    for network in (model, reference):
        network.eval()
        (network(x).square().mean()).backward()
    assert relative_error(model(x), reference(x)) < 1e-4
    for (key, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert relative_error(p.grad, q.grad) < 1e-3 or q.grad.norm() < 1e-6, key


@pytest.mark.gpu
@pytest.mark.usefixtures("full_float32")
def test_swin_on_a_gpu_does_not_synchronise_and_replays() -> None:
    """In bf16, a graph gives the results of eager passes, which are close to float32."""
    model = SwinTiny(image=64, patch=4, window=7).cuda()
    x, y = torch.randn(8, 3, 64, 64, device="cuda"), torch.randint(0, 100, (8,), device="cuda")

    def passes(amp: str) -> tuple[Tensor, list[Tensor]]:
        scaler = torch.amp.GradScaler(enabled=False)
        run = Eager(model, Objective(True, amp), optimizer, None, scaler, nondeterministic)
        return run(x, y).clone(), [p.grad.clone() for p in model.parameters()]

    nondeterministic = Repeatable(x.device, False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, exact = passes("off")
    passes("bf16")
    with no_host_sync():
        plain, close = passes("bf16")
    captured = Captured(model, Objective(True, "bf16"), x, y, nondeterministic)
    for _ in range(2):
        loss = captured(x, y)
    assert float(loss) == pytest.approx(float(plain), rel=1e-3)
    for p, once, ref in zip(model.parameters(), close, exact, strict=True):
        assert relative_error(p.grad, once) < 1e-2
        assert relative_error(once, ref) < 0.5  # a missing gradient would have error 1
