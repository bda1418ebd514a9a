"""Text as tokens: files of uint16, text files with a tokenizer, or the docs in CPython."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kronbit.lab.data.images import Pair, Setting, moved
from kronbit.lab.data.pictures import require
from kronbit.lab.errors import LabError, lab_error
from kronbit.lab.randomness import seed_of

Array = np.ndarray[Any, Any]

ASCII = 128
_LOOKED_AT = 50_000_000  # tokens whose ids are checked when a data set is opened


class Tokens:
    """Windows of a long sequence of tokens. The target is the next token.

    The held-out tokens are evaluated in adjacent windows. ``outputs`` is one more than the largest
    token, if known.
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

    def batch(self, step: int) -> Pair:
        """Return inputs and targets of a step, at random positions."""
        setting = self._setting
        # All ranks draw the same starts, and each uses its part of them.
        generator = torch.Generator().manual_seed(seed_of("tokens", setting.seed, step))
        last = len(self._train) - self._length - 1
        starts = torch.randint(last + 1, (setting.batch,), generator=generator)
        return self._windows(self._train, setting.local(starts))

    def held_out(self) -> Iterator[Pair]:
        """Yield inputs and targets for evaluation."""
        setting = self._setting
        starts = torch.arange(0, len(self._test) - self._length, self._length)
        for batch in starts[setting.rank :: setting.ranks].split(setting.share):
            yield self._windows(self._test, batch)

    def _windows(self, tokens: Array, starts: Tensor) -> Pair:
        positions = starts[:, None] + torch.arange(self._length + 1)
        chosen = torch.from_numpy(tokens[positions.numpy()].astype("int64"))
        windows = moved(chosen, self._setting.device)
        return windows[:, :-1], windows[:, 1:]


def _mapped(path: Path) -> Array:
    layout = "tokens as uint16, as nanoGPT's prepare.py writes them"
    origin = "https://github.com/karpathy/nanoGPT/tree/master/data"
    require(path.is_file(), path, layout, origin)
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise LabError(f"{path} has {size} bytes: not a file of uint16 tokens")
    return np.memmap(path, dtype=np.uint16, mode="r")


def tokens(setting: Setting, train: str, val: str, length: int = 1024) -> Tokens:
    """Open two files of uint16 tokens below the data folder, memory-mapped."""
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
    """Open a text file below the data folder, and hold out a share at its end.

    The tokenizer is ``bytes``, ``char`` (ASCII), or one of transformers: a folder, or a name that
    is in its cache. ``cache`` is a ``.npy`` file for the tokens, below the data folder, too. It is
    memory-mapped, and written if it is missing or older than the text.
    """
    file = setting.folder / path
    require(file.is_file(), file, "a text file", "any source")
    if cache is None:
        ids, outputs = _encoded(_read(file), tokenizer)
    else:
        ids, outputs = _cached(file, tokenizer, setting.folder / cache), None
    return _split(setting, ids, outputs, length, held_out)


def _read(file: Path) -> str:
    with lab_error(f"cannot read {file} as UTF-8 text", OSError, UnicodeDecodeError):
        return file.read_text(encoding="utf-8")


def _cached(text_file: Path, tokenizer: str, cache: Path) -> Array:
    """Return tokens from a memory-mapped cache. Ranks may write it at once: each replaces it."""
    with lab_error(f"cannot keep tokens in {cache}", OSError, ValueError):
        if not cache.is_file() or cache.stat().st_mtime < text_file.stat().st_mtime:
            ids, _ = _encoded(_read(text_file), tokenizer)
            temporary = cache.with_name(f"{cache.name}.{os.getpid()}.new")
            with temporary.open("wb") as file:
                np.save(file, ids)
            os.replace(temporary, cache)
        cached: Array = np.load(cache, mmap_mode="r")
    return cached


def pydoc(setting: Setting, length: int = 128, held_out: float = 0.1) -> Tokens:
    """Open the reference of Python that ``help()`` shows, as characters. CPython contains it."""
    from pydoc_data.topics import topics

    joined = "\n".join(topics[name] for name in sorted(topics))
    return _split(setting, *_encoded(joined, "char"), length, held_out)


def _split(setting: Setting, ids: Array, outputs: int | None, length: int, share: float) -> Tokens:
    share = float(share)
    if not 0 < share < 1:
        raise LabError(f"data.held_out must be a share between 0 and 1; got {share}")
    return Tokens(setting, *_divided(ids, share), int(length), outputs)


def _divided(tokens: Array, share: float) -> tuple[Array, Array]:
    """Split off a share of the tokens at the end."""
    first = len(tokens) - int(share * len(tokens))
    return tokens[:first], tokens[first:]


def _encoded(content: str, tokenizer: str) -> tuple[Array, int | None]:
    if tokenizer == "char":
        return np.frombuffer(content.encode("ascii", "replace"), dtype=np.uint8), ASCII
    if tokenizer == "bytes":
        return np.frombuffer(content.encode("utf-8"), dtype=np.uint8), 256
    problem = f"cannot open the tokenizer {tokenizer!r} (give bytes, char, or a folder with one)"
    with lab_error(problem, ImportError, OSError, ValueError, most=200):
        from transformers import AutoTokenizer

        encode = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    return np.array(encode(content)["input_ids"], dtype=np.uint32), len(encode)
