"""Random sequences of user actions, compared with the oracle and an undisturbed optimizer.

At 32 bits, an oracle in float64 follows every parameter. At 4 bits, rounding of a code may separate
a run from the oracle. There, a second optimizer takes the same steps, but is never saved, copied,
inspected or given other tensors. The two optimizers must be bitwise equal.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections import Counter
from typing import Any, ClassVar

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from support import oracle
from support.faults import NthOperation
from support.numerics import relative_error, same_state, slow
from torch import Tensor, nn

from kronbit import Shampoo

SHAPES = [(12, 9), (20,), (6, 5, 2), (), (30, 4)]
OPTIONS: dict[str, Any] = {"damping": 0.1, "max_order": 16, "min_quantized_numel": 0}
BASE = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
numbers = st.integers(0, 2**30)


class Follower:
    """The oracle of one parameter, since kronbit counts steps per parameter."""

    def __init__(self, p: Tensor, lr: float, schedule: dict[str, int]) -> None:
        self.start = p.detach().double().clone()
        self.p = nn.Parameter(self.start.clone())
        self.base = torch.optim.SGD([self.p], **{**BASE, "lr": lr})
        options = {"damping": 0.1, "max_order": 16, "bits": 32, "method": "dense", **schedule}
        self.oracle = oracle.Shampoo([self.p], self.base, oracle.Options(**options))

    def step(self, grad: Tensor) -> None:
        self.p.grad = grad.double()
        self.oracle.step()


def _run_out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError


class Machine(RuleBasedStateMachine):
    """The actions that users take, in random order."""

    counts: ClassVar[Counter[str]] = Counter()

    @initialize(seed=numbers)
    def begin(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = [torch.randn(shape, generator=generator) for shape in SHAPES[:3]]
        self.schedule = {"update_every": 2, "refresh_every": 4}
        self.exact, self.disturbed, self.undisturbed = (
            self._make([nn.Parameter(w.clone()) for w in start], bits) for bits in (32, 4, 4)
        )
        self.followers = [Follower(w, 0.05, self.schedule) for w in start]
        self.frozen: set[int] = set()
        self.device = torch.device("cpu")

    def _make(self, params: list[nn.Parameter], bits: int) -> Shampoo:
        base = torch.optim.SGD(params, **BASE)
        return Shampoo(base, bits=bits, **OPTIONS, **self.schedule)

    @staticmethod
    def params(optimizer: Shampoo) -> list[Tensor]:
        return [p for group in optimizer.param_groups for p in group["params"]]

    @property
    def optimizers(self) -> tuple[Shampoo, Shampoo, Shampoo]:
        return self.exact, self.disturbed, self.undisturbed

    # ------------------------------------------------------------------ actions with an effect

    @rule(seed=numbers, missing=st.sets(st.integers(0, 4), max_size=2), count=st.integers(1, 20))
    def step(self, seed: int, missing: set[int], count: int) -> None:
        """Take steps in which some parameters have no gradient."""
        generator = torch.Generator().manual_seed(seed)
        missing = missing | self.frozen
        for _ in range(count):
            grads = [torch.randn(f.p.shape, generator=generator) for f in self.followers]
            for optimizer in self.optimizers:
                for number, p in enumerate(self.params(optimizer)):
                    p.grad = None if number in missing else self._to_device(grads[number])
                optimizer.step()
            for number, (follower, grad) in enumerate(zip(self.followers, grads, strict=True)):
                if number not in missing:
                    follower.step(grad)
            self.counts["steps"] += 1  # per optimizer
        self.compare()

    @rule(lr=st.sampled_from([0.0, 0.01, 0.1]))
    def set_rate(self, lr: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        for follower in self.followers:
            follower.base.param_groups[0]["lr"] = lr

    @rule(T1=st.integers(1, 6), T2=st.integers(1, 8))
    def set_schedule(self, T1: int, T2: int) -> None:
        self.schedule = {"update_every": T1, "refresh_every": T2}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group.update(self.schedule)
        for follower in self.followers:
            follower.oracle.o.update_every, follower.oracle.o.refresh_every = T1, T2

    @rule(seed=numbers)
    def add_group(self, seed: int) -> None:
        if len(self.followers) == len(SHAPES):
            return
        shape = SHAPES[len(self.followers)]
        w = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        lr = self.exact.param_groups[0]["lr"]
        for optimizer in self.optimizers:
            optimizer.add_param_group(
                {"params": [nn.Parameter(self._to_device(w))], "lr": lr, **self.schedule}
            )
        self.followers.append(Follower(w, lr, self.schedule))

    @rule(number=st.integers(0, 4))
    def freeze_or_unfreeze(self, number: int) -> None:
        """Freeze or unfreeze a parameter. Frozen parameters have no gradient."""
        number %= len(self.followers)
        self.frozen ^= {number}
        for optimizer in self.optimizers:
            p = self.params(optimizer)[number]
            p.requires_grad_(number not in self.frozen)
            p.grad = None

    @rule()
    def move(self) -> None:
        """Move to the GPU or back, if there is one: weights and gradients, then the state."""
        if not torch.cuda.is_available():
            return
        self.device = torch.device("cuda" if self.device.type == "cpu" else "cpu")
        for optimizer in self.optimizers:
            for p in self.params(optimizer):
                p.data, p.grad = p.data.to(self.device), None
            optimizer.load_state_dict(optimizer.state_dict())
        self.counts["moves"] += 1

    def _to_device(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device of the parameters."""
        return tensor.to(self.device, copy=True)

    # ---------------------------------------------------------------- actions without an effect

    def _disturb(self, action: Any) -> None:
        self.exact, self.disturbed = action(self.exact), action(self.disturbed)

    @rule()
    def save_and_load(self) -> None:
        def restored(optimizer: Shampoo) -> Shampoo:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            groups = [{"params": list(group["params"])} for group in optimizer.param_groups]
            twin = self._make(groups, optimizer.config.bits)  # type: ignore[arg-type]
            twin.load_state_dict(torch.load(file, weights_only=True))
            return twin

        self._disturb(restored)
        self.counts["loads"] += 1

    @rule(pickled=st.booleans())
    def copy(self, pickled: bool) -> None:
        self._disturb(
            lambda optimizer: (
                pickle.loads(pickle.dumps(optimizer)) if pickled else copy.deepcopy(optimizer)
            )
        )
        self.counts["copies"] += 1

    @rule(seed=numbers, nth=st.integers(1, 150))
    def fail_and_repeat(self, seed: int, nth: int) -> None:
        """Run out of memory in a step, recompute gradients and repeat the step."""
        generator = torch.Generator().manual_seed(seed)
        grads = [torch.randn(f.p.shape, generator=generator) for f in self.followers]

        def set_grads(optimizer: Shampoo) -> None:
            for number, (p, grad) in enumerate(zip(self.params(optimizer), grads, strict=True)):
                p.grad = None if number in self.frozen else self._to_device(grad)

        for optimizer in self.optimizers:
            set_grads(optimizer)
            if optimizer is not self.undisturbed:
                # Fail at the latest before the base's step, which cannot be repeated.
                handle = optimizer.base.register_step_pre_hook(_run_out_of_memory)
                with pytest.raises(torch.OutOfMemoryError), NthOperation(nth):
                    optimizer.step()
                handle.remove()
                set_grads(optimizer)
            optimizer.step()
        for number, (follower, grad) in enumerate(zip(self.followers, grads, strict=True)):
            if number not in self.frozen:
                follower.step(grad)
        self.counts["failures"] += 1
        self.counts["steps"] += 1
        self.compare()

    @rule()
    def inspect(self) -> None:
        for optimizer in (self.exact, self.disturbed):
            optimizer.summary()
            optimizer.diagnostics()
            optimizer.memory()
            optimizer.state_dict()

    @rule()
    def replace_tensors(self) -> None:
        for optimizer in (self.exact, self.disturbed):
            for p in self.params(optimizer):
                p.data = p.data.clone()

    # ------------------------------------------------------------------------------ comparison

    def compare(self) -> None:
        for p, follower in zip(self.params(self.exact), self.followers, strict=True):
            actual = p.detach().cpu().double() - follower.start
            expected = follower.p - follower.start
            assert relative_error(actual, expected.detach()) < 1e-3 or expected.abs().max() < 1e-9
            assert self.exact.state.get(p, {}).get("step", 0) == follower.oracle.t
        pairs = zip(self.params(self.disturbed), self.params(self.undisturbed), strict=True)
        for (p, q), follower in zip(pairs, self.followers, strict=True):
            assert torch.equal(p, q)
            assert torch.isfinite(p).all()
            if follower.oracle.t:  # before the first gradient, state may be allocated or not
                assert same_state(self.disturbed.state[p], self.undisturbed.state[q])


def run(steps: int) -> Counter[str]:
    """Run machines until they have taken ``steps`` steps and return the counts of actions."""
    Machine.counts.clear()
    settings = hypothesis.settings(
        max_examples=5,
        stateful_step_count=60,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    for number in itertools.count():
        run_state_machine_as_test(hypothesis.seed(number)(Machine), settings=settings)
        if Machine.counts["steps"] >= steps:
            break
    return Counter(Machine.counts)


def test_any_order_of_actions() -> None:
    counts = run(2000)
    assert min(counts["loads"], counts["copies"], counts["failures"]) > 3


@pytest.mark.gpu
def test_any_order_of_actions_on_two_devices() -> None:
    assert run(2000)["moves"] > 3


@slow
def test_any_order_of_actions_at_length() -> None:
    run(50_000)


@pytest.mark.parametrize("lost", ["momentum", "step"])
def test_the_machine_detects_lost_state(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine fails if loading loses momentum or miscounts steps."""
    load = Shampoo.load_state_dict

    def lossy(self: Shampoo, state_dict: dict[str, Any]) -> None:
        load(self, state_dict)
        for p, entry in self.state.items():
            if lost == "step":
                entry["step"] += 1
            elif p in self.base.state and "momentum_buffer" in self.base.state[p]:
                self.base.state[p]["momentum_buffer"] = None

    monkeypatch.setattr(Shampoo, "load_state_dict", lossy)
    machine = Machine()
    Machine.begin(machine, seed=1)  # type: ignore[call-arg]
    machine.step(seed=2, missing=set(), count=3)
    machine.save_and_load()
    with pytest.raises(AssertionError):
        machine.step(seed=3, missing=set(), count=3)
