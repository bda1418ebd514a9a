"""The paper's theory in numbers: α and β of quantised eigenvectors, and regret against its bound.

Usage::

    python benchmarks/accuracy/theory.py --output result.json [--order 1200] [--rounds 400]

First Lemma 1: how far kronbit's quantiser and Björck's steps leave the eigenvectors of the paper's
synthetic matrix from the exact ones, the error of the matrix's powers, and the lemma's bounds
(``tests/quantised_eigenvectors.py``). Then the perturbed Shampoo of the convergence appendix
(``tests/perturbed_shampoo.py``) on online convex problems, with every way to keep its state:
regret, the bound, and their ratio, the slack.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from kronbit.lab.quantisation.errors import Statistic, synthetic_matrix
from kronbit.lab.training.measures import hardware, versions
from kronbit.quantization import Quantizer

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.perturbed_shampoo import (
    EPSILON,
    WAYS,
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
    """α, β, and the errors of powers with what the lemma says of them."""
    found = restored(statistic, quantizer, steps, POWERS)
    return {
        "mapping": quantizer.mapping,
        "bits": quantizer.bits,
        "bjorck_steps": steps,
        "alpha": found.alpha,
        "beta": found.beta,
        # What is left of the trace of A, if V is not orthogonal and λ are alike.
        "mean_squared_length": found.length,
        "orthogonality_error": found.skew,
        # Whether the lemma applies.
        "orthogonal": found.orthogonal,
        "nre_bound": found.nre_bound,
        "nre_sharp_bound": sharp(found.alpha),
        "cosine_bound": found.cosine_bound,
        "powers": {
            str(s): {"nre": nre, "cosine": cosine} for s, (nre, cosine) in found.errors.items()
        },
    }


def summary(found: Outcome) -> dict[str, float]:
    left, right = found.left, found.right
    return {
        "eta": found.eta,
        "regret": found.regret,
        "first_link": found.first_link,
        "bound": found.bound,
        "slack": found.bound / found.regret,
        "printed_bound": found.printed_bound,
        "printed_slack": found.printed_bound / found.regret,
        "D": found.farthest,
        "D_over_first_distance": found.farthest / found.start_distance,
        "rho": left.rho,
        "mu": right.rho,
        "left_error_trace_over_exact": left.error_trace() / left.exact_trace(),
        "right_error_trace_over_exact": right.error_trace() / right.exact_trace(),
    }


def regrets(problem: Problem, rates: list[float]) -> dict[str, Any]:
    print(f"{problem.name}, {problem.rounds} rounds, rank {problem.rank}")
    ways: dict[str, list[dict[str, float]]] = {}
    single = problem.best.numel() == 1  # where there is nothing to quantise
    for way, config in [("exact", None)] if single else WAYS.items():
        for times in rates:
            found = summary(perturbed_shampoo(problem, config, times * problem.natural_rate()))
            ways.setdefault(way, []).append({"rate": times} | found)
            print(
                f"  {way:30} rate {times:<5g} regret {found['regret']:8.2f}, "
                f"first link {found['first_link']:8.1f}, bound {found['bound']:11.0f}, "
                f"slack {found['slack']:8.1f}, printed {found['printed_slack']:8.1f}, "
                f"D {found['D']:.3g}, rho {found['rho']:.3g}, mu {found['mu']:.3g}",
                flush=True,
            )
    return {
        "name": problem.name,
        "rounds": problem.rounds,
        "rank": problem.rank,
        "norm_of_best": float(problem.best.norm()),
        "ways": ways,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--order", type=int, default=1200)
    parser.add_argument("--rounds", type=int, default=400, help="T, at most 449")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1.0, 0.25], help="η, times ‖W₁ - W*‖ / √(2r)"
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

    def keep() -> None:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")

    for bits in (4, 3):
        for mapping in ("linear2", "dt"):
            for steps in STEPS:
                own = lemma_1(statistic, Quantizer(bits, mapping), steps)
                report["lemma_1"].append(own)
                errors = ", ".join(f"s={s}: {e['nre']:.4f}" for s, e in own["powers"].items())
                print(
                    f"{mapping:8} {bits} bits, {steps} steps: alpha {own['alpha']:.4f}, "
                    f"beta {own['beta']:.5f}; NRE {errors}; bound {own['nre_bound']:.4f}",
                    flush=True,
                )
                keep()
    rounds = arguments.rounds
    for problem in (
        linear_losses(1, 1, 1, rounds),
        linear_losses(4, 4, 2, rounds),
        linear_losses(rounds=rounds),
        denoising(rounds),
        classification(rounds),
    ):
        report["regret"].append(regrets(problem, arguments.rates))
        keep()


if __name__ == "__main__":
    main()
