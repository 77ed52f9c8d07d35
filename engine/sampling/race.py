"""The race that draws a token: each arrives after a random time, the first wins.

Arrival times are exponential, the faster the heavier the token: -log(1 - u) / weight, with a `u` of the token's own.
The first to arrive is token t with probability weight(t) / (sum of all), which is the Gumbel-max trick by another name
(Maddison, Tarlow, Minka: "A* sampling", NIPS 2014).

Against one `u` for all and the inverse of the cumulative distribution, which needs fewer numbers, it has the property
that serving needs: nearly the same weights give the same token. Which kernel computed the KV (a prefill chunk, a decode
step, another worker) changes logits in their last bits. That moves every border of a cumulative distribution a little,
and exchanges tokens of nearly equal weight in it. A race changes its winner only if the second was as close behind as
the bits that changed.
"""

import math

import numba
import numpy as np
import numpy.typing as npt

from engine.sampling.uniform import FIRST_FACTOR, INCREMENT, SECOND_FACTOR

_INCREMENT = np.uint64(INCREMENT)
_FIRST_FACTOR = np.uint64(FIRST_FACTOR)
_SECOND_FACTOR = np.uint64(SECOND_FACTOR)
_S11, _S27, _S30, _S31 = (np.uint64(bits) for bits in (11, 27, 30, 31))
_ONE = np.uint64(1)


@numba.njit(cache=True, nogil=True)
def _first(token_ids: npt.NDArray[np.int64], weights: npt.NDArray[np.float64], key: np.uint64) -> int:
    first, first_arrival = -1, math.inf
    for i in range(len(token_ids)):
        x = key + (np.uint64(token_ids[i]) + _ONE) * _INCREMENT
        x = (x ^ (x >> _S30)) * _FIRST_FACTOR
        x = (x ^ (x >> _S27)) * _SECOND_FACTOR
        x = x ^ (x >> _S31)
        u = (np.float64(x >> _S11) + 0.5) * 2.0**-53
        # -log(1 - u) is at least u: most cannot be first, and need no logarithm.
        if u < first_arrival * weights[i]:
            arrival = -math.log1p(-u) / weights[i]
            if arrival < first_arrival:
                first, first_arrival = i, arrival
    return first


def first_to_arrive(token_ids: npt.NDArray[np.int64], weights: npt.NDArray[np.float64], key: int) -> int:
    """The token that arrives first; of equals the one that comes first in the arrays.

    Args:
        token_ids: [n], at least one.
        weights: [n], not negative, at least one of them above 0.
        key: 64 bits of the position, from `position_key`.
    """
    return int(token_ids[_first(token_ids, weights, np.uint64(key))])
