"""The optimizers: each a short statement of choices."""

from __future__ import annotations

from kronbit import rules
from kronbit.optimizer import SecondOrder
from kronbit.rules import Algorithm


class Shampoo(SecondOrder):
    """Shampoo with quantised state around any first-order optimizer.

    L ← β L + (1 - β) G Gᵀ, R ← β R + (1 - β) Gᵀ G, Ĝ = L^(-1/4) G R^(-1/4), and the first-order
    optimizer gets G̃ = Ĝ ‖G‖ / ‖Ĝ‖. Its learning rate and weight decay stay what they were.

    Example::

        opt = Shampoo(torch.optim.AdamW(model.parameters(), lr=1e-3), bits=4)
        opt = Shampoo(model.parameters(), base="adamw", lr=1e-3, bits=4)

    Args:
        params: A ready optimizer, or parameters, param groups or named parameters.
        base: The first-order optimizer of those parameters: a name (``"sgd"``, ``"adam"``,
            ``"adamw"``, ``"nadamw"``, ``"adagrad"``, ``"rmsprop"``, ``"adamw8bit"``,
            ``"schedulefree-adamw"``, ``"schedulefree-sgd"``), a class, an import path, or a ready
            optimizer (``params`` may be left out then). Default: ``"adamw"``.
        **options: The fields of ``kronbit.Config``; everything else goes to the base.
    """

    algorithm = Algorithm(rules.KRONECKER)


class CASPR(SecondOrder):
    """CASPR with quantised state: Shampoo's factors, combined as J = L̂ G + G R̂, Ĝ = L̂ J + J R̂.

    Arguments and options are those of ``Shampoo``.
    """

    algorithm = Algorithm(rules.CASPR)
