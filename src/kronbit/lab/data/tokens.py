"""Text as tokens: files of uint16, any text through a tokenizer, or what CPython brings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kronbit.lab.data.images import Setting
from kronbit.lab.data.pictures import missing
from kronbit.lab.errors import LabError
from kronbit.lab.randomness import seed_of

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

ASCII = 128
_LOOKED_AT = 50_000_000  # tokens whose ids are checked beforehand


class Tokens:
    """Windows of a long row of tokens; the target is the next token.

    Args:
        setting: For whom.
        train: The tokens, in memory or mapped.
        test: Those held out; evaluated in windows side by side.
        length: Of a window.
        outputs: One more than the largest token, if known.
    """

    classifies = False

    def __init__(
        self, setting: Setting, train: Array, test: Array, length: int, outputs: int | None = None
    ) -> None:
        if setting.holdout:
            train, test = _divided(train, setting.holdout)
        for name, part in (("training", train), ("held-out", test)):
            if len(part) <= length + 1:
                raise LabError(
                    f"{len(part)} {name} tokens are too few for windows of {length}: "
                    "--set data.length=..."
                )
        self._setting, self._train, self._test, self._length = setting, train, test, length
        self.examples = len(train) // length
        self.outputs = outputs or 1 + max(int(test.max()), int(train[:_LOOKED_AT].max()))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, at random places."""
        setting = self._setting
        # The same starts on all ranks, of which each takes its part.
        generator = torch.Generator().manual_seed(seed_of("tokens", setting.seed, step))
        last = len(self._train) - self._length - 1
        starts = torch.randint(last + 1, (setting.batch,), generator=generator)
        return self._windows(self._train, setting.own(starts))

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets for evaluation."""
        setting = self._setting
        starts = torch.arange(0, len(self._test) - self._length, self._length)
        share = max(1, setting.batch // setting.ranks)
        for some in starts[setting.rank :: setting.ranks].split(share):
            yield self._windows(self._test, some)

    def _windows(self, tokens: Array, starts: Tensor) -> tuple[Tensor, Tensor]:
        places = starts[:, None] + torch.arange(self._length + 1)
        found = torch.from_numpy(tokens[places.numpy()].astype("int64"))
        if self._setting.device.type == "cuda":
            found = found.pin_memory()
        found = found.to(self._setting.device, non_blocking=True)
        return found[:, :-1], found[:, 1:]


def _mapped(path: Path) -> Array:
    import numpy as np

    if not path.is_file():
        layout = "tokens as uint16, as nanoGPT's prepare.py writes them"
        raise missing(path, layout, "https://github.com/karpathy/nanoGPT/tree/master/data")
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise LabError(f"{path} has {size} bytes: not a file of uint16 tokens")
    return np.memmap(path, dtype=np.uint16, mode="r")


def tokens(setting: Setting, train: str, val: str, length: int = 1024) -> Tokens:
    """Files of uint16 tokens, memory-mapped.

    Args:
        setting: For whom.
        train: A file, below the data folder.
        val: The held-out one.
        length: Tokens of a window.
    """
    folder = setting.folder
    return Tokens(setting, _mapped(folder / train), _mapped(folder / val), int(length))


def text(
    setting: Setting,
    path: str,
    tokenizer: str = "bytes",
    length: int = 256,
    held_out: float = 0.1,
    cache: str | None = None,
) -> Tokens:
    """A text file.

    Args:
        setting: For whom.
        path: The file, below the data folder.
        tokenizer: ``bytes``, ``char`` (ASCII), or a tokenizer of transformers: a folder, or a name
            that is in its cache already.
        length: Tokens of a window.
        held_out: Which share, at the end, is held out.
        cache: A file, below the data folder, that keeps the tokens (``.npy``) and is memory-mapped;
            written if it is not there or older than the text.
    """
    file = setting.folder / path
    if not file.is_file():
        raise missing(file, "a text file", "wherever you like")
    if cache is None:
        encoded, outputs = _encoded(_read(file), tokenizer)
    else:
        encoded, outputs = _cached(file, tokenizer, setting.folder / cache), None
    return _parted(setting, encoded, int(length), float(held_out), outputs)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"cannot read {file} as UTF-8 text: {error}") from error


def _cached(file: Path, tokenizer: str, cache: Path) -> Array:
    """Tokens in a file of their own, mapped; several ranks may write it, each a whole one."""
    import numpy as np

    try:
        if not cache.is_file() or cache.stat().st_mtime < file.stat().st_mtime:
            encoded, _ = _encoded(_read(file), tokenizer)
            aside = cache.with_name(f"{cache.name}.{os.getpid()}.new")
            with aside.open("wb") as opened:
                np.save(opened, encoded)
            os.replace(aside, cache)
        found: Array = np.load(cache, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise LabError(f"cannot keep tokens in {cache}: {error}") from error
    return found


def pydoc(setting: Setting, length: int = 128, held_out: float = 0.1) -> Tokens:
    """The Python reference that ``help()`` shows, character by character; in every CPython."""
    from pydoc_data.topics import topics

    joined = "\n".join(topics[name] for name in sorted(topics))
    encoded, outputs = _encoded(joined, "char")
    return _parted(setting, encoded, int(length), float(held_out), outputs)


def _parted(
    setting: Setting, encoded: Array, length: int, held_out: float, outputs: int | None
) -> Tokens:
    if not 0 < held_out < 1:
        raise LabError(f"data.held_out is a share between 0 and 1; got {held_out}")
    return Tokens(setting, *_divided(encoded, held_out), length, outputs)


def _divided(tokens: Array, share: float) -> tuple[Array, Array]:
    """The tokens without their end, and the end."""
    first = len(tokens) - int(share * len(tokens))
    return tokens[:first], tokens[first:]


def _encoded(found: str, tokenizer: str) -> tuple[Array, int | None]:
    import numpy as np

    if tokenizer == "char":
        return np.frombuffer(found.encode("ascii", "replace"), dtype=np.uint8), ASCII
    if tokenizer == "bytes":
        return np.frombuffer(found.encode("utf-8"), dtype=np.uint8), 256
    try:
        from transformers import AutoTokenizer

        own = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    except (ImportError, OSError, ValueError) as error:
        raise LabError(
            f"cannot open the tokenizer {tokenizer!r}: give bytes, char, or a folder with "
            f"tokenizer files ({' '.join(str(error).split())[:200]})"
        ) from error
    return np.array(own(found)["input_ids"], dtype=np.uint32), len(own)
