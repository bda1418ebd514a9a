"""Param groups by name and by kind of module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kronbit import Shampoo, param_groups


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
def test_groups(skip: Any, kept: set[str], skipped: set[str]) -> None:
    groups = param_groups(Tied(), skip=skip)
    found = {
        group.get("precondition", True): {name for name, _ in group["params"]} for group in groups
    }
    assert found == {k: v for k, v in ((True, kept), (False, skipped)) if v}
    assert len(groups) == len(found)


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
        ([3], TypeError, "patterns of names and kinds of modules; got 3"),
        ([torch.Tensor], TypeError, "got <class 'torch.Tensor'>"),
    ],
)
def test_what_is_not_there_is_refused(skip: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        param_groups(Tied(), skip=skip)
