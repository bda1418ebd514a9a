"""torch's Muon as a baseline: Muon for hidden matrices, F for all other parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kronbit.base import resolve
from kronbit.lab.errors import LabError


def hidden_matrices(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return names and weights of all linear layers except the last, which computes the logits.

    Embeddings, convolutions and weights tied to the last layer are excluded.
    """
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    # GPT-2 uses Conv1D of transformers, which is a linear layer.
    dense = (m for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D")
    weights = [m.weight for m in dense if isinstance(m.weight, Tensor)]
    kept = dict.fromkeys(p for p in weights[:-1] if p is not weights[-1] and p.requires_grad)
    return [(names[p], p) for p in kept]


class MuonBesideBase(Optimizer):
    """Muon and F as one optimizer, which owns the param groups and the state of both.

    Muon takes ``lr`` and ``weight_decay`` from the options of F. Its update is scaled to the usual
    size of AdamW's (``match_rms_adamw``), so that both share these and the schedule.
    """

    def __init__(self, model: nn.Module, base: str, keywords: Mapping[str, Any]) -> None:
        hidden = hidden_matrices(model)
        if not hidden:
            raise LabError(
                "muon is for hidden linear layers, and the model has none: use a transformer"
            )
        chosen = {p for _, p in hidden}
        rest = [(name, p) for name, p in model.named_parameters() if p not in chosen]
        shared = {name: keywords[name] for name in ("lr", "weight_decay") if name in keywords}
        muon = torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw", **shared)
        self._parts = (muon, resolve(rest, base, keywords))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Make both optimizers use the groups and the state of this one."""
        muon, base = self._parts
        first = len(muon.param_groups)
        muon.param_groups, base.param_groups = self.param_groups[:first], self.param_groups[first:]
        muon.state = base.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of ``state_dict``."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step with both optimizers."""
        for part in self._parts:
            part.step()
