"""The schedule of updates and refreshes: T1, T2, early refreshes, staggering.

Steps t count from 1. Unless ``stagger`` is set, all blocks of a parameter share one turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from kronbit.blocks.blocking import Blocking, Route
from kronbit.blocks.gradients import StepGradients
from kronbit.blocks.groups import Due, Turn
from kronbit.config import Config

FIRST_TURN: Turn = (0.0, False)
_SHARED_TURN = (FIRST_TURN,)
_EARLIEST_LAST_TURN: Turn = (0.0, True)  # of a parameter in the first phase
AFTER_ALL_TURNS: Turn = (1.0, True)  # later than the last turn of every parameter

# Either ``updates_at`` or ``refreshes_at``.
Event: TypeAlias = Callable[[Config, int, Turn], bool]


def updates_at(config: Config, t: int, turn: Turn = FIRST_TURN) -> bool:
    """True if a statistic with this turn is updated at step t."""
    return _falls_on(config, t, config.update_every, delay(config, turn))


def refreshes_at(config: Config, t: int, turn: Turn = FIRST_TURN) -> bool:
    """True if an inverse root with this turn is refreshed at step t.

    A staggered refresh comes one step after the update, so that no step does both for one turn
    (except for early refreshes).
    """
    return _falls_on(config, t, config.refresh_every, delay(config, turn) + config.stagger)


def _falls_on(config: Config, t: int, every: int, late: int) -> bool:
    if config.first_refresh is not None and t < config.refresh_every:  # k, 2k, 4k, ...
        times, rest = divmod(t, config.first_refresh)
        return rest == 0 and times > 0 and times & (times - 1) == 0
    return t > late and (t - late) % every == 0


def delay(config: Config, turn: Turn) -> int:
    """Return the number of steps by which a turn lags behind the paper's schedule.

    R comes two steps after L: after the update and the refresh of L.
    """
    if not config.stagger:
        return 0
    phase, right = turn
    return int(phase * max(config.update_every, config.refresh_every)) + 2 * right


def first_preconditioned_step(config: Config, last: Turn = _EARLIEST_LAST_TURN) -> int:
    """Return the first step that preconditions: the first refresh at or after an update.

    A parameter waits until all its blocks have been refreshed, up to its last turn.
    """
    if config.first_refresh is not None:
        return config.first_refresh
    first = -(-config.update_every // config.refresh_every) * config.refresh_every
    return first + delay(config, last) + config.stagger


def turns_at(event: Event, config: Config, t: int, turns: Iterable[Turn]) -> frozenset[Turn]:
    """Return the given turns that are due at step t."""
    candidates = turns if config.stagger else _SHARED_TURN
    return frozenset(turn for turn in candidates if event(config, t, turn))


def due_blocks(config: Config, due_turns: Collection[Turn], turns: tuple[Turn, ...]) -> Due | None:
    """Return the blocks of a parameter that are due, or None.

    ``due_turns`` is the result of ``turns_at``; ``turns`` are the turns of the parameter.
    """
    possible = turns if config.stagger else _SHARED_TURN
    due = frozenset(due_turns).intersection(possible)
    return Due(config, None if len(due) == len(possible) else due) if due else None


def next_step(state: Mapping[Tensor, Mapping[str, Any]], p: Tensor) -> int:
    """Return t of a parameter at its next step."""
    return state[p].get("step", 0) + 1 if p in state else 1


def any_due(gradients: StepGradients, state: Mapping[Tensor, Any]) -> bool:
    """True if an update or a refresh of unstaggered parameters falls on this step."""
    # Compare options by identity: hashing them is slow.
    steps = {
        (id(config), next_step(state, p)): config
        for p, config in zip(gradients.params, gradients.configs, strict=True)
    }
    return any(updates_at(config, t) or refreshes_at(config, t) for (_, t), config in steps.items())


def expected_updates(
    groups: Iterable[Mapping[str, Any]],
    config_of: Callable[[Mapping[str, Any]], Config],
    route: Route,
    state: Mapping[Tensor, Mapping[str, Any]],
    turns_of: Callable[[Tensor], tuple[Turn, ...] | None],
) -> Iterator[Tensor]:
    """Yield parameters whose statistics the next step updates, if they have a gradient.

    A staggered parameter with unknown turns is always yielded.
    """
    for group in groups:
        config = config_of(group)
        known: dict[tuple[int, int], bool] = {}  # nearly always one entry, False
        for p in group["params"]:
            turns = turns_of(p) if config.stagger else ()
            key = next_step(state, p), id(turns)
            if key not in known:
                known[key] = turns is None or bool(turns_at(updates_at, config, key[0], turns))
            if known[key] and isinstance(route(p, config), Blocking):
                yield p
