"""Options: their checks, their defaults, and the schedule that they define."""

from __future__ import annotations

from typing import Any

import pytest

from kronbit.config import (
    FORMAT_OPTIONS,
    GLOBAL_OPTIONS,
    GROUP_OPTIONS,
    OPTIONS,
    STRUCTURAL_OPTIONS,
    Config,
    take_options,
)
from kronbit.step.schedule import first_preconditioned_step, refreshes_at, updates_at

BAD: list[tuple[dict[str, Any], str]] = [
    ({"bits": 5}, "bits must be one of 3, 4, 6, 8, 32; got 5"),
    ({"bits": "4"}, "bits must be one of .*; got '4'"),
    ({"bits": 4.0}, "bits must be one of .*; got 4.0"),
    ({"root_bits": 16}, "root_bits must be one of .*; got 16"),
    ({"method": "svd"}, "method must be one of 'dense', 'eigen', 'naive', 'cholesky'; got 'svd'"),
    ({"trace_scaling": 1}, "trace_scaling must be one of True, False; got 1"),
    ({"offload_statistics": "cpu"}, "offload_statistics must be one of True, False; got 'cpu'"),
    ({"mapping": "nf4"}, "mapping must be one of .*; got 'nf4'"),
    ({"block_size": 65}, "block_size must be a multiple of 16 .*; got 65"),
    ({"block_size": "64"}, "block_size must be a multiple of 16 from 16 to 2048; got '64'"),
    ({"min_quantized_numel": -1}, "min_quantized_numel must be an integer >= 0; got -1"),
    ({"exponent": -0.3}, r"exponent must be one of \(-0.25, -0.5, -1.0\); got -0.3"),
    ({"storage": "tight"}, "storage must be one of 'paper', 'compact'; got 'tight'"),
    (
        {"storage": "compact", "block_size": 128},
        "storage='compact' needs block_size=64, the side of its tiles; got 128",
    ),
    ({"beta": 1.5}, r"beta must be a number in \[0, 1\]; got 1.5"),
    ({"beta": float("nan")}, "beta must be a number .*; got nan"),
    ({"beta": "0.9"}, "beta must be a number .*; got '0.9'"),
    ({"damping": -1e-6}, "damping must be a finite number >= 0; got -1e-06"),
    ({"damping": float("inf")}, "damping must be a finite number >= 0; got inf"),
    ({"start": -1.0}, "start must be a finite number >= 0; got -1.0"),
    ({"update_every": 0}, "update_every must be an integer >= 1; got 0"),
    ({"update_every": True}, "update_every must be an integer >= 1; got True"),
    ({"refresh_every": 2.5}, "refresh_every must be an integer >= 1; got 2.5"),
    ({"refresh_every": -500}, "refresh_every must be an integer >= 1; got -500"),
    ({"first_refresh": 0}, "first_refresh must be an integer >= 1; got 0"),
    ({"first_refresh": 500}, "first_refresh must be below refresh_every=500 .*; got 500"),
    ({"update_rectify": -1}, "update_rectify must be an integer >= 0; got -1"),
    ({"refresh_rectify": 1.0}, "refresh_rectify must be an integer >= 0; got 1.0"),
    ({"qr_iterations": 0}, "qr_iterations must be an integer >= 1; got 0"),
    ({"newton_steps": 0}, "newton_steps must be an integer >= 1; got 0"),
    ({"root": "eigh"}, "root must be one of 'eigen', 'schur_newton'; got 'eigh'"),
    ({"max_order": 0}, "max_order must be an integer >= 1; got 0"),
    ({"split": "odd"}, "split must be one of 'greedy', 'even'; got 'odd'"),
    ({"batch_dims": -1}, "batch_dims must be an integer >= 0; got -1"),
    ({"split_sizes": 3}, "split_sizes must be a tuple of positive integers; got 3"),
    ({"split_sizes": 5.0}, "split_sizes must be a tuple of positive integers; got 5.0"),
    ({"split_sizes": (3, 0)}, r"split_sizes\[1\] must be an integer >= 1; got 0"),
    ({"precondition": "no"}, "precondition must be one of True, False; got 'no'"),
    ({"workspace_mb": -1}, "workspace_mb must be a finite number >= 0; got -1"),
    ({"stagger": "yes"}, "stagger must be one of True, False; got 'yes'"),
    ({"cuda_graph": None}, "cuda_graph must be one of True, False; got None"),
    ({"shard_state": 1}, "shard_state must be one of True, False; got 1"),
    ({"blocks": "rows"}, "blocks must be one of 'whole', 'local'; got 'rows'"),
    ({"keep_gradients": 1}, "keep_gradients must be one of True, False; got 1"),
    ({"nonfinite": "skip"}, "nonfinite must be one of 'zero', 'pass', 'raise'; got 'skip'"),
    ({"method": "dense"}, "method='dense' keeps 32 bits, but bits=4.*set bits=32"),
    ({"method": "dense", "bits": 32, "root_bits": 4}, "method='dense' keeps 32 bits"),
    ({"method": "naive", "bits": 32}, "method='naive' with bits=32 is method='dense'"),
    ({"bits": 32, "root_bits": 4}, "bits=32 with root_bits=4 needs method='eigen'"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_values_name_option_value_and_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Config(**options)


def test_every_option_is_tested_documented_and_classified() -> None:
    assert {name for options, _ in BAD for name in options} == set(OPTIONS)
    assert Config.__doc__ is not None
    for name in OPTIONS:
        assert f"        {name}: " in Config.__doc__, name
    # The order of the fields classifies them.
    assert set(GROUP_OPTIONS) | GLOBAL_OPTIONS == set(OPTIONS)
    assert sorted(GLOBAL_OPTIONS) == [
        *("blocks", "cuda_graph", "keep_gradients", "nonfinite", "offload_statistics"),
        *("shard_state", "workspace_mb"),
    ]
    assert sorted(FORMAT_OPTIONS) == [
        *("bits", "block_size", "exponent", "mapping", "method", "min_quantized_numel"),
        *("root_bits", "storage"),
    ]
    assert set(STRUCTURAL_OPTIONS) < set(GROUP_OPTIONS)


def test_defaults_are_the_papers_except_method_and_storage() -> None:
    c = Config()
    assert (c.bits, c.mapping, c.block_size, c.min_quantized_numel) == (4, "linear2", 64, 4096)
    assert (c.beta, c.damping, c.update_every, c.refresh_every) == (0.95, 1e-6, 100, 500)
    assert (c.update_rectify, c.refresh_rectify, c.qr_iterations, c.newton_steps) == (1, 4, 1, 10)
    assert (c.max_order, c.split, c.root) == (1200, "greedy", "eigen")
    assert (c.first_refresh, c.workspace_mb, c.keep_gradients, c.nonfinite) == (
        None,
        256,
        False,
        "zero",
    )


@pytest.mark.parametrize("option", [{"root": "schur_newton"}, {"qr_iterations": 2}])
def test_options_of_a_method_other_than_the_default_are_not_ignored(
    option: dict[str, Any],
) -> None:
    (name,) = option
    with pytest.raises(ValueError, match=rf"{name}=.* is for method='eigen', which is not the def"):
        take_options({"lr": 0.1, **option})
    for method in ({"method": "eigen"}, {"method": "naive"}, {"bits": 32}):
        assert getattr(take_options({**option, **method}), name) == option[name]


def test_method_and_bits_decide_the_format() -> None:
    assert Config().format(64).method == "cholesky"
    assert Config().format(64).compact
    assert not Config(block_size=256).format(64).compact
    assert not Config(storage="paper").format(64).compact
    assert Config(bits=32).format(64).method == "dense"
    assert Config(bits=32, method="eigen").format(64).method == "eigen"
    assert Config().format(64).statistic.bits == 4
    assert Config().format(63).statistic.bits == 32  # 63² < 4096
    assert Config(method="naive").format(63) == Config(bits=32).format(63)
    assert Config(root_bits=8).format(64).root.bits == 8
    assert Config(min_quantized_numel=0).format(2).root.bits == 4


def steps(config: Config, last: int) -> tuple[list[int], list[int]]:
    every = range(1, last + 1)
    return [t for t in every if updates_at(config, t)], [
        t for t in every if refreshes_at(config, t)
    ]


def test_steps_of_updates_and_refreshes() -> None:
    assert steps(Config(), 1000) == (list(range(100, 1001, 100)), [500, 1000])
    updates, refreshes = steps(Config(first_refresh=10), 1000)
    early = [10, 20, 40, 80, 160, 320]
    assert updates == [*early, 500, 600, 700, 800, 900, 1000]
    assert refreshes == [*early, 500, 1000]
    assert steps(Config(first_refresh=1, update_every=3, refresh_every=7), 14) == (
        [1, 2, 4, 9, 12],
        [1, 2, 4, 7, 14],
    )


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({}, 500),
        ({"first_refresh": 10}, 10),
        ({"update_every": 100, "refresh_every": 30}, 120),
        ({"update_every": 1, "refresh_every": 1}, 1),
        ({"stagger": True}, 503),  # R̂ is refreshed three steps after L is updated
    ],
)
def test_first_preconditioned_step(options: dict[str, Any], first: int) -> None:
    assert first_preconditioned_step(Config(**options)) == first


def test_groups_override_group_options_but_not_global_ones() -> None:
    config = Config().for_group({"params": [], "lr": 1.0, "bits": 8, "split_sizes": [2, 2]})
    assert (config.bits, config.split_sizes) == (8, (2, 2))
    with pytest.raises(ValueError, match="workspace_mb applies to the whole optimizer"):
        Config().for_group({"workspace_mb": 1})
