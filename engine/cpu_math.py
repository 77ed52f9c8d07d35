"""Functions of floating-point numbers that vectorize, which those of the C library do not."""

from typing import Any

import numpy as np

from engine.cpu_code import kernel


@kernel
def exp_below_zero(x: Any) -> Any:
    """e^x for a float32 x <= 0, in plain arithmetic, so that a loop of it vectorizes.

    The relative error is below 3e-7 + |x| · 6e-8: that of a polynomial for 2^f, |f| <= 0.5 (minimax, degree 5, 8e-8),
    and of the exponent, which is rounded. NaN stays NaN.
    """
    x = x * np.float32(1.4426950408889634)
    if x < np.float32(-126.0):  # written so that NaN passes
        x = np.float32(-126.0)
    exponent = np.floor(x + np.float32(0.5))
    f = x - exponent
    p = np.float32(0.001327647129073739)
    p = p * f + np.float32(0.009675541892647743)
    p = p * f + np.float32(0.05550713092088699)
    p = p * f + np.float32(0.24022120237350464)
    p = p * f + np.float32(0.6931469440460205)
    p = p * f + np.float32(1.0)
    return p * np.uint32(np.uint32(np.int32(exponent) + np.int32(127)) << np.uint32(23)).view(np.float32)
