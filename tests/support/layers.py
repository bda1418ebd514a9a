"""Inputs, output gradients and statistics of layers, and backward passes, for tests of hooks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional

from kronbit import KFAC

# With these options, A is the M of the last update, in float32.
EXACT: dict[str, Any] = {"bits": 32, "beta": 0.0, "update_every": 1, "refresh_every": 100}


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def output_gradients(
    model: nn.Module, layer: str, loss: Callable[[Tensor], Tensor], *inputs: Tensor
) -> Tensor:
    """Return ∂loss / ∂(output of a layer) by perturbing that output, without kronbit's hooks."""
    twin = copy.deepcopy(model).double()
    module, params = twin.get_submodule(layer), dict(twin.named_parameters())
    exact = tuple(x.double() for x in inputs)
    shapes: list[torch.Size] = []
    handle = module.register_forward_hook(lambda _, args, output: shapes.append(output.shape))
    twin(*exact)
    handle.remove()

    def perturbed(epsilon: Tensor) -> Tensor:
        handle = module.register_forward_hook(lambda _, args, output: output + epsilon)
        out = functional_call(twin, params, exact)
        handle.remove()
        return loss(out)

    return grad(perturbed)(torch.zeros(shapes[0], dtype=torch.float64))


def with_one(x: Tensor) -> Tensor:
    """Append a constant 1 to each row, for the bias."""
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


def step(model: nn.Module, optimizer: KFAC, loss: Callable[[Tensor], Tensor], *x: Tensor) -> None:
    optimizer.zero_grad()
    loss(model(*x)).backward()
    optimizer.step()


def patches(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Return patches (groups, images x positions, channels x kernel), cut one by one."""
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    before = conv._reversed_padding_repeated_twice
    x = functional.pad(x.double(), before, mode=mode)
    kh, kw = conv.kernel_size
    dh, dw = conv.dilation
    sh, sw = conv.stride
    windows = []
    for image in x:
        for i in range(0, image.shape[1] - dh * (kh - 1), sh):
            for j in range(0, image.shape[2] - dw * (kw - 1), sw):
                window = image[:, i : i + dh * (kh - 1) + 1 : dh, j : j + dw * (kw - 1) + 1 : dw]
                windows.append(window.reshape(conv.groups, -1))
    return torch.stack(windows, 1)


def one_pass(model: nn.Module, optimizer: KFAC, x: Tensor) -> None:
    model(x).square().mean().backward()


def after_a_failure(model: nn.Module, optimizer: KFAC, x: Tensor) -> None:
    model(x * 3).square().mean().backward()
    optimizer.zero_grad()
    model[0](x)  # no backward pass, as after an exception
    one_pass(model, optimizer, x)


def after_gradients_were_dropped(model: nn.Module, optimizer: KFAC, x: Tensor) -> None:
    model(x * 3).square().mean().backward()
    model.zero_grad()
    one_pass(model, optimizer, x)


def beside_evaluation(model: nn.Module, optimizer: KFAC, x: Tensor) -> None:
    model.eval()
    model(x * 5).square().mean().backward()
    model.zero_grad()
    model.train()
    with torch.no_grad():
        model(x * 7)
    one_pass(model, optimizer, x)


def through_a_copy(model: nn.Module, optimizer: KFAC, x: Tensor) -> None:
    twin = copy.deepcopy(model)
    pickle.loads(pickle.dumps(twin))(x * 3).sum().backward()
    twin(x * 3).square().mean().backward()
    one_pass(model, optimizer, x)


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def statistics(optimizer: KFAC, weight: Tensor, block: int = 0) -> tuple[Tensor, Tensor]:
    """Return L and R of a layer."""
    factors = optimizer.state[weight][f"block_{block}"]
    return factors["left"]["matrix"], factors["right"]["matrix"]


def mean_square(rows: Tensor) -> Tensor:
    rows = rows.double()
    return rows.mT @ rows / rows.shape[-2]
