"""torch's Muon, to compare with: for hidden matrices, beside F for all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kronbit.first_order import resolve
from kronbit.lab.errors import LabError


def hidden_matrices(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The weights of linear layers but the last one, which makes the logits.

    Embeddings, convolutions, and what is tied to the last layer are none.
    """
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    # transformers' Conv1D, of which GPT-2 is made, is a linear layer by another name.
    linear = (
        m for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"
    )
    weights = [m.weight for m in linear if isinstance(m.weight, Tensor)]
    kept = [p for p in weights[:-1] if p is not weights[-1] and p.requires_grad]
    return [(names[p], p) for p in dict.fromkeys(kept)]


class MuonBesideBase(Optimizer):
    """Two optimizers as one: their param groups and their state are those of this one.

    The update of Muon gets AdamW's usual size (``match_rms_adamw``), so that both have the same
    learning rate, weight decay and schedule.

    Args:
        model: Whose parameters.
        base: F's name.
        keywords: F's options; Muon takes ``lr`` and ``weight_decay`` of them.

    Raises:
        LabError: If the model has no hidden matrix.
    """

    def __init__(self, model: nn.Module, base: str, keywords: Mapping[str, Any]) -> None:
        hidden = hidden_matrices(model)
        if not hidden:
            raise LabError(
                "muon is for hidden linear layers, and the model has none: take a transformer"
            )
        chosen = {p for _, p in hidden}
        rest = [(name, p) for name, p in model.named_parameters() if p not in chosen]
        shared = {name: keywords[name] for name in ("lr", "weight_decay") if name in keywords}
        muon = torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw", **shared)
        self._parts = (muon, resolve(rest, base, keywords))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the two work on this optimizer's groups and state."""
        muon, base = self._parts
        first = len(muon.param_groups)
        muon.param_groups, base.param_groups = self.param_groups[:first], self.param_groups[first:]
        muon.state = base.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Both take their step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss
