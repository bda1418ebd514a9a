"""Language models from the package transformers, built from their configurations."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from kronbit.lab.errors import import_optional, lab_error, refuse_unknown


def gpt2(**options: Any) -> nn.Module:
    """Build GPT-2, by default with 124 million parameters and without dropout.

    Args:
        **options: Fields of ``transformers.GPT2Config``.
    """
    defaults = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"))  # GPT-2's ids may exceed the vocabulary
    return _causal("gpt2", "GPT2Config", "GPT2LMHeadModel", {**defaults, **ids, **options})


def llama(**options: Any) -> nn.Module:
    """Build LLaMA, by default with 7 billion parameters.

    Args:
        **options: Fields of ``transformers.LlamaConfig``.
    """
    return _causal("llama", "LlamaConfig", "LlamaForCausalLM", options)


def _causal(name: str, config: str, model: str, options: dict[str, Any]) -> nn.Module:
    transformers = import_optional("transformers", "transformers", f"model {name!r}")
    make, wrap = getattr(transformers, config), getattr(transformers, model)
    known = [one for one in inspect.signature(make).parameters if one != "kwargs"]
    refuse_unknown(f"an option of model {name!r}", options, known)
    with lab_error(f"model {name!r}", Exception):  # transformers raises errors of many classes
        made: nn.Module = wrap(make(**{"use_cache": False, **options}))
    return made
