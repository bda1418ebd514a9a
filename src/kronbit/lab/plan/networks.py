"""Networks to plan for: a preset, a recipe, a transformers configuration, or a factory."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kronbit.lab.errors import LabError, import_optional, lab_error, one_line
from kronbit.lab.models import build
from kronbit.lab.plan.activations import Passes
from kronbit.lab.precision import DTYPES
from kronbit.lab.recipe import Recipe, find_recipe, recipe_names

_LLAMA_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)
_LLAMA_SIZES = {
    "llama-130m": (768, 2048, 12, 12, 12, 32000),
    "llama-350m": (1024, 2736, 24, 16, 16, 32000),
    "llama2-7b": (4096, 11008, 32, 32, 32, 32000),
    "llama3-8b": (4096, 14336, 32, 32, 8, 128256),
    "llama2-70b": (8192, 28672, 80, 64, 8, 32000),
}
# Networks of the paper, and a few larger ones: arguments of ``kronbit.lab.models.build``.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    # 50304 is the vocabulary of 50257, padded to a multiple of 64 for speed.
    "gpt2-124m": {"name": "gpt2", "vocab_size": 50304},
    **{
        name: {"name": "llama", **dict(zip(_LLAMA_FIELDS, sizes, strict=True))}
        for name, sizes in _LLAMA_SIZES.items()
    },
    "vit-b32": {"name": "vit-base-32"},
    "resnet50": {"name": "resnet50"},
    "swin-tiny": {"name": "swin-tiny", "classes": 1000, "image": 224, "patch": 4, "window": 7},
}
_SIDES = {"digits": 8, "cifar100": 32, "tiny-imagenet": 64}  # of data sets with one image size


@dataclass(frozen=True)
class Network:
    """A network, with the training settings of its source."""

    name: str  # given by the user
    make: Callable[[], nn.Module]  # on the default device
    dtype: str = "fp32"
    length: int = 256  # of sequences
    image: int = 224  # side of images
    batch: int | None = None  # examples per pass
    repeated: bool = False  # a step takes several passes
    amp: str = "off"
    base: str = "adamw"
    base_options: Mapping[str, Any] = field(default_factory=dict)
    shampoo: Mapping[str, Any] = field(default_factory=dict)  # and CASPR
    kfac: Mapping[str, Any] = field(default_factory=dict)  # and AdaBK

    def build(self, device: str, checkpointing: bool = False) -> nn.Module:
        """Build the network; on ``meta``, its parameters take no memory.

        With ``checkpointing``, the backward pass recomputes layers.
        """
        kept = torch.get_default_dtype()
        torch.set_default_dtype(DTYPES[self.dtype])
        try:
            with torch.device(device):
                made = self.make()
        except (LabError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise LabError(f"{self.name} cannot be built: {one_line(error)}") from error
        finally:
            torch.set_default_dtype(kept)
        if not isinstance(made, nn.Module):
            raise LabError(f"{self.name} returns {type(made).__name__}, not an nn.Module")
        if not any(p.requires_grad for p in made.parameters()):
            raise LabError(f"{self.name} has no parameters to train")
        if checkpointing:
            enable = getattr(made, "gradient_checkpointing_enable", None)
            if enable is None:
                raise LabError(
                    f"{self.name} has no gradient_checkpointing_enable(), unlike models "
                    "of transformers: leave --checkpointing out"
                )
            enable()
        return made.to(DTYPES[self.dtype])

    def passes(self, model: nn.Module) -> Passes | None:
        """Infer the shape of an example from the first layer; ``None`` if no layer defines it."""
        kinds = (nn.Embedding, nn.Conv2d, nn.Linear)
        shape: tuple[int, ...]
        match first := next((m for m in model.modules() if isinstance(m, kinds)), None):
            case nn.Embedding():
                shape = (self.length,)
            case nn.Conv2d():
                side = getattr(getattr(model, "config", None), "image_size", self.image)
                shape = (first.in_channels, *((side, side) if isinstance(side, int) else side))
            case nn.Linear():
                shape = (first.in_features,)
            case _:
                return None
        return Passes(shape, isinstance(first, nn.Embedding), self.amp, self.repeated)


def resolve_model(name: str) -> Network:
    """Find a network by its name.

    The name is a preset, a recipe or its YAML file, a folder with a ``config.json`` of
    transformers, or ``package.module:factory``.
    """
    path = Path(name)
    if name in PRESETS:
        dtype = "bf16" if "vocab_size" in PRESETS[name] else "fp32"
        return Network(name, partial(build, **PRESETS[name]), dtype)
    if name in recipe_names() or path.suffix in (".yaml", ".yml"):
        return _of_recipe(find_recipe(name), name)
    if path.is_dir() or path.name == "config.json":
        return _of_folder(path if path.is_dir() else path.parent, name)
    if ":" in name:
        with lab_error(f"cannot import {name}", Exception):  # importing can raise anything
            factory: Any = pkgutil.resolve_name(name)
        if not callable(factory):
            raise LabError(f"{name} is not callable: give a function that returns an nn.Module")
        return Network(name, factory)
    close = difflib.get_close_matches(name, [*PRESETS, *recipe_names()], n=3, cutoff=0.5)
    near = f"nearest: {', '.join(close)}" if close else f"presets: {', '.join(PRESETS)}"
    raise LabError(
        f"there is no model {name!r}; {near}; else give a recipe, a folder with config.json, or "
        "package.module:factory"
    )


def _of_recipe(recipe: Recipe, name: str) -> Network:
    data, part = recipe.data, recipe.micro_batch or recipe.batch
    side = data.get("image", _SIDES.get(data["name"], Network.image))
    return Network(
        name,
        partial(build, **recipe.model),
        recipe.dtype,
        length=data.get("length", Network.length),
        image=recipe.model.get("image", side),
        batch=part,
        repeated=part < recipe.batch,
        amp=recipe.amp,
        base=recipe.base,
        base_options=recipe.base_options,
        shampoo={**recipe.shampoo, **recipe.options},
        kfac={**recipe.kfac, **recipe.options},
    )


def _of_folder(folder: Path, name: str) -> Network:
    if not (folder / "config.json").is_file():
        raise LabError(f"{name} has no config.json: give the folder of a transformers model")
    transformers = import_optional("transformers", "transformers", name)
    with lab_error(f"cannot read {name}/config.json", OSError, ValueError, KeyError):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    config.use_cache = False
    architecture = next(iter(config.architectures or []), "")
    # A configuration without an architecture is usually that of a language model.
    make = getattr(transformers, architecture, transformers.AutoModelForCausalLM.from_config)
    dtype = "fp32" if getattr(config, "dtype", None) in (torch.float32, "float32") else "bf16"
    return Network(name, partial(make, config), dtype)
