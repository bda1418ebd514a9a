"""Steps that are interrupted by an out-of-memory error or by Ctrl-C, and then repeated."""

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
from support.networks import assert_same_state, tensors, weights
from support.numerics import slow
from torch import Tensor, nn

from kronbit import CASPR, KFAC, AdaBK, Shampoo
from kronbit.step.failures import Progress
from kronbit.step.preconditioner import Preconditioner
from kronbit.step.state_plan import StatePlan

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {"method": "eigen", "storage": "paper"},
    "naive": {"method": "naive", "storage": "paper"},
    "32 bits": {"bits": 32},
    "newton": {"method": "eigen", "root": "schur_newton"},
}


def start(
    configuration: str, make: Any = Shampoo, steps: int = 3, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network and an optimizer whose next step updates and refreshes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 24), nn.Tanh())
    model.append(nn.Linear(24, 70, bias=False))
    defaults: dict[str, Any] = {"max_order": 48, "min_quantized_numel": 0}
    defaults |= {"update_every": 2, "refresh_every": 4}
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    defaults |= {"model": model} if make in (KFAC, AdaBK) else {}
    optimizer = make(base, **{**defaults, **CONFIGURATIONS[configuration], **options})
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


def note_of(error: BaseException) -> str:
    return "".join(getattr(error, "__notes__", ()))


def assert_consistent(state: Any, before: Any, after: Any) -> None:
    """Check that every statistic and every root is either the old one or the new one."""
    assert any(key.startswith("block") for entry in before.values() for key in entry)
    for index, entry in state.items():
        assert entry.keys() == before[index].keys()
        for key in [key for key in entry if key.startswith("block")]:
            for side, leaves in entry[key].items():
                for root in (False, True):
                    names = [name for name in leaves if name.startswith("root") == root]
                    matches = [
                        all(torch.equal(leaves[n], other[index][key][side][n]) for n in names)
                        for other in (before, after)
                    ]
                    assert any(matches), (index, key, side, root)


def sampled(total: int, count: int) -> list[int]:
    return sorted(random.Random(0).sample(range(1, total + 1), min(total, count)))


Interruption: TypeAlias = tuple[Callable[[Any], Any], type[BaseException]]


def interruptions(
    count: int, configuration: str, make: Any, **options: Any
) -> Iterator[Interruption]:
    """Yield functions that interrupt an optimizer's step, each with the error that it raises."""
    _, optimizer = start(configuration, make, **options)
    with NthOperation() as operations:
        optimizer.step()
    for nth in sampled(operations.count, count):

        def run_out_of_memory(optimizer: Any, nth: int = nth) -> None:
            with NthOperation(nth, lasting=nth % 2 == 0):
                optimizer.step()

        yield run_out_of_memory, torch.OutOfMemoryError
    _, optimizer = start(configuration, make, **options)
    with interrupted_at(0) as lines:
        optimizer.step()
    for nth in sampled(lines[0], count):

        def interrupt(optimizer: Any, nth: int = nth) -> None:
            with interrupted_at(nth):
                optimizer.step()

        yield interrupt, KeyboardInterrupt


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=slow)])
@pytest.mark.parametrize(
    ("configuration", "make"),
    [*((configuration, Shampoo) for configuration in CONFIGURATIONS), ("default", CASPR)],
)
def test_an_interrupted_step_can_be_repeated(configuration: str, make: Any, count: int) -> None:
    """State stays consistent, and the repeated step gives the uninterrupted result.

    kronbit cannot undo a partial step of F. If F has begun, weights must only stay finite.
    """
    options = {"keep_gradients": True}
    _, reference = start(configuration, make, **options)
    before = copy.deepcopy(reference.state_dict()["state"])
    reference.step()
    after = reference.state_dict()["state"]
    repeated = 0
    for interrupt, error in interruptions(count, configuration, make, **options):
        model, optimizer = start(configuration, make, **options)
        old_grads, old = grads(model), weights(model)
        with pytest.raises(error) as caught:
            interrupt(optimizer)
        assert all(map(torch.equal, grads(model), old_grads))
        assert_consistent(optimizer.state_dict()["state"], before, after)
        base_began = "had begun" in note_of(caught.value) or not all(
            map(torch.equal, weights(model), old)
        )
        optimizer.step()
        assert all(torch.isfinite(p).all() for p in model.parameters())
        if not base_began:
            repeated += 1
            assert_same_state(optimizer.state_dict()["state"], after)
            assert optimizer.state_dict()["state"][0]["step"] == 4
    assert repeated > count


@pytest.mark.parametrize("keep", [False, True])
def test_the_note_says_whether_the_step_counts(keep: bool) -> None:
    """After Ctrl-C at any line from F on, the note is right and the run continues correctly."""
    for _ in range(2):  # the first run also does work that a process does only once
        model, reference = start("default", keep_gradients=keep)
        with interrupted_at(0) as lines:
            reference.step()
    third = copy.deepcopy(weights(model))
    backward(model, 4)
    reference.step()
    fourth = weights(model)
    outcomes = set()
    for nth in itertools.count(lines[0] - 110):
        model, optimizer = start("default", keep_gradients=keep)
        old_grads, old = grads(model), weights(model)
        try:
            with interrupted_at(nth):
                optimizer.step()
            break  # nth is beyond the last line
        except KeyboardInterrupt as error:
            note = note_of(error)
        complete = "The step is complete and counts: do not take it again" in note
        assert optimizer.state_dict()["state"][0]["step"] == 3 + complete
        outcomes.add((complete, "had begun" in note))
        if complete:
            assert all(map(torch.equal, weights(model), third))
            assert not keep or all(map(torch.equal, grads(model), old_grads))
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
    assert outcomes == {(True, False), (False, False), (False, True)}


@pytest.mark.parametrize("keep", [False, True])
def test_the_step_count_is_right_if_context_managers_are_interrupted(keep: bool) -> None:
    """Ctrl-C arrives in contextlib, outside of kronbit's code.

    The test reads the state while the error is handled. The step must not change it afterwards.
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
            assert_consistent(
                optimizer.state_dict()["state"], before, reference.state_dict()["state"]
            )
            state = copy.deepcopy(optimizer.state_dict()["state"])
        assert_same_state(optimizer.state_dict()["state"], state)
    assert counts == {3, 4}


def test_kept_gradients_are_restored_if_the_base_replaces_them() -> None:
    model, optimizer = start("default", keep_gradients=True)
    wrapper: Any = optimizer

    def replace(*_: Any) -> None:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)

    wrapper.base.register_step_pre_hook(replace)
    before = grads(model)
    optimizer.step()
    assert all(map(torch.equal, grads(model), before))


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_rows_are_written_completely_or_not_at_all(configuration: str) -> None:
    """The tensors of a row are written in sequence. An error leaves no partial row."""
    _, reference = start(configuration)
    before = copy.deepcopy(reference.state_dict()["state"])
    with NthOperation(name="where.self_out") as writes:
        reference.step()
    after = reference.state_dict()["state"]
    assert writes.count > 8
    for nth in range(1, writes.count + 1, 3):
        _, optimizer = start(configuration)
        with NthOperation(nth, "where.self_out"), pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        assert_consistent(optimizer.state_dict()["state"], before, after)
        optimizer.step()
        assert_same_state(optimizer.state_dict()["state"], after)


@pytest.mark.parametrize("make", [KFAC, AdaBK])
def test_an_interrupted_step_on_statistics_of_layers_can_be_repeated(make: Any) -> None:
    """Inputs and output gradients of the layers are kept for the repeated step."""
    options = {"keep_gradients": True}
    _, reference = start("default", make, **options)
    reference.step()
    repeated = 0
    for interrupt, error in interruptions(6, "default", make, **options):
        model, optimizer = start("default", make, **options)
        old = weights(model)
        with pytest.raises(error) as caught:
            interrupt(optimizer)
        if "had begun" not in note_of(caught.value) and all(map(torch.equal, weights(model), old)):
            repeated += 1
            optimizer.step()
            assert_same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])
    assert repeated > 6


@pytest.mark.parametrize("where", ["update", "refresh", "precondition"])
def test_the_note_names_a_remedy(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for keep in (False, True):
        model, optimizer = start("default", keep_gradients=keep)
        old_grads, old = grads(model), weights(model)

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
        assert ("gradients are unchanged" in note) == intact
        assert ("compute them again" in note) == (not intact)
        assert "step() can be called again" in note
        if intact:
            assert all(map(torch.equal, grads(model), old_grads))


def test_a_step_repeated_with_recomputed_gradients_gives_the_same_result() -> None:
    _, reference = start("default")
    reference.step()
    model, optimizer = start("default")
    with NthOperation() as operations:
        optimizer.step()
    notes = []
    for back in range(1, operations.count, 2):  # from the end: first in F, then before it
        model, optimizer = start("default")
        old = weights(model)
        with NthOperation(operations.count - back), pytest.raises(torch.OutOfMemoryError) as caught:
            optimizer.step()
        note = note_of(caught.value)
        if "had begun" in note or "is complete" in note:
            continue
        notes.append(note)
        assert "compute them again" in notes[-1]
        assert all(map(torch.equal, weights(model), old))
        backward(model, 3)
        optimizer.step()
        assert_same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])
        if len(notes) == 4:
            break
    assert len(notes) == 4


def test_a_step_can_be_repeated_after_two_failures() -> None:
    """Each statistic is updated once per step, with the gradient of its first complete update."""
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
    # Later steps repeat no earlier step and update all statistics.
    for t in range(4, 8):
        for network, stepping in ((model, optimizer), (twin, reference)):
            backward(network, t)
            stepping.step()
    assert_same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])


def test_failing_closures_and_hooks_change_nothing() -> None:
    model, optimizer = start("default", steps=5)
    old_grads, old = grads(model), weights(model)
    state = copy.deepcopy(optimizer.state_dict()["state"])

    def fail(*_: Any) -> Any:
        raise RuntimeError("error in user code")

    with pytest.raises(RuntimeError, match="error in user code"):
        optimizer.step(fail)
    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="error in user code"):
        optimizer.step()
    handle.remove()
    assert all(map(torch.equal, [*weights(model), *grads(model)], [*old, *old_grads]))
    assert_same_state(optimizer.state_dict()["state"], state)
    # If a post hook fails, the step is complete.
    twin, reference = start("default", steps=5)
    reference.step()
    optimizer.register_step_post_hook(fail)
    with pytest.raises(RuntimeError, match="error in user code"):
        optimizer.step()
    assert all(map(torch.equal, weights(model), weights(twin)))
    assert_same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])


def test_interrupted_planning_is_repeated() -> None:
    """The first step makes a plan, and so does a step after tensors were replaced from outside."""
    for steps in (0, 3):
        _, reference = start("default", steps=steps)
        reference.step()
        repeated = 0
        optimizer = _replaced(start("default", steps=steps)[1])
        with interrupted_at(0) as lines:
            optimizer.step()
        for nth in sampled(lines[0] // 2, 12):
            optimizer = _replaced(start("default", steps=steps)[1])
            with interrupted_at(nth), pytest.raises(KeyboardInterrupt) as caught:
                optimizer.step()
            notes = getattr(caught.value, "__notes__", ["gradients are unchanged"])
            if "gradients are unchanged" in notes[0]:
                repeated += 1
                optimizer.step()
                assert_same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])
        assert repeated > 4


def test_an_incomplete_plan_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After tensors were replaced, planning fails between its last two steps."""
    _, reference = start("default")
    reference.step()
    _, optimizer = start("default")
    _replaced(optimizer)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(StatePlan, "derive_product_bits", fail)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    optimizer.step()
    assert_same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])


def test_a_complete_step_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives while a complete step resets its progress. The next step does all its work."""
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
        for network, stepping in ((model, optimizer), (twin, reference)):
            backward(network, t)
            stepping.step()
    assert_same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])


def _replaced(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Replace every tensor of the state by a copy, as offloading does."""
    for entry in optimizer.state.values():
        for key in [key for key in entry if key.startswith("block")]:
            entry[key] = copy.deepcopy(entry[key])
    return optimizer


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [True, False])
def test_a_step_can_be_repeated_after_memory_runs_out_on_a_gpu(keep: bool) -> None:
    """All free memory is allocated before a step that needs a workspace."""

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
    allocated: list[Tensor] = []
    for size in (2**30, 2**26, 2**22, 2**20):
        while True:
            try:
                allocated.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                break
    with pytest.raises(torch.OutOfMemoryError) as caught:
        optimizer.step()
    assert "no weight has changed" in caught.value.__notes__[0]
    allocated.clear()
    torch.cuda.empty_cache()
    if not keep:
        backward(model, 3)
    optimizer.step()
    assert all(map(torch.equal, weights(model), expected))
    assert tensors(optimizer.state_dict()["state"]).keys() == tensors(state).keys()
    assert_same_state(optimizer.state_dict()["state"], state)
