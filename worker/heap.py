"""The objects of a worker that has started: they stay, so the garbage collector need not look through them again.

A pool of a million blocks is a million Python objects. A collection of all generations, which comes now and then by
itself, would stop every request for 0.6 s.
"""

import gc


def settle_heap() -> None:
    """To be called once, when all is built and before work begins."""
    gc.collect()
    gc.freeze()
