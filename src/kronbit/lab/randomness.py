"""Seeds that are functions of what they are for."""

from __future__ import annotations

import hashlib


def seed_of(*parts: int | str) -> int:
    """A seed of 32 bits, all that torch's generator of the CPU looks at.

    Args:
        *parts: Whatever tells this use apart from all others: purpose, seed, step, rank.
    """
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")
