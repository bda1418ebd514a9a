"""Run ``kronbit doctor`` on Shampoo, CASPR and optimizers of other packages.

Usage::

    pip install pytorch_optimizer heavyball torchao bitsandbytes torch_optimizer
    python benchmarks/accuracy/compatibility.py --output results/accuracy/compatibility_cpu.json

Every optimizer is examined in a separate process, on the CPU. Second-order updates start at the
second step, where an optimizer has options for it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

SUBJECTS = {
    "kronbit.Shampoo": "",
    "kronbit.CASPR": "",
    "torch.optim.AdamW": "lr=1e-2",
    "pytorch_optimizer.SOAP": "lr=1e-2,precondition_frequency=2",
    "pytorch_optimizer.ScalableShampoo": (
        "lr=1e-2,preconditioning_compute_steps=2,start_preconditioning_step=2"
    ),
    "heavyball.SOAP": "lr=1e-2",
    "torch_optimizer.Shampoo": "lr=1e-2,update_freq=1",
    "torchao.optim.AdamW4bit": "lr=1e-2",
    "bitsandbytes.optim.AdamW8bit": "lr=1e-2,min_8bit_size=0",
}


def examine(path: str, options: str) -> dict[str, object]:
    """Return the version of an optimizer and the outcome of every check."""
    command = [sys.executable, "-m", "kronbit", "doctor", "--device", "cpu", "--json"]
    command += ["--optimizer", path, *(["--options", options] if options else [])]
    # Heavyball and torchao would compile for minutes; the checks do not depend on it.
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not process.stdout.startswith("{"):
        raise SystemExit(f"{path}: {process.stderr}")
    checks = json.loads(process.stdout)["checks"]
    outcomes = {check: problem or "ok" for check, problem in checks.items()}
    return {"version": version(path.split(".")[0]), "options": options, "checks": outcomes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": "cpu",
        "optimizers": {path: examine(path, options) for path, options in SUBJECTS.items()},
    }
    for path, outcome in result["optimizers"].items():
        print(path, json.dumps(outcome, indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
