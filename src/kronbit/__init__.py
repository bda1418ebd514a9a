"""Second-order optimizers for PyTorch whose state takes 4 bits."""

from kronbit.algorithms import CASPR, KFAC, AdaBK, Shampoo
from kronbit.config import Config
from kronbit.estimate import estimate_memory
from kronbit.quantization import Quantized, Quantizer
from kronbit.routing import param_groups

__version__ = "0.1.0.dev0"

__all__ = [
    "CASPR",
    "KFAC",
    "AdaBK",
    "Config",
    "Quantized",
    "Quantizer",
    "Shampoo",
    "estimate_memory",
    "param_groups",
]
