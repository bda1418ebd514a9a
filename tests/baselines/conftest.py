"""A fixture that runs the tests of EVA and M-FAC with and without grafting."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor


def grafted(G: Tensor, Ghat: Tensor) -> Tensor:
    return Ghat * G.norm() / Ghat.norm()


@pytest.fixture(params=["grafted", "plain"])
def grafting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the grafting function, or turn grafting off, because it would hide a wrong scale."""
    if request.param == "grafted":
        return grafted
    for module in ("eva", "mfac"):
        monkeypatch.setattr(f"kronbit.baselines.{module}.graft", lambda G, Ghat, dtype: Ghat)
    return lambda G, Ghat: Ghat
