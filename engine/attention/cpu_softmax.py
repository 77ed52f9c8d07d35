"""The softmax between scores and values, of one row of scores."""

from typing import Any

import numba

from engine.cpu_code import Array, as_element, kernel
from engine.cpu_math import exp_below_zero
from engine.cpu_sums import row_sum


@numba.njit(cache=True, nogil=True, fastmath=True)
def maximum(x: Array) -> Any:
    # Each of four chains waits for itself alone. Where NaN is ruled out a maximum is one instruction; should there be
    # one, the exponentials below still see it.
    first = second = third = fourth = x[0]
    whole = len(x) // 4 * 4
    for i in range(0, whole, 4):
        first, second = max(first, x[i]), max(second, x[i + 1])
        third, fourth = max(third, x[i + 2]), max(fourth, x[i + 3])
    for i in range(whole, len(x)):
        first = max(first, x[i])
    return max(max(first, second), max(third, fourth))


@kernel
def weigh(scores: Array, scale: Any, weights: Array) -> Any:
    """weights = exp(scale · (scores - their maximum)), still to be divided by the result.

    Args:
        scores: [num_keys] float32, at least one; overwritten.
        scale: float32, above 0.
        weights: [num_keys] float32, or uint16 meaning bfloat16.

    Returns:
        What the weights add up to, before they are rounded.
    """
    largest = maximum(scores)
    for i in range(len(scores)):
        scores[i] = exp_below_zero((scores[i] - largest) * scale)
    for i in range(len(scores)):
        weights[i] = as_element(scores[i], weights[i])
    return row_sum(scores, 0, len(scores))
