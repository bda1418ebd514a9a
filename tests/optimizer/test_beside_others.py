"""What else is in a training loop: scalers, averages, other optimizers, threads, workers."""

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

EVERY = {"update_every": 1, "refresh_every": 2, "min_quantized_numel": 0}


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


def assert_equal(some: list[Tensor], others: list[Tensor]) -> None:
    for p, q in zip(some, others, strict=True):
        assert torch.equal(p, q)


def test_a_step_that_the_scaler_skips_has_not_been() -> None:
    """Neither the step count nor statistics know of it."""
    model, twin = network(), network()
    optimizer, plain = (Shampoo(own.parameters(), lr=1e-2, **EVERY) for own in (model, twin))
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
    # Scales are powers of two, so that dividing by them is exact.
    assert_equal(list(model.parameters()), list(twin.parameters()))
    assert_same_state(optimizer.state_dict()["state"], plain.state_dict()["state"])


def test_averages_of_weights_are_beside_it() -> None:
    model, twin = network(), network()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = Shampoo(model.parameters(), lr=1e-2, **EVERY)
    expected = None
    for x in batches(8):
        backward(model, x)
        optimizer.step()
        average.update_parameters(model)
        weight = model[0].weight.detach()
        expected = weight.clone() if expected is None else 0.5 * expected + 0.5 * weight
    assert expected is not None
    torch.testing.assert_close(average.module[0].weight.detach(), expected)
    again = trained(twin, Shampoo(twin.parameters(), lr=1e-2, **EVERY))
    assert_equal(list(model.parameters()), again)


@pytest.mark.parametrize("make", [Shampoo, CASPR])
def test_two_optimizers_of_one_model_are_one(make: Any) -> None:
    model, twin = network(), network()
    whole = trained(model, make(model.parameters(), lr=1e-2, **EVERY))
    halves = [make(part.parameters(), lr=1e-2, **EVERY) for part in (twin[0], twin[2])]
    for x in batches(8):
        backward(twin, x)
        for optimizer in halves:
            optimizer.step()
    assert_equal(list(twin.parameters()), whole)


@pytest.mark.filterwarnings("ignore:.*duplicate parameters")
@pytest.mark.parametrize("keep", [False, True])
def test_a_matrix_that_is_listed_twice_has_one_state(keep: bool) -> None:
    """Tied weights: torch only warns, and F takes two steps with the one G̃."""
    tied, twin = network(), network()
    first, bias, *rest = tied.parameters()
    plain_sgd: Any = {"base": torch.optim.SGD, "lr": 1e-2, **EVERY}
    optimizer = Shampoo([first, bias, first, *rest], keep_gradients=keep, **plain_sgd)
    plain = Shampoo(twin.parameters(), **plain_sgd)
    for x in batches(4):
        backward(tied, x)
        backward(twin, x)
        optimizer.step()
        plain.step()
        grad = twin[0].weight.grad
        assert grad is not None
        twin[0].weight.data.add_(grad, alpha=-1e-2)  # F's second one
    assert_equal(list(tied.parameters()), list(twin.parameters()))
    again = Shampoo([first, bias, first, *rest], **plain_sgd)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same_state(again.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.filterwarnings("ignore:.*duplicate parameters")
def test_eva_takes_what_is_listed_twice() -> None:
    model, twin = network(), network()
    params = [*model.parameters(), model[0].weight]
    optimizer = EVA(params, torch.optim.SGD, model=model, lr=0.0)
    plain = EVA(twin.parameters(), torch.optim.SGD, model=twin, lr=0.0)
    for x in batches(3):
        for own, stepping in ((model, optimizer), (twin, plain)):
            backward(own, x)
            stepping.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


def in_threads(*work: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def guarded(own: Callable[[], None]) -> None:
        try:
            own()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(own,)) for own in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def test_two_threads_step_two_optimizers(device: torch.device) -> None:
    """At once, and to the bit what each does alone; on a GPU both record graphs."""
    models = [network(seed).to(device) for seed in range(2)]
    alone = [
        trained(own, Shampoo(own.parameters(), lr=1e-2, **EVERY), seed, steps=20)
        for seed, own in enumerate(models)
    ]
    twins = [network(seed).to(device) for seed in range(2)]
    optimizers = [Shampoo(own.parameters(), lr=1e-2, **EVERY) for own in twins]
    found: dict[int, list[Tensor]] = {}

    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            found[number] = trained(twins[number], optimizers[number], number, steps=20)

        return run

    in_threads(work(0), work(1))
    for number, expected in enumerate(alone):
        assert_equal(found[number], expected)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_loader_may_start_between_steps(context: str) -> None:
    x = torch.randn(32, 20, generator=torch.Generator().manual_seed(0))
    results = []
    for workers in (0, 1):
        model = network()
        optimizer = Shampoo(model.parameters(), lr=1e-2, **EVERY)
        more: dict[str, Any] = {"multiprocessing_context": context} if workers else {}
        loader = DataLoader(TensorDataset(x), batch_size=8, num_workers=workers, **more)
        for _ in range(2):
            for (batch,) in loader:
                backward(model, batch)
                optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    assert_equal(*results)


def test_a_step_changes_nothing_global(device: torch.device) -> None:
    def everything() -> list[Any]:
        drawn = torch.cuda.get_rng_state().tolist() if device.type == "cuda" else []
        return [
            drawn,
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
        before = everything()
        made: list[Callable[[], Any]] = [
            lambda: Shampoo(model.parameters(), lr=1e-2, **EVERY),
            lambda: KFAC(model.parameters(), model=model, lr=1e-2, **EVERY),
        ]
        for make in made:
            optimizer, twin = make(), make()
            for _ in range(3):
                for x in batches(1):
                    backward(model, x)
                optimizer.step()
            twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.summary()
            optimizer.diagnostics()
        assert everything() == before
    finally:
        torch.set_float32_matmul_precision("highest")


def made_shampoo(model: nn.Module) -> torch.optim.Optimizer:
    return Shampoo(model.parameters(), "sgd", lr=1e-2, **EVERY)


def made_caspr(model: nn.Module) -> torch.optim.Optimizer:
    return CASPR(model.parameters(), "sgd", lr=1e-2, **PAPER, **EVERY)


def made_kfac(model: nn.Module) -> torch.optim.Optimizer:
    return KFAC(model.parameters(), base="sgd", model=model, lr=1e-2, **EVERY)


def made_adabk(model: nn.Module) -> torch.optim.Optimizer:
    return AdaBK(model.parameters(), base="sgd", model=model, lr=1e-2, **EVERY)


def with_default(dtype: torch.dtype, make: Any, device: torch.device) -> tuple[Any, Any]:
    """The state and the products after three steps in float32 under some default dtype."""
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
@pytest.mark.parametrize("make", [made_shampoo, made_caspr, made_kfac, made_adabk])
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
@pytest.mark.parametrize("make", [pytest.param(made_shampoo, marks=slow), made_caspr])
def test_a_default_dtype_changes_nothing_for_kernels(
    make: Any, default: torch.dtype, kernels: torch.device
) -> None:
    found, expected = (with_default(dtype, make, kernels) for dtype in (default, torch.float32))
    assert_same_state(found[0], expected[0])
    assert found[1] == expected[1]
    assert found[1]  # some products were taken


class RoundingSGD(torch.optim.Optimizer):
    """A base that offers what bf16 weights need: it rounds up or down by chance."""

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
def test_bf16_weights_are_rounded_as_the_base_does_it(stochastic: bool) -> None:
    """Updates of a tenth of the last bit are lost, or kept on the average."""
    p = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = Shampoo(
        [p], RoundingSGD, lr=2**-11, stochastic_rounding=stochastic, refresh_every=2, update_every=1
    )
    moved = torch.zeros(64, 64)
    for t in range(20):
        torch.manual_seed(t)
        p.grad = (1 + 0.1 * torch.randn(64, 64)).bfloat16()
        optimizer.step()
        moved -= 2**-11 * p.grad.float()  # G̃
    found = float((p.detach().float() - 1).mean())
    assert found == pytest.approx(float(moved.mean()) if stochastic else 0.0, abs=3e-4)
    assert abs(float(moved.mean())) > 1e-3


def test_a_compiled_model_trains_as_it_does_eagerly() -> None:
    model, twin = network(), network()
    optimizer, plain = (Shampoo(own.parameters(), lr=1e-2, **EVERY) for own in (model, twin))
    found = trained(torch.compile(model, backend="aot_eager"), optimizer)
    for p, q in zip(found, trained(twin, plain), strict=True):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("base", ["sgd", "adamw"])
def test_a_compiled_loop_steps_eagerly(base: str) -> None:
    model, twin = network(), network()
    optimizer, plain = (Shampoo(own.parameters(), base, lr=1e-2, **EVERY) for own in (model, twin))
    graphs = CompileCounter()

    @torch.compile(backend=graphs)
    def take(x: Tensor) -> None:
        (x + 1).sum()  # something to compile
        optimizer.step()

    for x in batches(4):
        for own in (model, twin):
            backward(own, x)
        take(x)
        plain.step()
    assert_same_state(optimizer.state_dict()["state"], plain.state_dict()["state"])
    assert_equal(list(model.parameters()), list(twin.parameters()))
    assert optimizer.diagnostics()["products"] == plain.diagnostics()["products"] != {}
    assert graphs.frame_count == 1  # of the loop, and nothing of the step


def test_a_closure_may_be_compiled() -> None:
    model, twin = network(), network()
    optimizer, plain = (Shampoo(own.parameters(), lr=1e-2, **EVERY) for own in (model, twin))
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


def test_warnings_point_at_the_line_of_the_users() -> None:
    model = network()
    vectors = nn.ParameterList([torch.randn(2**21)])
    cases: list[Callable[[], Any]] = [
        lambda: stepped(Shampoo(vectors.parameters(), lr=1e-2), vectors),
        lambda: stepped(KFAC(model.parameters(), model=model, lr=1e-2, **EVERY), model),
        lambda: loaded_in_part(model),
    ]
    for case, words in zip(cases, ("are preconditioned", "not called", "start fresh"), strict=True):
        with pytest.warns(RuntimeWarning, match=words) as caught:
            case()
        assert {warning.filename for warning in caught} == {__file__}


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """With gradients that come from nowhere."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def loaded_in_part(model: nn.Module) -> None:
    optimizer = Shampoo(model.parameters(), lr=1e-2, **EVERY)
    backward(model, next(batches(1)))
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][2]
    optimizer.load_state_dict(state)
