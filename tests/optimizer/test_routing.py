"""Param groups by name and by module class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kronbit import Shampoo, param_groups
from kronbit.state.binding import blocks_of


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.hidden = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.embedding(x)))


BIASES, MATRICES = ({f"hidden.{i}.{kind}" for i in (0, 1)} for kind in ("bias", "weight"))
SHARED = {"embedding.weight"}


@pytest.mark.parametrize(
    ("skip", "kept", "skipped"),
    [
        ((), BIASES | MATRICES | SHARED, set()),
        (nn.Embedding, BIASES | MATRICES, SHARED),
        ("head.*", BIASES | MATRICES, SHARED),  # under its other name
        (["hidden.?.weight"], BIASES | SHARED, MATRICES),
        ((nn.Embedding, "*.bias"), MATRICES, BIASES | SHARED),
        (nn.Module, set(), BIASES | MATRICES | SHARED),
    ],
    ids=["nothing", "embeddings", "head", "matrices", "both", "all"],
)
def test_param_groups_skip_names_and_kinds_of_modules(
    skip: Any, kept: set[str], skipped: set[str]
) -> None:
    groups = param_groups(Tied(), skip=skip)
    names = {
        group.get("precondition", True): {name for name, _ in group["params"]} for group in groups
    }
    assert names == {k: v for k, v in ((True, kept), (False, skipped)) if v}
    assert len(groups) == len(names)


class Adapted(nn.Module):
    """A layer with a low-rank update, whose factors are named as in peft."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(300, 200)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(300, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, 200, bias=False)})
        self.explora_head = nn.Parameter(torch.zeros(5, 5))  # not a factor of a low-rank update


def test_low_rank_factors_have_smaller_blocks() -> None:
    model = Adapted()
    plain, low_rank = param_groups(model, low_rank_order=128)
    assert [name for name, _ in plain["params"]] == ["explora_head", "base.weight", "base.bias"]
    assert "max_order" not in plain
    assert [name[:6] for name, _ in low_rank["params"]] == ["lora_A", "lora_B"]
    assert low_rank["max_order"] == 128
    optimizer = Shampoo([plain, low_rank], lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    blocks = [len(blocks_of(optimizer.state[p])) for p in model.parameters()]
    assert blocks == [1, 1, 0, 3, 2]  # 4 x 300 and 200 x 4, cut at 128
    assert len(param_groups(model)) == 1
    _, left_out = param_groups(model, skip="lora_*", low_rank_order=128)
    assert left_out["precondition"] is False
    assert "max_order" not in left_out


def test_skipped_parameters_are_left_to_the_base() -> None:
    model = Tied()
    groups = param_groups(model, skip=nn.Embedding)
    optimizer = Shampoo(groups, lr=0.1, update_every=1, refresh_every=1, bits=32)
    model(torch.arange(6)).square().mean().backward()
    gradient = model.embedding.weight.grad.clone()
    optimizer.step()
    assert torch.equal(model.embedding.weight.grad, gradient)
    assert "block_0" not in optimizer.state[model.embedding.weight]
    assert "block_0" in optimizer.state[model.hidden[0].weight]
    assert "embedding.weight" in optimizer.summary()
    assert "precondition=False" in optimizer.summary()


@pytest.mark.parametrize(
    ("skip", "error", "message"),
    [
        ("lm_head.*", ValueError, r"'lm_head\.\*' matches no parameter.*like embedding\.weight"),
        (nn.Conv2d, ValueError, "Conv2d matches no parameter"),
        ([3], TypeError, "name patterns and module classes; got 3"),
        ([torch.Tensor], TypeError, "got <class 'torch.Tensor'>"),
    ],
)
def test_patterns_without_a_match_are_refused(
    skip: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        param_groups(Tied(), skip=skip)
