"""The optimizer works with other parts of a training loop: scalers, averages, threads, workers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.networks import assert_same_state
from support.numerics import PAPER, slow
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from kronbit import CASPR, KFAC, AdaBK, Shampoo
from kronbit.baselines import EVA

OPTIONS = {"update_every": 1, "refresh_every": 2, "min_quantized_numel": 0}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 6))


def batches(count: int, seed: int = 1) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(16, 20, generator=generator)


def backward(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    model(x.to(next(model.parameters()).device)).square().mean().backward()


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 1, steps: int = 8
) -> list[Tensor]:
    for x in batches(steps, seed):
        backward(model, x)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for p, q in zip(actual, expected, strict=True):
        assert torch.equal(p, q)


def test_a_step_that_the_scaler_skips_does_not_count() -> None:
    """A skipped step changes neither the step count nor the statistics."""
    model, twin = network(), network()
    optimizer, plain = (
        Shampoo(module.parameters(), lr=1e-2, **OPTIONS) for module in (model, twin)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for t, x in enumerate(batches(6)):
        model.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        if t == 3:
            grad = model[0].weight.grad
            assert grad is not None
            grad[0, 0] = torch.inf
        before = copy.deepcopy(optimizer.state_dict())
        scaler.step(optimizer)
        scaler.update()
        if t == 3:
            assert_same_state(optimizer.state_dict()["state"], before["state"])
            assert scaler.get_scale() == 512.0
            continue
        backward(twin, x)
        plain.step()
    # Scales are powers of two, so division by a scale is exact.
    assert_equal(list(model.parameters()), list(twin.parameters()))
    assert_same_state(optimizer.state_dict()["state"], plain.state_dict()["state"])


def test_averages_of_weights_do_not_affect_training() -> None:
    model, twin = network(), network()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = Shampoo(model.parameters(), lr=1e-2, **OPTIONS)
    expected = None
    for x in batches(8):
        backward(model, x)
        optimizer.step()
        average.update_parameters(model)
        weight = model[0].weight.detach()
        expected = weight.clone() if expected is None else 0.5 * expected + 0.5 * weight
    assert expected is not None
    torch.testing.assert_close(average.module[0].weight.detach(), expected)
    expected_weights = trained(twin, Shampoo(twin.parameters(), lr=1e-2, **OPTIONS))
    assert_equal(list(model.parameters()), expected_weights)


@pytest.mark.parametrize("make", [Shampoo, CASPR])
def test_two_optimizers_of_one_model_equal_one_optimizer(make: Any) -> None:
    model, twin = network(), network()
    whole = trained(model, make(model.parameters(), lr=1e-2, **OPTIONS))
    halves = [make(part.parameters(), lr=1e-2, **OPTIONS) for part in (twin[0], twin[2])]
    for x in batches(8):
        backward(twin, x)
        for optimizer in halves:
            optimizer.step()
    assert_equal(list(twin.parameters()), whole)


@pytest.mark.filterwarnings("ignore:.*duplicate parameters")
@pytest.mark.parametrize("keep", [False, True])
def test_a_parameter_listed_twice_has_one_state(keep: bool) -> None:
    """PyTorch only warns of duplicate parameters, and F steps twice with the same G̃."""
    tied, twin = network(), network()
    first, bias, *rest = tied.parameters()
    plain_sgd: Any = {"base": torch.optim.SGD, "lr": 1e-2, **OPTIONS}
    optimizer = Shampoo([first, bias, first, *rest], keep_gradients=keep, **plain_sgd)
    plain = Shampoo(twin.parameters(), **plain_sgd)
    for x in batches(4):
        backward(tied, x)
        backward(twin, x)
        optimizer.step()
        plain.step()
        grad = twin[0].weight.grad
        assert grad is not None
        twin[0].weight.data.add_(grad, alpha=-1e-2)  # F's second step
    assert_equal(list(tied.parameters()), list(twin.parameters()))
    other = Shampoo([first, bias, first, *rest], **plain_sgd)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same_state(other.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.filterwarnings("ignore:.*duplicate parameters")
def test_eva_accepts_parameters_listed_twice() -> None:
    model, twin = network(), network()
    params = [*model.parameters(), model[0].weight]
    optimizer = EVA(params, torch.optim.SGD, model=model, lr=0.0)
    plain = EVA(twin.parameters(), torch.optim.SGD, model=twin, lr=0.0)
    for x in batches(3):
        for module, stepping in ((model, optimizer), (twin, plain)):
            backward(module, x)
            stepping.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


def in_threads(*functions: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_two_threads_step_two_optimizers(device: torch.device) -> None:
    """Concurrent runs are bitwise equal to separate runs. On a GPU, both record graphs."""
    models = [network(seed).to(device) for seed in range(2)]
    alone = [
        trained(model, Shampoo(model.parameters(), lr=1e-2, **OPTIONS), seed, steps=20)
        for seed, model in enumerate(models)
    ]
    twins = [network(seed).to(device) for seed in range(2)]
    optimizers = [Shampoo(twin.parameters(), lr=1e-2, **OPTIONS) for twin in twins]
    results: dict[int, list[Tensor]] = {}

    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            results[number] = trained(twins[number], optimizers[number], number, steps=20)

        return run

    in_threads(work(0), work(1))
    for number, expected in enumerate(alone):
        assert_equal(results[number], expected)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_loader_may_start_between_steps(context: str) -> None:
    x = torch.randn(32, 20, generator=torch.Generator().manual_seed(0))
    results = []
    for workers in (0, 1):
        model = network()
        optimizer = Shampoo(model.parameters(), lr=1e-2, **OPTIONS)
        arguments: dict[str, Any] = {"multiprocessing_context": context} if workers else {}
        loader = DataLoader(TensorDataset(x), batch_size=8, num_workers=workers, **arguments)
        for _ in range(2):
            for (batch,) in loader:
                backward(model, batch)
                optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    assert_equal(*results)


def test_a_step_does_not_change_global_state(device: torch.device) -> None:
    def global_state() -> list[Any]:
        cuda_rng = torch.cuda.get_rng_state().tolist() if device.type == "cuda" else []
        return [
            cuda_rng,
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
            torch.is_autocast_enabled(device.type),
            torch.cuda.is_available() and torch.cuda.current_stream(),
            torch.random.get_rng_state().tolist(),
        ]

    torch.set_float32_matmul_precision("medium")
    try:
        model = network().to(device)
        for x in batches(1):
            backward(model, x)
        before = global_state()
        factories: list[Callable[[], Any]] = [
            lambda: Shampoo(model.parameters(), lr=1e-2, **OPTIONS),
            lambda: KFAC(model.parameters(), model=model, lr=1e-2, **OPTIONS),
        ]
        for make in factories:
            optimizer, twin = make(), make()
            for _ in range(3):
                for x in batches(1):
                    backward(model, x)
                optimizer.step()
            twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.summary()
            optimizer.diagnostics()
        assert global_state() == before
    finally:
        torch.set_float32_matmul_precision("highest")


def make_shampoo(model: nn.Module) -> torch.optim.Optimizer:
    return Shampoo(model.parameters(), "sgd", lr=1e-2, **OPTIONS)


def make_caspr(model: nn.Module) -> torch.optim.Optimizer:
    return CASPR(model.parameters(), "sgd", lr=1e-2, **PAPER, **OPTIONS)


def make_kfac(model: nn.Module) -> torch.optim.Optimizer:
    return KFAC(model.parameters(), base="sgd", model=model, lr=1e-2, **OPTIONS)


def make_adabk(model: nn.Module) -> torch.optim.Optimizer:
    return AdaBK(model.parameters(), base="sgd", model=model, lr=1e-2, **OPTIONS)


def with_default(dtype: torch.dtype, make: Any, device: torch.device) -> tuple[Any, Any]:
    """Train three steps in float32 under a default dtype; return the state and the products."""
    model, steps = network().to(device), list(batches(3))
    torch.set_default_dtype(dtype)
    try:
        optimizer: Any = make(model)
        for x in steps:
            backward(model, x)
            optimizer.step()
        assert torch.get_default_dtype() == dtype
        return optimizer.state_dict()["state"], optimizer.diagnostics()["products"]
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("make", [make_shampoo, make_caspr, make_kfac, make_adabk])
def test_a_default_dtype_changes_nothing(
    make: Any, default: torch.dtype, device: torch.device
) -> None:
    (state, _), (expected, _) = (
        with_default(dtype, make, device) for dtype in (default, torch.float32)
    )
    assert_same_state(state, expected)


@pytest.mark.bf16_products
@pytest.mark.parametrize(
    "default", [torch.bfloat16, pytest.param(torch.float64, marks=slow)], ids=str
)
@pytest.mark.parametrize("make", [pytest.param(make_shampoo, marks=slow), make_caspr])
def test_a_default_dtype_changes_nothing_for_kernels(
    make: Any, default: torch.dtype, kernels: torch.device
) -> None:
    actual, expected = (with_default(dtype, make, kernels) for dtype in (default, torch.float32))
    assert_same_state(actual[0], expected[0])
    assert actual[1] == expected[1]
    assert actual[1]  # some parameters are preconditioned


class RoundingSGD(torch.optim.Optimizer):
    """A base with stochastic rounding for bf16 weights."""

    def __init__(self, params: Any, lr: float, stochastic_rounding: bool = False) -> None:
        super().__init__(params, {"lr": lr, "stochastic_rounding": stochastic_rounding})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                new = p.float() - group["lr"] * p.grad.float()
                if group["stochastic_rounding"]:
                    bits = new.view(torch.int32)
                    new = ((bits + torch.randint_like(bits, 2**16)) & -(2**16)).view(torch.float32)
                p.copy_(new)


@pytest.mark.parametrize("stochastic", [False, True])
def test_the_base_rounds_bf16_weights(stochastic: bool) -> None:
    """Small updates are lost by rounding to nearest; stochastic rounding keeps their mean."""
    p = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = Shampoo(
        [p], RoundingSGD, lr=2**-11, stochastic_rounding=stochastic, refresh_every=2, update_every=1
    )
    expected = torch.zeros(64, 64)
    for t in range(20):
        torch.manual_seed(t)
        p.grad = (1 + 0.1 * torch.randn(64, 64)).bfloat16()
        optimizer.step()
        expected -= 2**-11 * p.grad.float()  # G̃
    actual = float((p.detach().float() - 1).mean())
    assert actual == pytest.approx(float(expected.mean()) if stochastic else 0.0, abs=3e-4)
    assert abs(float(expected.mean())) > 1e-3


def test_a_compiled_model_trains_like_an_eager_one() -> None:
    model, twin = network(), network()
    optimizer, plain = (
        Shampoo(module.parameters(), lr=1e-2, **OPTIONS) for module in (model, twin)
    )
    compiled = trained(torch.compile(model, backend="aot_eager"), optimizer)
    for p, q in zip(compiled, trained(twin, plain), strict=True):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("base", ["sgd", "adamw"])
def test_a_compiled_loop_steps_eagerly(base: str) -> None:
    model, twin = network(), network()
    optimizer, plain = (
        Shampoo(module.parameters(), base, lr=1e-2, **OPTIONS) for module in (model, twin)
    )
    graphs = CompileCounter()

    @torch.compile(backend=graphs)
    def step(x: Tensor) -> None:
        (x + 1).sum()  # something to compile
        optimizer.step()

    for x in batches(4):
        for module in (model, twin):
            backward(module, x)
        step(x)
        plain.step()
    assert_same_state(optimizer.state_dict()["state"], plain.state_dict()["state"])
    assert_equal(list(model.parameters()), list(twin.parameters()))
    assert optimizer.diagnostics()["products"] == plain.diagnostics()["products"] != {}
    assert graphs.frame_count == 1  # the loop is compiled, the step is not


def test_a_closure_may_be_compiled() -> None:
    model, twin = network(), network()
    optimizer, plain = (
        Shampoo(module.parameters(), lr=1e-2, **OPTIONS) for module in (model, twin)
    )
    graphs = CompileCounter()
    compiled = torch.compile(model, backend=graphs)
    for x in batches(4):

        def closure(x: Tensor = x) -> float:
            backward(compiled, x)
            return 0.0

        optimizer.step(closure)
        backward(twin, x)
        plain.step()
    assert graphs.frame_count >= 1
    assert_equal(list(model.parameters()), list(twin.parameters()))


def test_warnings_point_to_the_users_line() -> None:
    model = network()
    vectors = nn.ParameterList([torch.randn(2**21)])
    cases: list[Callable[[], Any]] = [
        lambda: step_with_ones(Shampoo(vectors.parameters(), lr=1e-2), vectors),
        lambda: step_with_ones(KFAC(model.parameters(), model=model, lr=1e-2, **OPTIONS), model),
        lambda: load_partial_state(model),
    ]
    for case, words in zip(cases, ("are preconditioned", "not called", "start fresh"), strict=True):
        with pytest.warns(RuntimeWarning, match=words) as caught:
            case()
        assert {warning.filename for warning in caught} == {__file__}


def step_with_ones(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Step with gradients of ones, without a backward pass."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def load_partial_state(model: nn.Module) -> None:
    optimizer = Shampoo(model.parameters(), lr=1e-2, **OPTIONS)
    backward(model, next(batches(1)))
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][2]
    optimizer.load_state_dict(state)
