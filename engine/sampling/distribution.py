"""A token of the distribution that temperature, min-p, top-k and top-p leave of a row of logits.

What is left of the vocabulary races (`race.py`), each token as fast as it is probable. So the token is a function of
row, parameters and key alone, and small changes of logits change it rarely.
"""

import math

import numpy as np
import numpy.typing as npt

from engine.sampling.largest import largest
from engine.sampling.nucleus import nucleus
from engine.sampling.race import first_to_arrive
from engine.sampling_params import SamplingParams

Row = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]

LOWEST = float(np.finfo(np.float32).min)


def draw(row: Row, params: SamplingParams, key: int, scratch: Weights) -> int:
    """The token that `key` draws.

    The order is vLLM's: temperature, min-p, top-k, top-p, each over what the ones before have left. top-p keeps the
    fewest best tokens whose probability reaches it. Weights are relative to the best token's, in float64.

    Args:
        row: [vocab_size], logits, finite or -inf, the largest finite.
        params: not greedy.
        key: 64 bits of the position, from `position_key`.
        scratch: [vocab_size], overwritten.
    """
    peak = float(row.max())
    ids = _candidates(row, peak, params)
    logits = row[ids]
    weights = _weights(logits, peak, params.temperature, out=scratch[: len(logits)])
    if params.min_p > 0.0:
        passing = weights >= params.min_p
        ids, logits, weights = ids[passing], logits[passing], weights[passing]
    if params.top_p < 1.0:
        kept = nucleus(logits, weights, params.top_p)
        ids, weights = ids[kept], weights[kept]
    return first_to_arrive(ids, weights, key)


def _candidates(row: Row, peak: float, params: SamplingParams) -> npt.NDArray[np.int64]:
    """Ids, ascending, of the tokens that top-k leaves, or of a few more than min-p leaves, or of all."""
    if params.top_k > 0:
        return np.sort(largest(row, params.top_k))
    if params.min_p > 0.0:
        bound = peak + params.temperature * math.log(params.min_p)
        # Lower by more than float32 rounds: which of them pass is decided on their weights.
        bound -= 1e-6 * (abs(peak) + abs(bound))
        return np.flatnonzero(row >= np.float32(max(bound, LOWEST)))
    return np.arange(len(row))


def _weights(logits: Row, peak: float, temperature: float, out: Weights) -> Weights:
    """e^((logit - peak) / temperature)"""
    np.subtract(logits, peak, out=out, dtype=np.float64)
    if temperature != 1.0:
        with np.errstate(over="ignore"):  # a tiny temperature makes -inf of a finite difference, as it should
            out /= temperature
    return np.exp(out, out=out)
