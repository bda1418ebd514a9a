"""With ``stagger``, blocks are updated and refreshed at different steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.networks import assert_same_state
from torch import Tensor, nn

from kronbit import Shampoo
from kronbit.blocks import groups as grouping
from kronbit.blocks.blocking import route
from kronbit.config import Config
from kronbit.step.schedule import delay, first_preconditioned_step, refreshes_at, updates_at

TURNS = [(i / 7, right) for i in range(7) for right in (False, True)]


@pytest.mark.parametrize(("update", "refresh"), [(10, 50), (20, 20), (30, 10)])
def test_every_block_runs_the_papers_schedule_with_a_delay(update: int, refresh: int) -> None:
    config = Config(update_every=update, refresh_every=refresh, stagger=True)
    paper = Config(update_every=update, refresh_every=refresh)
    longest = max(update, refresh)
    delays = [delay(config, turn) for turn in TURNS]
    assert delays[::2] == sorted(set(delays[::2]))
    assert delays[1::2] == [first + 2 for first in delays[::2]]  # L is refreshed before R
    assert delays[0] == 0
    assert delays[-2] < longest
    for turn, lag in zip(TURNS, delays, strict=True):
        for t in range(1, 4 * longest):
            shifted = t - lag
            assert updates_at(config, t, turn) == (shifted > 0 and updates_at(paper, shifted))
            shifted -= 1  # the refresh follows the update
            assert refreshes_at(config, t, turn) == (shifted > 0 and refreshes_at(paper, shifted))
    assert all(delay(paper, turn) == 0 for turn in TURNS)


def test_an_early_first_refresh_is_not_staggered() -> None:
    config = Config(first_refresh=5, update_every=10, refresh_every=40, stagger=True)
    for turn in TURNS:
        early = [t for t in range(1, 40) if refreshes_at(config, t, turn)]
        assert early == [5, 10, 20]
    assert first_preconditioned_step(config, TURNS[-1]) == 5


def test_blocks_of_a_turn_have_similar_orders_unless_there_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouping, "_TURN_SIZE", 4 * 96**2)
    orders = [96] * 5 + [70] * 2 + [40] * 2 + [20, 8]
    config = Config(stagger=True)
    members = [grouping.Member(route((8, n), config), config) for n in orders]
    groups = grouping.make_groups(members, torch.device("cpu"))
    phases = {s.member: s.phase for group in groups for s in group.spans}
    numbers = [round(phases[i] * len(set(phases.values()))) for i in range(len(orders))]
    # Four blocks of order 96 fill a turn. The fifth joins those of order 70, which is close.
    # Orders 20 and 8 are not close to 40, but these blocks are too small for another turn.
    assert numbers == [0] * 4 + [1] * 3 + [2] * 4


@pytest.fixture
def one_block_per_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every block its own turn, although the blocks of these tests are small."""
    monkeypatch.setattr(grouping, "_TURN_SIZE", 1)


SHAPES = [(66, 70), (140, 64), (9,), (20, 30)]


def build(stagger: bool, device: torch.device, **options: Any) -> tuple[list[Tensor], Shampoo]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device=device)) for shape in SHAPES]
    base = torch.optim.SGD(params, lr=0.0)
    every = {"update_every": 4, "refresh_every": 8, **options}
    return params, Shampoo(base, max_order=70, stagger=stagger, **every)


def feed(params: list[Tensor], t: int, only: set[int] | None = None) -> None:
    for i, p in enumerate(params):
        generator = torch.Generator().manual_seed(100 * t + i)
        grad = torch.randn(p.shape, generator=generator).to(p.device)
        p.grad = grad if only is None or i in only else None


@pytest.mark.usefixtures("one_block_per_turn")
def test_statistics_match_a_run_that_starts_later() -> None:
    """A block with delay d has the state that an unstaggered block had d steps earlier.

    The states are bitwise equal on the CPU. On a GPU, sums may round differently in another batch.
    """
    device = torch.device("cpu")
    params, optimizer = build(True, device)
    steps = 27
    for t in range(steps):
        feed(params, t)
        optimizer.step()
    (preconditioner,) = optimizer._keeper.plan.preconditioners.values()
    config = optimizer.config
    delays = set()
    for i, number in ((0, 0), (1, 1), (3, 2)):
        for turn in preconditioner.turns[number]:
            lag = delay(config, turn)
            delays.add(lag)
            alone, reference = build(False, device)
            for t in range(lag, steps):
                feed(alone, t, only={i})
                reference.step()
            keys = {
                f"block_{block.index}"
                for group in preconditioner.stacks.groups
                for span in group.spans
                if span.member == number and span.phase == turn[0]
                for block in span.blocks()
            }
            assert keys
            side = "right" if turn[1] else "left"
            for key in keys:
                staggered, plain = optimizer.state[params[i]][key], reference.state[alone[i]][key]
                assert_same_state({0: staggered[side]}, {0: plain[side]})
    assert delays == {0, 2, 4, 6, 8}


@pytest.mark.usefixtures("one_block_per_turn")
def test_a_parameter_waits_until_all_its_blocks_have_been_refreshed(device: torch.device) -> None:
    params, optimizer = build(True, device)
    changed: dict[int, int] = {}
    for t in range(1, 18):
        feed(params, t)
        before = [p.grad.clone() for p in params]
        optimizer.step()
        for i, p in enumerate(params):
            if not torch.equal(p.grad, before[i]):
                changed.setdefault(i, t)
    (preconditioner,) = optimizer._keeper.plan.preconditioners.values()
    expected = {
        i: first_preconditioned_step(optimizer.config, preconditioner.turns[number][-1])
        for i, number in ((0, 0), (1, 1), (3, 2))
    }
    assert changed == expected
    assert len(preconditioner.turns[1]) == 4


@pytest.mark.usefixtures("one_block_per_turn")
@pytest.mark.parametrize("steps", [12, 24])
def test_loading_warns_of_missing_roots_only_after_the_last_turn(
    steps: int, recwarn: pytest.WarningsRecorder
) -> None:
    """After 12 steps, some blocks wait for their first refresh. After 24 steps, all have a root."""
    params, optimizer = build(True, torch.device("cpu"))
    for t in range(steps):
        feed(params, t)
        optimizer.step()
    state_dict = optimizer.state_dict()
    matrices = [entry for entry in state_dict["state"].values() if "product_bits" in entry]
    assert any(entry["product_bits"] == 0 for entry in matrices) == (steps == 12)
    recwarn.clear()
    build(True, torch.device("cpu"))[1].load_state_dict(copy.deepcopy(state_dict))
    assert not [str(w.message) for w in recwarn if "roots" in str(w.message)]
    for entry in matrices:
        entry["product_bits"] = 0
    build(True, torch.device("cpu"))[1].load_state_dict(state_dict)
    assert any("roots" in str(w.message) for w in recwarn) == (steps == 24)


@pytest.mark.usefixtures("one_block_per_turn")
@pytest.mark.parametrize("when", [5, 9, 11, 15])
def test_resuming_is_exact_within_an_interval(when: int, device: torch.device) -> None:
    params, optimizer = build(True, device)
    for t in range(22):
        if t == when:
            saved = copy.deepcopy(optimizer.state_dict())
            twins, resumed = build(True, device)
            with torch.no_grad():
                for p, q in zip(params, twins, strict=True):
                    q.copy_(p)
            resumed.load_state_dict(saved)
        feed(params, t)
        optimizer.step()
        if t >= when:
            feed(twins, t)
            resumed.step()
            for p, q in zip(params, twins, strict=True):
                assert torch.equal(p.grad, q.grad), t
    assert_same_state(optimizer.state_dict()["state"], resumed.state_dict()["state"])


@pytest.mark.usefixtures("one_block_per_turn")
def test_parameters_without_product_bits_are_not_preconditioned_too_early() -> None:
    """A checkpoint without ``product_bits`` is saved between the first refreshes of L̂ and R̂."""
    device = torch.device("cpu")
    params, optimizer = build(True, device)
    for t in range(10):  # L̂ at the ninth step, R̂ at the eleventh
        feed(params, t)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        entry.pop("product_bits", None)
    twins, resumed = build(True, device)
    resumed.load_state_dict(saved)
    refreshed = []
    for stepping, weights in ((optimizer, params), (resumed, twins)):
        (preconditioner,) = stepping._keeper.plan.preconditioners.values()
        before = set(preconditioner.stacks.refreshed)
        feed(weights, 10)
        stepping.step()
        refreshed.append((before, preconditioner.stacks.refreshed))
    assert refreshed[0] == refreshed[1]
    assert not refreshed[0][0]
    assert refreshed[0][1]


@pytest.mark.usefixtures("one_block_per_turn")
def test_each_step_updates_or_refreshes_at_most_one_turn() -> None:
    """In one interval, each side is updated and refreshed once, at different steps."""
    params, optimizer = build(True, torch.device("cpu"), update_every=16, refresh_every=16)
    feed(params, 0)
    optimizer.step()
    (preconditioner,) = optimizer._keeper.plan.preconditioners.values()
    delays = [
        delay(optimizer.config, (span.phase, right)) + refresh
        for group in preconditioner.stacks.groups
        for span in group.spans
        for right in (False, True)
        for refresh in (0, 1)
    ]
    assert sorted(delays) == list(range(16))
