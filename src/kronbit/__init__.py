"""Second-order optimizers for PyTorch whose state takes 4 bits."""

from kronbit.algorithms import CASPR, KFAC, AdaBK, Shampoo
from kronbit.config import Config
from kronbit.distributed.consolidation import consolidate_state_dict, load_consolidated
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
    "consolidate_state_dict",
    "estimate_memory",
    "load_consolidated",
    "param_groups",
]
