"""Fixtures and named tolerances."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined

from kronbit import acceleration
from kronbit.kernel_products import KernelProducts

# The paper's own way to keep a preconditioner; the default is another one.
PAPER: dict[str, Any] = {"method": "eigen", "storage": "paper"}
# Every way to keep a preconditioner, with every number of bits that it takes.
METHODS = [
    ("dense", 32),
    ("eigen", 32),
    ("eigen", 8),
    ("eigen", 6),
    ("eigen", 4),
    ("eigen", 3),
    ("naive", 8),
    ("naive", 6),
    ("naive", 4),
    ("naive", 3),
    ("cholesky", 32),
    ("cholesky", 8),
    ("cholesky", 4),
]


# For tests and cases that take long on a CPU, mostly since kernels are interpreted there, and that
# others stand for: a GPU takes all of them.
slow = pytest.mark.slow


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run what is marked slow, without a GPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where there is none, and what is ``slow`` unless asked for."""
    for item in items:
        if item.get_closest_marker("gpu"):
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))
        elif item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow without a GPU: --slow runs it"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every test that takes it runs on the CPU, and on a GPU where there is one."""
    return torch.device(request.param)


@pytest.fixture
def kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device, with kernels in use: on the CPU they are interpreted."""
    pytest.importorskip("triton")
    if device.type == "cpu":
        monkeypatch.setattr(acceleration, "why_not", lambda device: None)
    return device


@pytest.fixture(autouse=True)
def _float32_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equivalences hold to float32's rounding; products in bf16 have tests of their own."""
    if not request.node.get_closest_marker("bf16_products"):
        monkeypatch.setattr(KernelProducts, "choose", lambda *_: None)  # float32 from the start


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forward and backward passes on a GPU that are the same every time; our step always is."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def browser() -> Iterator[Any]:
    """Headless Chromium, where it and its driver are installed."""
    webdriver = pytest.importorskip("selenium.webdriver")
    binary = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=driver)
    found = webdriver.Chrome(options=options, service=service)
    yield found
    found.quit()


@contextmanager
def no_host_sync() -> Iterator[None]:
    """An error for whatever waits for the GPU inside."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def orthogonal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random orthogonal matrices."""
    return torch.linalg.qr(torch.randn(*shape, dtype=torch.float64))[0].to(dtype)


def spd(k: int, n: int, condition: float) -> Tensor:
    """Random symmetric positive definite matrices in float64, eigenvalues spaced in logarithm."""
    U = orthogonal(k, n, n)
    spectrum = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), n).double()
    return (U * spectrum) @ U.mT


def relative_error(x: Tensor, reference: Tensor) -> float:
    """‖x - reference‖ / ‖reference‖ in float64."""
    x, reference = x.detach().cpu().double(), reference.detach().cpu().double()
    return float((x - reference).norm() / reference.norm())


def angle(x: Tensor, reference: Tensor) -> float:
    """Degrees between two tensors."""
    x, reference = x.detach().cpu().double().flatten(), reference.detach().cpu().double().flatten()
    cosine = x @ reference / (x.norm() * reference.norm())
    return float(torch.rad2deg(torch.arccos(cosine.clamp(-1, 1))))


def same_state(a: Any, b: Any) -> bool:
    """Whether nested dicts hold the same tensors, to the bit, and the same other values."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b
