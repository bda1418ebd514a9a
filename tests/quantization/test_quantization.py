"""The quantiser matches the printed codebooks and the oracle, code by code."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle
from support.allocations import Allocations
from torch._subclasses import FakeTensorMode

from kronbit import Quantized, Quantizer
from kronbit.quantization import BITS, MAPPINGS, codebook, thresholds
from kronbit.quantization.mappings import CODEBOOKS, THRESHOLDS
from kronbit.quantization.reference import pack, unpack

LOW_BITS = [bits for bits in BITS if bits < 32]
WIDTHS = pytest.mark.parametrize("bits", LOW_BITS)
EVERY_MAPPING = pytest.mark.parametrize("mapping", MAPPINGS)

quantizers = st.builds(
    Quantizer,
    bits=st.sampled_from(LOW_BITS),
    mapping=st.sampled_from(MAPPINGS),
    block_size=st.sampled_from([16, 48, 64, 128, 2048]),
)


def brute_force(x: torch.Tensor, quantizer: Quantizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the oracle's codes, not packed, and its scales, computed row by row."""
    rows = [
        oracle.quantize_row(row, quantizer.bits, quantizer.mapping, quantizer.block_size)
        for row in x.cpu().float().reshape(-1, x.shape[-1])
    ]
    codes = torch.tensor([codes for codes, _ in rows], dtype=torch.int32)
    scales = torch.stack([torch.stack(scales) for _, scales in rows])
    return codes.view(x.shape), scales.view(*x.shape[:-1], -1)


@pytest.mark.parametrize(("mapping", "bits"), list(oracle.PAPER_CODEBOOKS))
def test_codebooks_are_the_printed_ones(mapping: str, bits: int) -> None:
    printed = oracle.PAPER_CODEBOOKS[mapping, bits].split()
    assert [f"{value:.4f}".replace("-0.0000", "0.0000") for value in codebook(mapping, bits)] == [
        *printed
    ]


@WIDTHS
@EVERY_MAPPING
def test_codebooks_follow_their_formula_at_every_width(mapping: str, bits: int) -> None:
    expected = torch.tensor(oracle.codebook(mapping, bits), dtype=torch.float32)
    assert torch.equal(codebook(mapping, bits), expected)
    assert expected.diff().min() > 0
    assert 0.0 in expected
    assert 1.0 in expected


@WIDTHS
@EVERY_MAPPING
@pytest.mark.parametrize("block_size", [16, 64, 2048])
@pytest.mark.parametrize("length", [1, 15, 16, 63, 64, 65, 130, 200])
def test_codes_and_scales_match_the_oracle(
    bits: int, mapping: str, block_size: int, length: int, device: torch.device
) -> None:
    quantizer = Quantizer(bits, mapping, block_size)
    x = (torch.randn(3, 2, length) * torch.logspace(-3, 3, 2)[:, None]).to(device)
    quantized = quantizer.quantize(x)
    codes, scales = brute_force(x, quantizer)
    assert torch.equal(unpack(quantized.codes, bits, length).cpu(), codes)
    assert torch.equal(quantized.scales.cpu(), scales)
    assert quantized.codes.dtype == torch.uint8
    assert quantized.codes.shape == (3, 2, math.ceil(length * bits / 8))
    restored = quantizer.dequantize(quantized, length)
    values = codebook(mapping, bits)[codes.long()]
    blocks = torch.arange(length) // block_size
    assert torch.equal(restored.cpu(), values * scales[..., blocks])


@WIDTHS
@EVERY_MAPPING
def test_ties_take_the_lower_index_and_their_neighbours_the_nearest(
    bits: int, mapping: str, device: torch.device
) -> None:
    """Values are all midpoints and the next float32 on either side. A leading 1 sets the scale."""
    middle = thresholds(mapping, bits)
    around = [middle, *(torch.nextafter(middle, torch.full_like(middle, x)) for x in (-2.0, 2.0))]
    x = torch.cat([torch.ones(1), *around]).to(device)
    quantizer = Quantizer(bits, mapping, 2048)
    codes = unpack(quantizer.quantize(x).codes, bits, len(x)).cpu()
    assert torch.equal(codes, brute_force(x, quantizer)[0])


@pytest.mark.parametrize(
    ("bits", "codes", "packed"),
    [
        (8, [0, 255, 7], [0, 255, 7]),
        (4, [1, 2, 15], [0x21, 0x0F]),
        (6, [1, 2, 3, 4, 63], [0b10_000001, 0b0011_0000, 0b000100_00, 63]),
        (3, [1, 2, 3, 4, 5, 6, 7, 0, 5], [0b11_010_001, 0b0_101_100_0, 0b000_111_11, 0b101]),
    ],
)
def test_packing_is_a_little_endian_bit_stream(
    bits: int, codes: list[int], packed: list[int]
) -> None:
    tensor = torch.tensor(codes, dtype=torch.int32)
    assert pack(tensor, bits).tolist() == packed
    assert unpack(pack(tensor, bits), bits, len(codes)).tolist() == codes


@settings(deadline=None)
@given(st.sampled_from(LOW_BITS), st.integers(0, 200), st.integers(0, 2**31))
def test_packing_loses_nothing(bits: int, length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (3, length), generator=generator, dtype=torch.int32)
    packed = pack(codes, bits)
    assert packed.shape == (3, math.ceil(length * bits / 8))
    assert torch.equal(unpack(packed, bits, length), codes)


@settings(deadline=None, max_examples=50)
@given(quantizers, st.integers(1, 4), st.integers(0, 100), st.integers(0, 2**31))
def test_quantising_commutes_with_slicing_at_block_borders(
    quantizer: Quantizer, whole: int, rest: int, seed: int
) -> None:
    border = whole * quantizer.block_size
    x = torch.randn(2, border + rest, generator=torch.Generator().manual_seed(seed))
    cut = border * quantizer.bits // 8
    all_codes, all_scales = quantizer.quantize(x)
    for piece, codes, scales in (
        (x[:, :border], all_codes[:, :cut], all_scales[:, :whole]),
        (x[:, border:], all_codes[:, cut:], all_scales[:, whole:]),
    ):
        quantized = quantizer.quantize(piece)
        assert torch.equal(quantized.codes, codes)
        assert torch.equal(quantized.scales, scales)


@settings(deadline=None, max_examples=50)
@given(quantizers, st.lists(st.integers(1, 4), max_size=3), st.integers(1, 150))
def test_leading_axes_do_not_matter(quantizer: Quantizer, lead: list[int], length: int) -> None:
    x = torch.randn(*lead, length)
    quantized = quantizer.quantize(x)
    flat = quantizer.quantize(x.reshape(-1, length))
    assert torch.equal(quantized.codes.reshape(flat.codes.shape), flat.codes)
    assert torch.equal(quantized.scales.reshape(flat.scales.shape), flat.scales)
    if x.dim() == 2:  # transposed memory does not matter either
        transposed = quantizer.quantize(x.t())
        assert torch.equal(transposed.codes, quantizer.quantize(x.t().contiguous()).codes)


@WIDTHS
@EVERY_MAPPING
def test_error_is_at_most_half_the_widest_gap(bits: int, mapping: str) -> None:
    x = torch.randn(100, 64)
    quantizer = Quantizer(bits, mapping, 64)
    error = (quantizer.dequantize(quantizer.quantize(x), 64) - x).abs()
    # At 4 bits, the dynamic tree has no code below -0.8875, so there is a gap down to -1.
    values = torch.cat([torch.tensor([-1.0]), codebook(mapping, bits)])
    half_gap = torch.maximum(values.diff()[1:].max() / 2, values.diff()[0])
    assert (error <= (half_gap + 1e-6) * x.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("bits", BITS)
def test_zero_blocks_give_zeros_and_tiny_ones_survive(bits: int, device: torch.device) -> None:
    quantizer = Quantizer(bits, "linear2", 16)
    x = torch.zeros(2, 40, device=device)
    x[1, 20] = 1e-42  # denormal: 1 / scale would overflow
    restored = quantizer.dequantize(quantizer.quantize(x), 40)
    assert torch.equal(restored, x)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 0, 7)])
def test_empty_tensors_keep_their_shape(bits: int, shape: tuple[int, ...]) -> None:
    quantizer = Quantizer(bits)
    quantized = quantizer.quantize(torch.zeros(shape))
    assert quantizer.dequantize(quantized, shape[-1]).shape == shape


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_quantised_as_their_float32_values(bits: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, 70).to(dtype)
    quantizer = Quantizer(bits)
    quantized, expected = quantizer.quantize(x), quantizer.quantize(x.float())
    assert all(torch.equal(a, b) for a, b in zip(quantized, expected, strict=True))
    restored = quantizer.dequantize(quantized, 70, dtype)
    assert restored.dtype == dtype
    assert torch.equal(restored, quantizer.dequantize(expected, 70).to(dtype))


def test_32_bits_are_the_identity_and_do_not_share_memory() -> None:
    x = torch.randn(3, 5)
    quantizer = Quantizer(32)
    quantized = quantizer.quantize(x)
    restored = quantizer.dequantize(quantized, 5)
    assert torch.equal(restored, x)
    assert len({t.data_ptr() for t in (x, quantized.codes, restored)}) == 3


@pytest.mark.parametrize("bits", LOW_BITS)
@pytest.mark.parametrize(
    ("length", "block_size"), [(65, 64), (1200, 64), (100, 2048), (2049, 2048)]
)
def test_no_temporary_is_larger_than_twice_the_input(
    bits: int, length: int, block_size: int
) -> None:
    quantizer, x = Quantizer(bits, "linear2", block_size), torch.randn(20, length)
    with Allocations() as allocations:
        quantized = quantizer.quantize(x)
    with Allocations() as back:
        quantizer.dequantize(quantized, length)
    size = x.numel() * x.element_size()
    assert 0 < allocations.largest <= 2 * size
    assert 0 < back.largest <= 2 * size


def test_4_bits_at_block_64_take_4_and_a_half_bits() -> None:
    quantized = Quantizer(4, "linear2", 64).quantize(torch.randn(128, 1280))
    size = sum(tensor.numel() * tensor.element_size() for tensor in quantized)
    assert size * 8 == 4.5 * 128 * 1280


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, "linear2", 64), r"bits must be one of \(3, 4, 6, 8, 32\); got 5"),
        ((4, "nf4", 64), r"mapping must be one of .*'linear2'.*; got 'nf4'"),
        ((4, "linear2", 8), "block_size must be a multiple of 16 from 16 to 2048; got 8"),
        ((4, "linear2", 100), "got 100"),
        ((4, "linear2", 4096), "got 4096"),
        ((4.0, "linear2", 64), "bits must be one of .*; got 4.0"),
        ((4, "linear2", 64.0), "block_size must be a multiple .*; got 64.0"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[int, str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quantizer(*arguments)


@pytest.mark.parametrize("length", [64, 100])
def test_gradients_do_not_flow_through_codes(length: int) -> None:
    x = torch.randn(2, length, requires_grad=True)
    quantizer = Quantizer(4)
    quantized = quantizer.quantize(x)
    assert not quantized.scales.requires_grad
    assert not quantizer.dequantize(quantized, length).requires_grad
    scales = quantized.scales.clone().requires_grad_()
    assert not quantizer.dequantize(Quantized(quantized.codes, scales), length).requires_grad


def test_tables_made_under_a_fake_tensor_mode_are_not_cached() -> None:
    CODEBOOKS.clear()
    THRESHOLDS.clear()
    quantizer = Quantizer(6, "dt", 32)
    with FakeTensorMode():
        quantizer.encode(torch.zeros(3, 32))
    quantizer.quantize(torch.zeros(3, 32))


def test_bad_input_is_refused_with_its_index() -> None:
    quantizer = Quantizer(4)
    x = torch.zeros(2, 3)
    x[1, 2] = torch.nan
    with pytest.raises(ValueError, match=r"1 of 6 are not, the first is nan at index \(1, 2\)"):
        quantizer.quantize(x)
    with pytest.raises(ValueError, match="finite"):
        quantizer.quantize(torch.tensor([1e300], dtype=torch.float64))
    with pytest.raises(ValueError, match="0-d"):
        quantizer.quantize(torch.tensor(1.0))
    with pytest.raises(TypeError, match="int64"):
        quantizer.quantize(torch.zeros(3, dtype=torch.int64))
    codes, scales = quantizer.quantize(torch.randn(2, 70))
    with pytest.raises(ValueError, match="codes for length 70"):
        quantizer.dequantize(Quantized(codes[:, :-1], scales), 70)
    with pytest.raises(ValueError, match="scales for length 70"):
        quantizer.dequantize(Quantized(codes, scales[:, :-1]), 70)
