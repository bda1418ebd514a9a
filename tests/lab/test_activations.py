"""Counted activations match a count by hand, autograd, and torch's memory tracker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.planned import Attending, Convolutional, mlp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from kronbit.lab.models import build
from kronbit.lab.plan.activations import Estimate, Passes, trace

on_meta = torch.device("meta")


def saved_on_cpu(model: nn.Module, loss: Callable[[], Tensor]) -> int:
    """Return the bytes that autograd saves, each storage once, without parameters."""
    known = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss()
    return sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in known)


def test_saved_activations_match_a_count_by_hand() -> None:
    with on_meta:
        model = mlp()
    traced = trace(model, Passes((96,), tokens=False), 128)
    # log_softmax keeps its result, not the output of the MLP.
    inputs, hidden, log_probabilities = 96, 160, 70
    targets, loss_and_weight = 8 * 128, 8
    assert (
        traced.saved == 4 * 128 * (inputs + hidden + log_probabilities) + targets + loss_and_weight
    )
    # At the end only the gradients are left.
    assert traced.curve[-1] - 4 * sum(p.numel() for p in model.parameters()) < traced.saved
    assert traced.peak >= traced.saved
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("amp", ["off", "bf16"])
@pytest.mark.parametrize(
    ("make", "shape"), [(mlp, (96,)), (Convolutional, (3, 32, 32))], ids=["mlp", "convolutional"]
)
def test_saved_activations_match_autograd(
    make: Callable[[], nn.Module], shape: tuple[int, ...], amp: str
) -> None:
    with on_meta:
        model = make()
    passes = Passes(shape, False, amp)
    traced = trace(model, passes, 64)
    real = make()

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp != "off"):
            return passes.loss(real, 64)

    # The trace includes the loss, which no node of autograd saves.
    assert traced.saved == pytest.approx(saved_on_cpu(real, loss), rel=0.02)


@pytest.mark.parametrize("module", [False, True])
def test_attention_keeps_no_scores(module: bool) -> None:
    with on_meta:
        model = Attending(module=module)
    saved = [trace(model, Passes((length,), tokens=True), 2).saved for length in (512, 1024, 2048)]
    assert saved[2] - saved[1] == 2 * (saved[1] - saved[0])  # linear in the length
    if not module:  # tokens, targets, q = k = v, the output, its log softmax; a sum per row
        assert saved[0] == 2 * 512 * (8 + 8 + 3 * 4 * 64 + 4 * 4) + 8


def test_dropout_keeps_bytes() -> None:
    with on_meta:
        model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.5), nn.Linear(256, 8))
    with_dropout = trace(model, Passes((64,), tokens=False), 128).saved
    model[1].p = 0.0
    without = trace(model, Passes((64,), tokens=False), 128).saved
    assert with_dropout - without == 128 * 256


def tiny_gpt(**options: Any) -> nn.Module:
    sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 128, "n_positions": 64}
    return build("gpt2", **{**sizes, **options})


def test_two_batch_sizes_predict_others_and_checkpointing_saves_memory() -> None:
    with on_meta:
        model = tiny_gpt()
    passes = Passes((64,), tokens=True)
    plain = Estimate(model, passes, 4)
    assert plain.peak_at(32) == trace(model, passes, 32).peak
    assert plain.peak_at(1) == trace(model, passes, 1).peak
    model.gradient_checkpointing_enable()
    checkpointed = Estimate(model, passes, 4)
    assert checkpointed.peak_at(32) == trace(model, passes, 32).peak
    assert checkpointed.first.saved < plain.first.saved / 2
    assert checkpointed.peak_at(32) < plain.peak_at(32)
    # The gradients of the first pass are kept during the second.
    gradients = 4 * sum(p.numel() for p in model.parameters())
    again = trace(model, replace(passes, repeated=True), 4)
    assert again.saved == checkpointed.first.saved
    assert again.peak >= gradients + again.saved


@pytest.mark.parametrize("make", [Convolutional, partial(build, "resnet34")])
def test_the_peak_matches_torchs_memory_tracker(make: Callable[[], nn.Module]) -> None:
    """The tracker runs on fake tensors of the CPU, where networks without attention run alike.

    It is private to torch. If a new version moves it, adapt this test.
    """
    passes = Passes((3, 32, 32), tokens=False)
    with on_meta:
        counted = trace(make(), passes, 8).peak
    tracker = MemTracker()
    with FakeTensorMode():
        model = make()
        tracker.track_external(model)
        with tracker:
            passes.loss(model, 8).backward()
    ((_, peak),) = tracker.get_tracker_snapshot("peak").items()
    stored = sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))
    assert counted == peak["Total"] - stored
