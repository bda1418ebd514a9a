"""A step that ends in the middle, by want of memory or by Ctrl-C, and is then taken again."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
from support.faults import NthOperation, interrupted_at
from support.networks import assert_same_state, tensors
from support.numerics import slow
from torch import Tensor, nn

from kronbit import CASPR, KFAC, AdaBK, Shampoo
from kronbit.step.failures import Progress
from kronbit.step.preconditioner import Preconditioner
from kronbit.step.state_plan import StatePlan

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {"method": "eigen", "storage": "paper"},
    "naive": {"method": "naive", "storage": "paper"},
    "32 bits": {"bits": 32},
    "newton": {"method": "eigen", "root": "schur_newton"},
}


def start(
    way: str, make: Any = Shampoo, steps: int = 3, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network one gradient before a step that updates and refreshes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 24), nn.Tanh())
    model.append(nn.Linear(24, 70, bias=False))
    own: dict[str, Any] = {"max_order": 48, "min_quantized_numel": 0}
    own |= {"update_every": 2, "refresh_every": 4}
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own |= {"model": model} if make in (KFAC, AdaBK) else {}
    optimizer = make(base, **{**own, **WAYS[way], **options})
    for t in range(steps):
        backward(model, t)
        optimizer.step()
    backward(model, steps)
    return model, optimizer


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = next(model.parameters())
    model.zero_grad()
    model(torch.randn(16, 40, generator=generator).to(p.device)).square().mean().backward()


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def note_of(error: BaseException) -> str:
    return "".join(getattr(error, "__notes__", ()))


def assert_whole(state: Any, before: Any, after: Any) -> None:
    """Every statistic, and every root, is the old one or the new one: no mixture of both."""
    for index, entry in state.items():
        for key in [key for key in entry if key.startswith("block")]:
            for side, leaves in entry[key].items():
                for root in (False, True):
                    names = [name for name in leaves if name.startswith("root") == root]
                    found = [
                        all(torch.equal(leaves[n], then[index][key][side][n]) for n in names)
                        for then in (before, after)
                    ]
                    assert any(found), (index, key, side, root)


def sampled(total: int, count: int) -> list[int]:
    return sorted(random.Random(0).sample(range(1, total + 1), min(total, count)))


Interruption: TypeAlias = tuple[Callable[[Any], Any], type[BaseException]]


def interruptions(count: int, way: str, make: Any, **options: Any) -> Iterator[Interruption]:
    """Ways to interrupt the step: each takes the optimizer, and comes with what it raises."""
    _, optimizer = start(way, make, **options)
    with NthOperation() as operations:
        optimizer.step()
    for nth in sampled(operations.count, count):

        def starve(optimizer: Any, nth: int = nth) -> None:
            with NthOperation(nth, lasting=nth % 2 == 0):
                optimizer.step()

        yield starve, torch.OutOfMemoryError
    _, optimizer = start(way, make, **options)
    with interrupted_at(0) as lines:
        optimizer.step()
    for nth in sampled(lines[0], count):

        def interrupt(optimizer: Any, nth: int = nth) -> None:
            with interrupted_at(nth):
                optimizer.step()

        yield interrupt, KeyboardInterrupt


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=slow)])
@pytest.mark.parametrize(("way", "make"), [*((way, Shampoo) for way in WAYS), ("default", CASPR)])
def test_a_step_can_be_taken_again(way: str, make: Any, count: int) -> None:
    """Wherever it ended, nothing is torn; and if F had not begun, the second try is as the first.

    What F does not do to its end cannot be undone by us: then nothing but finite weights is asked.
    """
    options = {"keep_gradients": True}
    _, reference = start(way, make, **options)
    before = copy.deepcopy(reference.state_dict()["state"])
    reference.step()
    after = reference.state_dict()["state"]
    through = 0
    for interrupt, error in interruptions(count, way, make, **options):
        model, optimizer = start(way, make, **options)
        own, old = grads(model), weights(model)
        with pytest.raises(error) as caught:
            interrupt(optimizer)
        assert all(map(torch.equal, grads(model), own))
        assert_whole(optimizer.state_dict()["state"], before, after)
        base_began = "had begun" in note_of(caught.value) or not all(
            map(torch.equal, weights(model), old)
        )
        optimizer.step()
        assert all(torch.isfinite(p).all() for p in model.parameters())
        if not base_began:
            through += 1
            assert_same_state(optimizer.state_dict()["state"], after)
            assert optimizer.state_dict()["state"][0]["step"] == 4
    assert through > count


@pytest.mark.parametrize("keep", [False, True])
def test_a_step_counts_or_it_does_not(keep: bool) -> None:
    """Ctrl-C at every line from F on: the note says which it is, and either way a run goes on."""
    for _ in range(2):  # the first one also does what is done once in a process
        model, reference = start("default", keep_gradients=keep)
        with interrupted_at(0) as lines:
            reference.step()
    third = copy.deepcopy(weights(model))
    backward(model, 4)
    reference.step()
    fourth = weights(model)
    found = set()
    for nth in itertools.count(lines[0] - 90):
        model, optimizer = start("default", keep_gradients=keep)
        own, old = grads(model), weights(model)
        try:
            with interrupted_at(nth):
                optimizer.step()
            break  # that was one line too far
        except KeyboardInterrupt as error:
            note = note_of(error)
        through = "The step is through, and counts: do not take it again" in note
        assert optimizer.state_dict()["state"][0]["step"] == 3 + through
        found.add((through, "had begun" in note))
        if through:
            assert all(map(torch.equal, weights(model), third))
            assert not keep or all(map(torch.equal, grads(model), own))
        elif "had begun" not in note:
            assert "no weight has changed" in note
            assert all(map(torch.equal, weights(model), old))
            backward(model, 3)
            optimizer.step()
        else:
            continue
        backward(model, 4)
        optimizer.step()
        assert all(map(torch.equal, weights(model), fourth))
    assert found == {(True, False), (False, False), (False, True)}


@pytest.mark.parametrize("keep", [False, True])
def test_a_step_is_counted_right_while_python_ends_it(keep: bool) -> None:
    """Ctrl-C in Python's own code around ``with``, where no line of ours can answer it.

    Looked at while the error is still being handled: nothing of the step may come after that.
    """
    model, reference = start("default", keep_gradients=keep)
    with interrupted_at(0, contextlib.__file__) as lines:
        reference.step()
    third = weights(model)
    counts = set()
    for nth in [*range(1, lines[0], 17), *range(max(1, lines[0] - 40), lines[0] + 1)]:
        model, optimizer = start("default", keep_gradients=keep)
        before = copy.deepcopy(optimizer.state_dict()["state"])
        try:
            with interrupted_at(nth, contextlib.__file__):
                optimizer.step()
            continue
        except KeyboardInterrupt:
            step = optimizer.state_dict()["state"][0]["step"]
            counts.add(step)
            assert (step == 4) == all(map(torch.equal, weights(model), third))
            assert_whole(optimizer.state_dict()["state"], before, reference.state_dict()["state"])
            found = copy.deepcopy(optimizer.state_dict()["state"])
        assert_same_state(optimizer.state_dict()["state"], found)
    assert counts == {3, 4}


def test_kept_gradients_come_back_whatever_the_base_does_to_them() -> None:
    model, optimizer = start("default", keep_gradients=True)
    own: Any = optimizer

    def replace(*_: Any) -> None:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)

    own.base.register_step_pre_hook(replace)
    before = grads(model)
    optimizer.step()
    assert all(map(torch.equal, grads(model), before))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_being_written_is_written(way: str) -> None:
    """Codes, scales and the rest of a row are written one after the other: all, or none of them."""
    _, reference = start(way)
    before = copy.deepcopy(reference.state_dict()["state"])
    with NthOperation(name="where.self_out") as written:
        reference.step()
    after = reference.state_dict()["state"]
    assert written.count > 8
    for nth in range(1, written.count + 1, 3):
        _, optimizer = start(way)
        with NthOperation(nth, "where.self_out"), pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        assert_whole(optimizer.state_dict()["state"], before, after)
        optimizer.step()
        assert_same_state(optimizer.state_dict()["state"], after)


@pytest.mark.parametrize("make", [KFAC, AdaBK])
def test_statistics_of_layers_are_taken_again(make: Any) -> None:
    """The layers' inputs and output gradients are still there for the second try."""
    options = {"keep_gradients": True}
    _, reference = start("default", make, **options)
    reference.step()
    through = 0
    for interrupt, error in interruptions(6, "default", make, **options):
        model, optimizer = start("default", make, **options)
        old = weights(model)
        with pytest.raises(error) as caught:
            interrupt(optimizer)
        if "had begun" not in note_of(caught.value) and all(map(torch.equal, weights(model), old)):
            through += 1
            optimizer.step()
            assert_same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])
    assert through > 6


@pytest.mark.parametrize("where", ["update", "refresh", "precondition"])
def test_the_error_says_what_to_do(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for keep in (False, True):
        model, optimizer = start("default", keep_gradients=keep)
        own, old = grads(model), weights(model)

        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(Preconditioner, where, fail)
            with pytest.raises(torch.OutOfMemoryError, match="out of memory") as caught:
                optimizer.step()
        (note,) = caught.value.__notes__
        assert "no weight has changed" in note
        assert all(map(torch.equal, weights(model), old))
        intact = keep or where != "precondition"
        assert ("gradients are as they were" in note) == intact
        assert ("compute them anew" in note) == (not intact)
        assert "step() can be called again" in note
        if intact:
            assert all(map(torch.equal, grads(model), own))


def test_gradients_that_are_computed_anew_give_the_same_step() -> None:
    _, reference = start("default")
    reference.step()
    model, optimizer = start("default")
    with NthOperation() as operations:
        optimizer.step()
    found = []
    for back in range(1, operations.count, 2):  # from the end: F, then the gradients
        model, optimizer = start("default")
        old = weights(model)
        with NthOperation(operations.count - back), pytest.raises(torch.OutOfMemoryError) as caught:
            optimizer.step()
        note = note_of(caught.value)
        if "had begun" in note or "is through" in note:
            continue
        found.append(note)
        assert "compute them anew" in found[-1]
        assert all(map(torch.equal, weights(model), old))
        backward(model, 3)
        optimizer.step()
        assert_same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])
        if len(found) == 4:
            break
    assert len(found) == 4


def test_two_failures_in_a_row_and_other_gradients() -> None:
    """Each statistic is updated once per step, by whichever gradient was there when it was."""
    model, optimizer = start("default")
    with NthOperation() as operations:
        optimizer.step()
    model, optimizer = start("default")
    for nth in (operations.count // 3, operations.count // 2):
        with NthOperation(nth), pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        backward(model, 3)
    optimizer.step()
    twin, reference = start("default")
    reference.step()
    assert_same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])
    # And the steps after that are nobody's second try: they update all of them.
    for t in range(4, 8):
        for own_model, own in ((model, optimizer), (twin, reference)):
            backward(own_model, t)
            own.step()
    assert_same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])


def test_closures_and_hooks_that_fail_leave_everything() -> None:
    model, optimizer = start("default", steps=5)
    own, old = grads(model), weights(model)
    state = copy.deepcopy(optimizer.state_dict()["state"])

    def fail(*_: Any) -> Any:
        raise RuntimeError("of the user's own")

    with pytest.raises(RuntimeError, match="of the user's own"):
        optimizer.step(fail)
    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="of the user's own"):
        optimizer.step()
    handle.remove()
    assert all(map(torch.equal, [*weights(model), *grads(model)], [*old, *own]))
    assert_same_state(optimizer.state_dict()["state"], state)
    # Of a hook that comes afterwards, the step is whole.
    twin, reference = start("default", steps=5)
    reference.step()
    optimizer.register_step_post_hook(fail)
    with pytest.raises(RuntimeError, match="of the user's own"):
        optimizer.step()
    assert all(map(torch.equal, weights(model), weights(twin)))
    assert_same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])


def test_planning_that_fails_is_done_again() -> None:
    """At the first step, and when the state was replaced from outside."""
    for steps in (0, 3):
        _, reference = start("default", steps=steps)
        reference.step()
        through = 0
        optimizer = _replaced(start("default", steps=steps)[1])
        with interrupted_at(0) as lines:
            optimizer.step()
        for nth in sampled(lines[0] // 2, 12):
            optimizer = _replaced(start("default", steps=steps)[1])
            with interrupted_at(nth), pytest.raises(KeyboardInterrupt) as caught:
                optimizer.step()
            notes = getattr(caught.value, "__notes__", ["gradients are as they were"])
            if "gradients are as they were" in notes[0]:
                through += 1
                optimizer.step()
                assert_same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])
        assert through > 4


def test_a_plan_that_is_bound_but_not_known_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """After tensors were replaced, planning ends between its last two steps."""
    _, reference = start("default")
    reference.step()
    _, optimizer = start("default")
    _replaced(optimizer)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(StatePlan, "find_refreshed", fail)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    optimizer.step()
    assert_same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])


def test_a_step_that_is_through_is_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while it is being settled: the next one updates all that is due."""
    twin, reference = start("default")
    model, optimizer = start("default")
    settle = Progress.settle
    calls: list[Progress] = []

    def interrupted(self: Progress) -> None:
        calls.append(self)
        if len(calls) == 1:
            raise KeyboardInterrupt
        settle(self)

    monkeypatch.setattr(Progress, "settle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    reference.step()
    for t in range(4, 7):
        for own_model, own in ((model, optimizer), (twin, reference)):
            backward(own_model, t)
            own.step()
    assert_same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])


def _replaced(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """As after offloading: every tensor of the state is another one."""
    for entry in optimizer.state.values():
        for key in [key for key in entry if key.startswith("block")]:
            entry[key] = copy.deepcopy(entry[key])
    return optimizer


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [True, False])
def test_memory_runs_out_on_a_gpu(keep: bool) -> None:
    """For real: all that is free is taken away before a step that needs a workspace."""

    def make() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 4096), nn.Linear(4096, 4096)).cuda()
        base = torch.optim.SGD(model.parameters(), lr=1e-2)
        optimizer = Shampoo(base, update_every=2, refresh_every=2, keep_gradients=keep)
        for t in range(3):
            backward(model, t)
            optimizer.step()
        backward(model, 3)
        return model, optimizer

    twin, reference = make()
    reference.step()
    expected, state = weights(twin), copy.deepcopy(reference.state_dict()["state"])
    del twin, reference
    model, optimizer = make()
    torch.cuda.empty_cache()
    hoard: list[Tensor] = []
    for size in (2**30, 2**26, 2**22, 2**20):
        while True:
            try:
                hoard.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                break
    with pytest.raises(torch.OutOfMemoryError) as caught:
        optimizer.step()
    assert "no weight has changed" in caught.value.__notes__[0]
    hoard.clear()
    torch.cuda.empty_cache()
    if not keep:
        backward(model, 3)
    optimizer.step()
    assert all(map(torch.equal, weights(model), expected))
    assert tensors(optimizer.state_dict()["state"]).keys() == tensors(state).keys()
    assert_same_state(optimizer.state_dict()["state"], state)
