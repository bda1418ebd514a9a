"""Block-wise quantisation of preconditioners: mappings, packing, the quantiser."""

from kronbit.quantization.mappings import MAPPINGS, codebook, thresholds
from kronbit.quantization.quantizer import BITS, Quantized, Quantizer

__all__ = ["BITS", "MAPPINGS", "Quantized", "Quantizer", "codebook", "thresholds"]
