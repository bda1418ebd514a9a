"""M-FAC (Frantar, Kurtic and Alistarh, 2021): the Fisher matrix of the last m gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from kronbit.baselines.rewriter import Rewriter, check_damping, graft, wide, zeros
from kronbit.factors import Layout
from kronbit.first_order import BaseFactory

# Elements of a stack of gradients that are looked at together: a copy of them is made where they
# are kept in 16 bits, and sums of so many are still exact enough in float32.
_PIECE = 2**22


class MFAC(Rewriter):
    """M-FAC around any first-order optimizer: a baseline to compare with, not a recommendation.

    With all parameters as one vector and g_1, ..., g_m their last gradients, that of this step
    among them, F̂ = λ I + (1/m) Σ g_i g_iᵀ (as long as there are fewer than m, zeros stand for the
    others) and Ĝ = F̂⁻¹ g. With the gradients as the rows of G (m, d), by Woodbury

        F̂⁻¹ g = (g - Gᵀ (m λ I + G Gᵀ)⁻¹ G g) / λ.

    The first-order optimizer gets G̃ = Ĝ ‖G‖ / ‖Ĝ‖ of each parameter, as kronbit's own optimizers do
    it: step sizes can be compared.

    Memory: m copies of all gradients, in the parameters' dtypes; 32 of them take 128 bytes for each
    number of a model in float32.

    Example::

        opt = MFAC(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), gradients=32)

    Args:
        params: A ready optimizer, or parameters, param groups or named parameters; all of them on
            one device.
        base: As for ``kronbit.Shampoo``.
        gradients: m. How many gradients are kept.
        damping: λ. Above 0.
        **options: The base's own.
    """

    _pickled: ClassVar[tuple[str, ...]] = ("gradients", "damping")

    def __init__(
        self,
        params: Optimizer | Iterable[Any] | None = None,
        base: str | BaseFactory | Optimizer | None = None,
        *,
        gradients: int = 32,
        damping: float = 0.1,
        **options: Any,
    ) -> None:
        if not isinstance(gradients, int) or isinstance(gradients, bool) or gradients < 1:
            raise ValueError(f"gradients must be an integer >= 1; got {gradients!r}")
        check_damping(damping)
        self.gradients, self.damping = gradients, damping
        super().__init__(params, base, **options)

    def check(self) -> None:
        """Refuse parameters on several devices: their gradients are one vector."""
        devices = sorted({str(p.device) for p in self._params()})
        if len(devices) > 1:
            raise ValueError(
                f"MFAC needs all parameters on one device; got {', '.join(devices)}: move the "
                "model to one of them, or use kronbit.Shampoo"
            )

    def layout(self, p: Tensor) -> Layout:
        """The last m gradients of a parameter."""
        return {"gradients": ((self.gradients, *p.shape), p.dtype)}

    def common_layout(self) -> Layout:
        """How many gradients have been stored, and the Gram matrix of those that are kept."""
        m = self.gradients
        return {"stored": ((), torch.int64), "gram": ((m, m), torch.float64)}

    def rewrite(self) -> None:
        """G ← [G without its oldest row; g], then g ← G̃."""
        params = self._params()
        present = [p for p in params if p.grad is not None]
        if not present:
            return
        self._prepare(present)
        finite = self._finite()
        if not self.common:
            self.common = zeros(self.common_layout(), finite.device)
        stored, K = self.common["stored"], self.common["gram"]
        # A tensor: whether the last step was stored is not known to the host.
        slot = (stored % self.gradients).view(1)
        products = torch.zeros_like(K[0])
        for p in params:
            if p.grad is not None or p in self.state:
                products += self._store(p, slot, finite)
        renewed = K.index_copy(0, slot, products[None]).index_copy_(1, slot, products[:, None])
        K.copy_(torch.where(finite, renewed, K))
        stored += finite
        weights = self._weights(K, slot)
        for p in present:
            self._precondition(p, weights, finite)

    def _store(self, p: Tensor, slot: Tensor, finite: Tensor) -> Tensor:
        """Put the gradient of one parameter in its slot; its products with all that are kept."""
        if not self.state[p]:
            self.state[p] = zeros(self.layout(p), p.device)
        G = self.state[p]["gradients"]
        oldest = G.index_select(0, slot)
        newest = torch.zeros_like(oldest) if p.grad is None else p.grad.unsqueeze(0).to(G.dtype)
        G.index_copy_(0, slot, torch.where(finite, newest, oldest))
        products = torch.zeros(len(G), dtype=torch.float64, device=G.device)
        for piece in self._pieces(G):
            products += piece @ piece.index_select(0, slot)[0]
        return products

    def _weights(self, K: Tensor, slot: Tensor) -> Tensor:
        """The c with F̂⁻¹ g = Gᵀ c.

        g itself is a row of G, that of e: g = Gᵀ e and G g = K e, so Woodbury's difference is
        Gᵀ (e - (m λ I + K)⁻¹ K e) / λ, and c = m (m λ I + K)⁻¹ e.
        """
        m = self.gradients
        identity = torch.eye(m, dtype=K.dtype, device=K.device)
        e = identity.index_select(1, slot)
        # Without a look at the outcome, for which the host would wait: m λ I + K has an inverse.
        solution: Tensor = torch.linalg.solve_ex(m * self.damping * identity + K, m * e).result
        return solution.squeeze(1)

    def _precondition(self, p: Tensor, weights: Tensor, finite: Tensor) -> None:
        """G̃ of one parameter in the place of G."""
        grad, stack = p.grad, self.state[p]["gradients"]
        assert grad is not None
        c = weights.to(wide(stack.dtype))
        Ghat = torch.cat([c @ piece for piece in self._pieces(stack)]).view(p.shape)
        G = grad.to(Ghat.dtype)
        grad.copy_(torch.where(finite, graft(G, Ghat, grad.dtype), G))

    def _pieces(self, stack: Tensor) -> Iterator[Tensor]:
        """The columns of a stack of gradients, (m, some), in float32 or better."""
        rows = stack.view(len(stack), stack[0].numel())
        for piece in rows.split(max(1, _PIECE // len(stack)), 1):
            yield piece.to(wide(stack.dtype))
