"""Programs that wait for each other inside of one launch.

Work is a sequence of tasks, each of which may need what earlier ones have written. Programs take
the next one that nobody has taken; whoever has the first one that is not done waits for nobody. So
there is always one who goes on, however few programs are at work at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def take(counter):
    """The number of the next task."""
    return tl.atomic_add(counter, 1, sem="relaxed")


@triton.jit
def wait_for(counter, count):
    """Wait until a counter has come to some number; then see all that was written before."""
    while tl.atomic_add(counter, 0, sem="acquire") < count:
        pass
    tl.debug_barrier()


@triton.jit
def tell(counter):
    """Count one more, after all that was written."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")
