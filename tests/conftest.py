"""Fixtures and command-line options of the tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined

from kronbit.gpu.product_precision import KernelProducts
from kronbit.kernels import guard


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run slow tests without a GPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests without a GPU, and ``slow`` tests without ``--slow``."""
    for item in items:
        if item.get_closest_marker("gpu"):
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))
        elif item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow without a GPU: --slow runs it"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Run the test on the CPU and, if there is one, on the GPU."""
    return torch.device(request.param)


@pytest.fixture
def kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Return the device with kernels enabled. On the CPU, Triton interprets them."""
    pytest.importorskip("triton")
    if device.type == "cpu":
        monkeypatch.setattr(guard, "why_not", lambda device: None)
    return device


@pytest.fixture(autouse=True)
def _float32_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep products in float32, as equivalence tests assume. Other tests cover bf16 products."""
    if not request.node.get_closest_marker("bf16_products"):
        monkeypatch.setattr(KernelProducts, "choose", lambda *_: None)  # never reduced precision


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make forward and backward passes on a GPU deterministic. The optimizer's step always is."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def browser() -> Iterator[Any]:
    """Start headless Chromium, or skip the test if it or its driver is not installed."""
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
    browser_driver = webdriver.Chrome(options=options, service=service)
    yield browser_driver
    browser_driver.quit()
