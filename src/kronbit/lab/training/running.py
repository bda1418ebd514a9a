"""Settings of how a training runs, which change no result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Running:
    """Settings of how a training runs. Results should not depend on them.

    Attributes:
        data: Folder with downloaded data sets.
        compile: True to compile the network with ``torch.compile``.
        graph: True to capture the forward and backward pass in a CUDA graph.
        tensorboard: True to write TensorBoard files, too.
    """

    data: Path
    compile: bool = False
    graph: bool = False
    tensorboard: bool = False
