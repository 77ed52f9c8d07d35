"""The softmax between scores and values, of one row of scores."""

from typing import Any

import numba
import numpy as np

from engine.cpu_code import Array, as_element, kernel
from engine.cpu_math import exp_below_zero


@numba.njit(cache=True, nogil=True, fastmath=True)
def maximum(x: Array) -> Any:
    # A vector maximum exists only where NaN is ruled out. Should there be one, the exponentials below still see it.
    largest = x[0]
    for i in range(1, len(x)):
        largest = max(largest, x[i])
    return largest


@kernel
def weigh(scores: Array, scale: Any, weights: Array) -> Any:
    """weights = exp(scale · (scores - their maximum)), still to be divided by the result.

    Args:
        scores: [num_keys] float32, at least one.
        scale: float32, above 0.
        weights: [num_keys] float32, or uint16 meaning bfloat16.

    Returns:
        What the weights add up to, before they are rounded.
    """
    largest = maximum(scores)
    total = np.float32(0.0)
    for i in range(len(scores)):
        power = exp_below_zero((scores[i] - largest) * scale)
        total += power
        weights[i] = as_element(power, weights[i])
    return total
