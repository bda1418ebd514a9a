"""Measure the paper's theory: α and β of quantised eigenvectors, and regret against its bound.

Usage::

    python benchmarks/accuracy/theory.py --output result.json [--order 1200] [--rounds 400]

The first part is about Lemma 1 (``tests/support/quantised_eigenvectors.py``). It quantises the
eigenvectors of the paper's synthetic matrix and rectifies them by Björck's steps. It measures their
distance from the exact eigenvectors and the errors of the matrix's powers, and computes the lemma's
bounds. The second part runs the perturbed Shampoo of the convergence appendix
(``tests/support/perturbed_shampoo.py``) on online convex problems, in every storage. It measures
the regret and computes its bound. The slack is the bound divided by the regret.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from kronbit.lab.quantization.errors import Statistic, synthetic_matrix
from kronbit.lab.training.measures import hardware, versions
from kronbit.quantization import Quantizer

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.perturbed_shampoo import (
    EPSILON,
    SCHEMES,
    Outcome,
    Problem,
    classification,
    denoising,
    linear_losses,
    perturbed_shampoo,
)
from support.quantised_eigenvectors import restored, sharp

STEPS = (0, 1, 4)
POWERS = (-0.25, -0.5, -1.0, -8.0)


def lemma_1(statistic: Statistic, quantizer: Quantizer, steps: int) -> dict[str, Any]:
    """Return α, β, the errors of powers, and the bounds of the lemma."""
    result = restored(statistic, quantizer, steps, POWERS)
    return {
        "mapping": quantizer.mapping,
        "bits": quantizer.bits,
        "bjorck_steps": steps,
        "alpha": result.alpha,
        "beta": result.beta,
        # Share of the trace of A that remains if V is not orthogonal and all λ are equal.
        "mean_squared_length": result.length,
        "orthogonality_error": result.skew,
        # True if the lemma applies.
        "orthogonal": result.orthogonal,
        "nre_bound": result.nre_bound,
        "nre_sharp_bound": sharp(result.alpha),
        "cosine_bound": result.cosine_bound,
        "powers": {
            str(s): {"nre": nre, "cosine": cosine} for s, (nre, cosine) in result.errors.items()
        },
    }


def summary(outcome: Outcome) -> dict[str, float]:
    """Return the regret of a run, its bounds, and the quantities in the bounds."""
    left, right = outcome.left, outcome.right
    return {
        "eta": outcome.eta,
        "regret": outcome.regret,
        "first_link": outcome.first_link,
        "bound": outcome.bound,
        "slack": outcome.bound / outcome.regret,
        "printed_bound": outcome.printed_bound,
        "printed_slack": outcome.printed_bound / outcome.regret,
        "D": outcome.farthest,
        "D_over_first_distance": outcome.farthest / outcome.start_distance,
        "rho": left.rho,
        "mu": right.rho,
        "left_error_trace_over_exact": left.error_trace() / left.exact_trace(),
        "right_error_trace_over_exact": right.error_trace() / right.exact_trace(),
    }


def regrets(problem: Problem, rates: list[float]) -> dict[str, Any]:
    """Return the regret on a problem for every storage and learning rate."""
    print(f"{problem.name}, {problem.rounds} rounds, rank {problem.rank}")
    by_scheme: dict[str, list[dict[str, float]]] = {}
    single = problem.best.numel() == 1  # a single number is not quantised
    for scheme, config in [("exact", None)] if single else SCHEMES.items():
        for times in rates:
            figures = summary(perturbed_shampoo(problem, config, times * problem.natural_rate()))
            by_scheme.setdefault(scheme, []).append({"rate": times} | figures)
            print(
                f"  {scheme:30} rate {times:<5g} regret {figures['regret']:8.2f}, "
                f"first link {figures['first_link']:8.1f}, bound {figures['bound']:11.0f}, "
                f"slack {figures['slack']:8.1f}, printed {figures['printed_slack']:8.1f}, "
                f"D {figures['D']:.3g}, rho {figures['rho']:.3g}, mu {figures['mu']:.3g}",
                flush=True,
            )
    return {
        "name": problem.name,
        "rounds": problem.rounds,
        "rank": problem.rank,
        "norm_of_best": float(problem.best.norm()),
        "ways": by_scheme,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--order", type=int, default=1200)
    parser.add_argument("--rounds", type=int, default=400, help="number of rounds T, at most 449")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1.0, 0.25], help="multiples of ‖W₁ - W*‖ / √(2r)"
    )
    arguments = parser.parse_args()
    statistic = synthetic_matrix(arguments.order)
    report: dict[str, Any] = {
        "hardware": hardware(torch.device("cpu")),
        "versions": versions(),
        "order": arguments.order,
        "block_size": Quantizer().block_size,
        "epsilon": EPSILON,
        "lemma_1": [],
        "regret": [],
    }

    def write() -> None:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")

    for bits in (4, 3):
        for mapping in ("linear2", "dt"):
            for steps in STEPS:
                result = lemma_1(statistic, Quantizer(bits, mapping), steps)
                report["lemma_1"].append(result)
                errors = ", ".join(f"s={s}: {e['nre']:.4f}" for s, e in result["powers"].items())
                print(
                    f"{mapping:8} {bits} bits, {steps} steps: alpha {result['alpha']:.4f}, "
                    f"beta {result['beta']:.5f}; NRE {errors}; bound {result['nre_bound']:.4f}",
                    flush=True,
                )
                write()
    rounds = arguments.rounds
    for problem in (
        linear_losses(1, 1, 1, rounds),
        linear_losses(4, 4, 2, rounds),
        linear_losses(rounds=rounds),
        denoising(rounds),
        classification(rounds),
    ):
        report["regret"].append(regrets(problem, arguments.rates))
        write()


if __name__ == "__main__":
    main()
