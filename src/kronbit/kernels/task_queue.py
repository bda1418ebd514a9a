"""Programs that wait for each other in one launch.

Work is a sequence of tasks, which may read the results of earlier tasks. Every program takes the
next free task. The program with the first unfinished task never waits, so the launch always makes
progress, however few programs run at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def take(counter):
    """Take the next task; return its number."""
    return tl.atomic_add(counter, 1, sem="relaxed")


@triton.jit
def wait_for(counter, count):
    """Wait until a counter reaches a number. Writes before its increments are then visible."""
    while tl.atomic_add(counter, 0, sem="acquire") < count:
        pass
    tl.debug_barrier()


@triton.jit
def tell(counter):
    """Increment a counter after all previous writes of the program."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")
