"""Compact storage and triangular factors against the oracle, expected sizes and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import oracle
from support.numerics import PAPER, relative_error, slow
from support.stacks import all_rows, all_trusted, gram, run_both, stack, update
from torch import nn

from kronbit import Shampoo, estimate_memory
from kronbit.config import Config
from kronbit.factors import make_method
from kronbit.factors.storage import CompactStorage
from kronbit.kernels import guard
from kronbit.linalg.backend import from_lower_tiles, lower_tiles
from kronbit.quantization import Quantizer
from kronbit.quantization.reference import unpack

BITS = [3, 4, 6, 8]


def bits_per_element(order: int, **options: Any) -> float:
    layout = make_method(Config(**options).format(order)).layout(order)
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout.values()]
    return 8 * sum(sizes) / order**2


@pytest.mark.parametrize("method", ["eigen", "naive", "cholesky"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(  # tiles of 32 or 64 or rows, depending on the bits
    "n", [66, *(pytest.param(n, marks=slow) for n in (64, 97, 131))]
)
def test_updates_and_roots_match_the_oracle(
    method: str, bits: int, n: int, device: torch.device
) -> None:
    ours, references = run_both(
        n, device, torch.float64, method=method, bits=bits, storage="compact", damping=0.1
    )
    A, roots = ours.method.matrix(ours.tensors), ours.roots(all_rows(ours))
    assert torch.equal(roots, roots.mT)
    for row, factor in enumerate(references):
        factor.o.update_rectify = 4
        # Rounding may move a code across a threshold. At 3 bits, the value changes by a third of
        # its scale.
        tolerance = 1e-2 if bits == 3 else 1e-3
        assert relative_error(A[row], factor.matrix()) < tolerance
        assert relative_error(roots[row], factor.inverse_root()) < tolerance


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [66, 97, *(pytest.param(n, marks=slow) for n in (64, 200))])
def test_codes_are_bitwise_equal_where_arithmetic_is_exact(
    bits: int, n: int, device: torch.device
) -> None:
    """M holds integers and β is 1/2, so float32 sums are exact and all codes must be equal."""
    options: dict[str, Any] = {"bits": bits, "beta": 0.5, "damping": 0.5, "storage": "compact"}
    config = Config(method="naive", **options)
    ours = stack(n, 2, config, device)
    references = [
        oracle.Factor(n, oracle.Options(method="naive", **options), torch.float32) for _ in range(2)
    ]
    G = torch.randint(-3, 4, (2, n, n)).float()
    M = G @ G.mT
    update(ours, M.to(device), all_trusted(ours), config)
    actual = {name: tensor.cpu() for name, tensor in ours.tensors.items()}
    for row, (factor, m) in enumerate(zip(references, M, strict=True)):
        factor.update(m)
        kept = factor.kept
        assert actual["scales"][row].tolist() == kept.scales
        assert torch.equal(actual["top_scales"][row], torch.stack(kept.tops))
        assert torch.equal(actual["diagonal"][row], kept.diagonal)
        tiled = actual["codes"].dim() == 4
        width = actual["codes"].shape[-1] * 8 // bits if tiled else n
        codes = unpack(actual["codes"][row], bits, width).flatten()
        assert codes.tolist() == [code for block in kept.codes for code in block]


@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("n", [1, 31, 32, 64, 97, 130])
def test_tiles_hold_the_lower_triangle(n: int, tile: int) -> None:
    X = torch.randn(2, n, n)
    tiles = lower_tiles(X, tile)
    assert torch.equal(from_lower_tiles(tiles, n), X.tril(-1))
    assert int((tiles != 0).sum()) == 2 * n * (n - 1) // 2
    assert torch.equal(lower_tiles(X.mT, tile), lower_tiles(X.mT.contiguous(), tile))


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        (PAPER, 9.05, 9.07),
        ({"method": "eigen", "storage": "compact"}, 6.3, 6.43),
        ({"method": "cholesky", "storage": "paper"}, 9.05, 9.07),
        ({}, 4.4, 4.6),
        ({"method": "cholesky", "storage": "compact", "bits": 6, "root_bits": 4}, 5.5, 5.62),
        ({"method": "cholesky", "storage": "compact", "bits": 8}, 8.7, 8.9),
        ({"method": "naive", "storage": "compact"}, 4.4, 4.6),
    ],
    ids=str,
)
def test_bits_per_element_at_order_1200(options: dict[str, Any], least: float, most: float) -> None:
    assert least < bits_per_element(1200, **options) < most


@pytest.mark.parametrize("bits", BITS)
def test_small_orders_use_the_smallest_layout(bits: int) -> None:
    storage = CompactStorage(Quantizer(bits), "", "symmetric")
    for n in range(64, 200):
        codes = storage.layout(n)["codes"][0]
        side, blocks = oracle.triangle_blocks(n, bits)
        tiled = blocks[0][1].stop == side and len(blocks) % side == 0 and len(codes) == 3
        assert storage.layout(n)["scales"][0] == (len(blocks),)
        assert storage.tile(n) == (side if tiled else None)
    # Rows are used where the last tile would be almost empty.
    assert CompactStorage(Quantizer(4), "", "symmetric").tile(66) is None
    assert CompactStorage(Quantizer(4), "", "symmetric").tile(96) == 32
    assert CompactStorage(Quantizer(4), "", "symmetric").tile(1200) == 32
    assert CompactStorage(Quantizer(4), "", "symmetric").tile(2048) == 64


LLAMA2_7B = 32 * [(4096, 4096)] * 4 + 32 * [(11008, 4096)] * 3 + 2 * [(32000, 4096)]
GPT2 = [(50257, 768), (1024, 768)] + 12 * [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
# For images of 32 x 32: patches of 2 x 2, windows of 4 x 4.
SWIN_TINY = [(96, 12), (100, 768)]
for stage, depth in enumerate((2, 2, 6, 2)):
    width = 96 * 2**stage
    layer = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width), (49, 3 * 2**stage)]
    SWIN_TINY += depth * layer + ([(2 * width, 4 * width)] if stage < 3 else [])


@pytest.mark.parametrize(
    ("shapes", "order", "paper", "eigen", "cholesky"),
    [
        (SWIN_TINY, 1200, 7.0, 9.7, 13.5),
        (GPT2, 1200, 7.0, 9.7, 13.5),
        (LLAMA2_7B, 2048, 7.0, 10.1, 14.8),
    ],
    ids=["swin-tiny", "gpt2", "llama2-7b"],
)
def test_state_is_7_to_14_times_smaller_than_at_32_bits(
    shapes: list[tuple[int, int]], order: int, paper: float, eigen: float, cholesky: float
) -> None:
    def state(**options: Any) -> int:
        actual = estimate_memory(shapes, base=None, max_order=order, **options)
        return actual["statistics"] + actual["roots"]

    assert state(bits=32) / state(bits=4, **PAPER) > paper
    assert state(bits=32) / state(bits=4, method="eigen") > eigen
    assert state(bits=32) / state(bits=4) > cholesky


def test_a_singular_statistic_is_factorised_with_jitter_that_is_not_kept() -> None:
    """The statistic is the outer product of a vector with itself, plus rounding errors."""
    config = Config(method="cholesky", bits=32, beta=0.0)
    factors = stack(40, 2, config)
    x = torch.randn(2, 40, 1, generator=torch.Generator().manual_seed(0))
    M = x @ x.mT
    trusted = all_trusted(factors)
    assert update(factors, M, trusted, config) == 0
    A = factors.method.matrix(factors.tensors)
    assert relative_error(A, M) < 1e-3
    diagonal, expected = (X.diagonal(dim1=-2, dim2=-1) for X in (A, M))
    assert relative_error(diagonal, expected) < 1e-5


def test_a_zero_statistic_stays_zero() -> None:
    config = Config(method="cholesky", bits=4, beta=0.0)
    factors = stack(64, 2, config)
    M = gram(2, 64, torch.Generator().manual_seed(0))
    M[1] = 0.0
    assert update(factors, M, all_trusted(factors), config) == 0
    assert not factors.method.matrix(factors.tensors)[1].any()
    assert factors.method.matrix(factors.tensors)[0].any()


def test_updates_that_jitter_cannot_repair_are_discarded() -> None:
    config = Config(method="cholesky", bits=8)
    factors = stack(64, 2, config)
    before = {name: tensor.clone() for name, tensor in factors.tensors.items()}
    M = gram(2, 64, torch.Generator().manual_seed(0))
    M[1] = -torch.eye(64)
    assert update(factors, M, all_trusted(factors), config) == 1
    for name, tensor in factors.tensors.items():
        assert torch.equal(tensor[1], before[name][1]), name
    assert not torch.equal(factors.tensors["codes"][0], before["codes"][0])


def test_codes_are_the_nearest_for_rounded_scales() -> None:
    """Codes are chosen with the stored scale, which is rounded, not with the exact one."""
    storage = CompactStorage(Quantizer(8), "", "symmetric")
    X = gram(1, 130, torch.Generator().manual_seed(5))
    lower = X.tril(-1)
    error = (storage.decode(storage.encode(X.clone())).tril(-1) - lower).abs()
    row_maxima = torch.stack([part.abs().amax(-1) for part in lower.split(64, -1)], -1)
    bound = row_maxima.repeat_interleave(64, -1)[..., :130]
    # Half of linear2's widest gap between codes, plus one step of a quantised scale.
    assert (error <= bound * (0.5 * 2 * 2 / 255 + 2 / 255) + 1e-6 * X.abs().max()).all()


@pytest.mark.parametrize(
    "shape", ["symmetric", pytest.param("square", marks=slow), pytest.param("lower", marks=slow)]
)
@pytest.mark.parametrize(
    ("n", "bits", "tile"),
    [
        (17, 4, 32),
        (66, 3, 32),
        (66, 4, 64),
        pytest.param(66, 6, 32, marks=slow),
        (96, 4, 32),
        *(pytest.param(*case, marks=slow) for case in ((131, 3, 64), (131, 4, 64), (131, 8, 32))),
        pytest.param(190, 4, 64, marks=slow),
    ],
)
def test_kernels_and_torch_are_bitwise_equal(
    n: int,
    bits: int,
    tile: int,
    shape: Any,
    kernels: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kronbit.factors.storage.TILES", (tile,))
    storage = CompactStorage(Quantizer(bits), "", shape)
    X = gram(3, n, torch.Generator().manual_seed(n)).to(kernels)
    X[1] *= 1e-30  # almost all scales are zero
    X[1, 0, 0] = 1.0
    X[2] = X[2].round(decimals=1)  # values between two codes, and blocks of zeros
    for stack_view in (X, X.mT):
        by_kernels = storage.encode(stack_view.clone(memory_format=torch.preserve_format))
        restored = storage.decode(by_kernels)
        with monkeypatch.context() as without:
            without.setattr(guard, "why_not", lambda device: "a test")
            by_torch = storage.encode(stack_view.clone(memory_format=torch.preserve_format))
            expected = storage.decode(by_torch)
        assert list(by_kernels) == list(by_torch)
        for name, tensor in by_torch.items():
            assert torch.equal(by_kernels[name], tensor), name
        assert torch.equal(restored, expected)
        assert shape != "symmetric" or torch.equal(restored, restored.mT)


@slow
@pytest.mark.parametrize("method", ["eigen", "cholesky"])
def test_a_run_with_kernels_equals_a_run_with_torch(
    method: str, kernels: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps include updates and a refresh. Products are in float32, as in all these tests."""
    results = []
    for off in (None, "a test"):
        if off or kernels.type == "cpu":
            monkeypatch.setattr(guard, "why_not", lambda device, off=off: off)
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape).to(kernels)) for shape in ((40, 34), (34, 70))]
        start = [p.detach().clone() for p in params]
        optimizer = Shampoo(
            params,
            base="sgd",
            lr=0.1,
            bits=8,
            method=method,
            storage="compact",
            damping=0.1,
            update_every=1,
            refresh_every=2,
            min_quantized_numel=0,
        )
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape).to(kernels)
            optimizer.step()
        results.append([p.detach() - before for p, before in zip(params, start, strict=True)])
        assert optimizer.diagnostics()["discarded_roots"] == 0
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < 1e-3
