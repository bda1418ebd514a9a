"""Seeds that are derived from their purpose."""

from __future__ import annotations

import hashlib


def seed_of(*parts: int | str) -> int:
    """Return a seed of 32 bits; torch's CPU generator uses no more.

    The parts identify the purpose: a name, the run's seed, the step, the rank.
    """
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")
