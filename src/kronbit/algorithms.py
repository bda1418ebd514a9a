"""The second-order optimizers: Shampoo, CASPR, K-FAC and AdaBK."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from kronbit import rules
from kronbit.base import BaseFactory
from kronbit.optimizer import SecondOrder
from kronbit.rules import Algorithm
from kronbit.statistics.activations import ActivationStatistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Shampoo(SecondOrder):
    """Shampoo with quantised state around any first-order optimizer.

    L ← β L + (1 - β) G Gᵀ, R ← β R + (1 - β) Gᵀ G, Ĝ = L^(-1/4) G R^(-1/4). The first-order
    optimizer receives G̃ = Ĝ ‖G‖ / ‖Ĝ‖, and keeps its learning rate and weight decay.

    Example::

        opt = Shampoo(torch.optim.AdamW(model.parameters(), lr=1e-3), bits=4)
        opt = Shampoo(model.parameters(), base="adamw", lr=1e-3, bits=4)

    Args:
        params: An optimizer, or parameters, param groups or named parameters.
        base: The first-order optimizer of these parameters: a name (``"sgd"``, ``"adam"``,
            ``"adamw"``, ``"nadamw"``, ``"adagrad"``, ``"rmsprop"``, ``"adamw8bit"``,
            ``"schedulefree-adamw"``, ``"schedulefree-sgd"``), a class, an import path, or an
            optimizer (then ``params`` may be omitted). Default: ``"adamw"``.
        process_group: Ranks that hold the same parameters and gradients, and divide updates and
            refreshes among themselves. ``None``: all ranks, if torch's distributed package is
            initialised. ``False``: this rank works alone. For sharded parameters (FSDP2), their
            mesh defines the ranks.
        **options: Fields of ``kronbit.Config``. All other keywords are passed to the base.
    """

    algorithm = Algorithm(rules.KRONECKER)


class CASPR(SecondOrder):
    """CASPR with quantised state: Shampoo's factors, combined as J = L̂ G + G R̂, Ĝ = L̂ J + J R̂.

    Arguments and options are those of ``Shampoo``.
    """

    algorithm = Algorithm(rules.CASPR)


# Defaults of K-FAC and AdaBK.
_DEFAULTS: tuple[tuple[str, Any], ...] = (
    ("beta", 0.9),
    ("start", 0.0),
    ("update_every", 200),
    ("refresh_every", 2000),
    ("update_rectify", 0),
    ("refresh_rectify", 0),
    ("qr_iterations", 2),
    ("max_order", 16384),
)


class KFAC(SecondOrder):
    """K-FAC with quantised state around any first-order optimizer.

    Let x be the inputs of a layer, y the gradients at its outputs, and G the gradient of [W | b],
    weight and bias. Then L ← β L + (1 - β) E[y yᵀ], R ← β R + (1 - β) E[x xᵀ], Ĝ = L⁻¹ G R⁻¹. The
    first-order optimizer receives G̃ = Ĝ ‖G‖ / ‖Ĝ‖. Linear layers, 2-d convolutions and ``Conv1D``
    of transformers are preconditioned. All other parameters are left to the base.

    Example::

        opt = KFAC(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model=model)

    Args:
        params: An optimizer, or parameters, param groups or named parameters.
        base: First-order optimizer, as for ``Shampoo``.
        model: The model with these parameters. Its layers are observed before steps that update
            statistics, in training mode while gradients are enabled.
        shared: ``"expand"``: every token, or every position of a convolution, has an x and a y.
            ``"reduce"``: every example has one x, the mean, and one y, the sum over positions.
        grad_scaler: Scaler of the loss, if any; its scale is removed from y.
        process_group: As for ``Shampoo``; statistics are also averaged over these ranks.
        **options: As for ``Shampoo``, but layers are not cut: a layer with a side above
            ``max_order`` is left to the base. Other defaults: ``exponent=-1``, ``damping=0.1``,
            ``beta=0.9``, ``start=0``, ``update_every=200``, ``refresh_every=2000``,
            ``max_order=16384``; with ``method="eigen"``, ``update_rectify=0``,
            ``refresh_rectify=0``, ``qr_iterations=2``.
    """

    algorithm = Algorithm(rules.KRONECKER, (*_DEFAULTS, ("exponent", -1.0), ("damping", 0.1)))
    _statistics: ActivationStatistics

    def __init__(
        self,
        params: Optimizer | Iterable[Any] | None = None,
        base: str | BaseFactory | Optimizer | None = None,
        *,
        model: nn.Module,
        shared: str = "expand",
        grad_scaler: torch.amp.GradScaler | None = None,
        process_group: ProcessGroup | Literal[False] | None = None,
        **options: Any,
    ) -> None:
        self._statistics_args = model, shared, grad_scaler, process_group
        super().__init__(params, base, process_group=process_group, **options)

    def _make_statistics(self) -> ActivationStatistics:
        workspace = int(self.config.workspace_mb * 2**20)
        return ActivationStatistics(*self._statistics_args, workspace)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients and the sums collected for the next update."""
        self._statistics.forget()
        super().zero_grad(set_to_none)

    def close(self) -> None:
        """Remove the hooks from the model. Statistics are no longer updated."""
        self._statistics.close()


class AdaBK(KFAC):
    """AdaBK with quantised state: K-FAC's statistics, and Ĝ = L^(-1/2) G R^(-1/2).

    Arguments and options are those of ``KFAC``, except for the defaults ``exponent=-1/2`` and
    ``damping=1e-3``.
    """

    algorithm = Algorithm(rules.KRONECKER, (*_DEFAULTS, ("exponent", -0.5), ("damping", 1e-3)))
