"""Functions of floating-point numbers that vectorize, which those of the C library do not."""

from typing import Any

import numpy as np

from engine.cpu_code import kernel


@kernel
def exp_below_zero(x: Any) -> Any:
    """e^x for x <= 0 within 2e-7 (relative), in plain arithmetic, so that a loop of it vectorizes."""
    if x < np.float32(-87.0):  # written so that NaN passes
        x = np.float32(-87.0)
    exponent = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    # ln 2 in two parts, the first exact in few bits: the remainder loses nothing.
    r = x - exponent * np.float32(0.693359375)
    r = r + exponent * np.float32(2.12194440e-4)
    p = np.float32(1.0 / 5040.0)
    p = p * r + np.float32(1.0 / 720.0)
    p = p * r + np.float32(1.0 / 120.0)
    p = p * r + np.float32(1.0 / 24.0)
    p = p * r + np.float32(1.0 / 6.0)
    p = p * r + np.float32(0.5)
    p = p * r * r + r + np.float32(1.0)
    return p * np.uint32(np.uint32(np.int32(exponent) + np.int32(127)) << np.uint32(23)).view(np.float32)
