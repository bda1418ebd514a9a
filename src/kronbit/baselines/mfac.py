"""M-FAC (Frantar, Kurtic and Alistarh, 2021): preconditioning by the last m gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from kronbit.base import BaseFactory
from kronbit.baselines.rewriter import Rewriter, check_damping, graft, wide, zeros
from kronbit.factors import Layout

# Elements of a stack of gradients in one product. The limit bounds the float32 copy of 16-bit
# gradients and the rounding error of float32 sums.
_PIECE = 2**22


class MFAC(Rewriter):
    """M-FAC around any first-order optimizer: a baseline to compare with, not a recommendation.

    All parameters form one vector. Its last m gradients g_1, ..., g_m include the current one, g;
    before step m, missing gradients are zero. The damped Fisher matrix is
    F̂ = λ I + (1/m) Σ g_i g_iᵀ, and Ĝ = F̂⁻¹ g. With the gradients as the rows of G (m, d), the
    Woodbury identity gives

        F̂⁻¹ g = (g - Gᵀ (m λ I + G Gᵀ)⁻¹ G g) / λ.

    The first-order optimizer receives G̃ = Ĝ ‖G‖ / ‖Ĝ‖ for each parameter. All optimizers of
    kronbit graft in this way, so that step sizes are comparable.

    Memory: m copies of all gradients in the dtypes of the parameters. With m = 32, these are 128
    bytes per parameter in float32.

    Example::

        opt = MFAC(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), gradients=32)

    Args:
        params: An optimizer, or parameters, param groups or named parameters. All parameters must
            be on one device.
        base: First-order optimizer, as for ``kronbit.Shampoo``.
        gradients: Number m of gradients that are stored.
        damping: Damping λ > 0.
        **options: Options of the base.
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
        """Refuse parameters on several devices, because their gradients form one vector."""
        devices = sorted({str(p.device) for p in self._params()})
        if len(devices) > 1:
            raise ValueError(
                f"MFAC needs all parameters on one device; got {', '.join(devices)}: move the "
                "model to one of them, or use kronbit.Shampoo"
            )

    def layout(self, p: Tensor) -> Layout:
        """Return the layout of the last m gradients of a parameter."""
        return {"gradients": ((self.gradients, *p.shape), p.dtype)}

    def common_layout(self) -> Layout:
        """Return the layout of the number of steps and the Gram matrix of the stored gradients."""
        m = self.gradients
        return {"stored": ((), torch.int64), "gram": ((m, m), torch.float64)}

    def rewrite(self) -> None:
        """Replace the oldest row of G by g, then replace g by G̃."""
        params = self._params()
        present = [p for p in params if p.grad is not None]
        if not present:
            return
        self._prepare(present)
        finite = self._finite()
        if not self.common:
            self.common = zeros(self.common_layout(), finite.device)
        stored, K = self.common["stored"], self.common["gram"]
        # A tensor, because the host does not know if the last step was finite and stored.
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
        """Store a parameter's gradient, and return its products with all stored gradients."""
        G = self._started(p)["gradients"]
        oldest = G.index_select(0, slot)
        newest = torch.zeros_like(oldest) if p.grad is None else p.grad.unsqueeze(0).to(G.dtype)
        G.index_copy_(0, slot, torch.where(finite, newest, oldest))
        products = torch.zeros(len(G), dtype=torch.float64, device=G.device)
        for piece in self._pieces(G):
            products += piece @ piece.index_select(0, slot)[0]
        return products

    def _weights(self, K: Tensor, slot: Tensor) -> Tensor:
        """Return the vector c for which F̂⁻¹ g = Gᵀ c.

        The unit vector e selects the row of g in G: g = Gᵀ e and G g = K e. The Woodbury identity
        becomes Gᵀ (e - (m λ I + K)⁻¹ K e) / λ, and c = m (m λ I + K)⁻¹ e.
        """
        m = self.gradients
        identity = torch.eye(m, dtype=K.dtype, device=K.device)
        e = identity.index_select(1, slot)
        # m λ I + K is always invertible; a check would make the host wait for the device.
        solution: Tensor = torch.linalg.solve_ex(m * self.damping * identity + K, m * e).result
        return solution.squeeze(1)

    def _precondition(self, p: Tensor, weights: Tensor, finite: Tensor) -> None:
        """Replace the gradient of a parameter by G̃."""
        grad, stack = p.grad, self.state[p]["gradients"]
        assert grad is not None
        c = weights.to(wide(stack.dtype))
        Ghat = torch.cat([c @ piece for piece in self._pieces(stack)]).view(p.shape)
        G = grad.to(Ghat.dtype)
        grad.copy_(torch.where(finite, graft(G, Ghat, grad.dtype), G))

    def _pieces(self, stack: Tensor) -> Iterator[Tensor]:
        """Yield groups of columns of a stack of gradients, (m, columns), in float32 or float64."""
        rows = stack.view(len(stack), stack[0].numel())
        for piece in rows.split(max(1, _PIECE // len(stack)), 1):
            yield piece.to(wide(stack.dtype))
