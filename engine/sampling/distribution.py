"""A token of the distribution that temperature, min-p, top-k and top-p leave of a row of logits.

The tokens that are left stand in a line, most probable first, ties by smaller id, each as wide as its probability; the
token taken is the one in which `u` (0 … 1) of the whole width falls. So the token is a function of row, parameters and
`u`, and little changes in it when probabilities change little.

Sorting a vocabulary costs ten times what all the rest does, and only the head of the line is ever looked at. If `share`
of the whole probability Z lies before the place looked for, then tokens lighter than (1 - share) · Z / vocab_size are
behind it: all of them together weigh no more than (1 - share) · Z. Only heavier ones are sorted.
"""

import math

import numpy as np
import numpy.typing as npt

from engine.sampling.largest import by_descending_value, largest
from engine.sampling_params import SamplingParams

Row = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]

_LOWEST = float(np.finfo(np.float32).min)


def draw(row: Row, params: SamplingParams, u: float, scratch: Weights) -> int:
    """The token at `u`.

    The order is vLLM's: temperature, min-p, top-k, top-p, each over what the one before has left. top-p keeps the
    fewest best tokens whose probability reaches it. Weights are relative to the best token's, in float64.

    Args:
        row: [vocab_size], logits, at least one of them above -inf.
        params: not greedy.
        u: in [0, 1).
        scratch: [vocab_size], overwritten.
    """
    vocab_size = len(row)
    peak = float(row.max())
    if params.min_p > 0.0:
        # Just below the bound in float32: which of the candidates pass is decided on their weights.
        bound = np.float32(max(peak + params.temperature * math.log(params.min_p), _LOWEST))
        ids = by_descending_value(row, np.flatnonzero(row >= np.nextafter(bound, np.float32(-np.inf))))
        ids = ids[: params.top_k or vocab_size]
    elif params.top_k > 0:
        ids = largest(row, params.top_k)
    else:
        weights = _weights(row, peak, params.temperature, out=scratch)
        total = float(weights.sum())
        share = params.top_p if params.top_p < 1.0 else u
        # Half the bound, so that rounding cannot matter.
        ids = by_descending_value(row, np.flatnonzero(weights > 0.5 * (1.0 - share) * total / vocab_size))
        return _take(ids, np.cumsum(weights[ids]), total, params.top_p, u)
    weights = _weights(row[ids], peak, params.temperature)
    num_kept = max(1, int(np.count_nonzero(weights >= params.min_p)))
    cumulative = np.cumsum(weights[:num_kept])
    return _take(ids, cumulative, float(cumulative[-1]), params.top_p, u)


def _weights(logits: Row, peak: float, temperature: float, out: Weights | None = None) -> Weights:
    """e^((logit - peak) / temperature)"""
    weights: Weights = np.subtract(logits, peak, out=out, dtype=np.float64)
    if temperature != 1.0:
        with np.errstate(over="ignore"):  # a tiny temperature makes -inf of a finite difference, as it should
            weights /= temperature
    return np.exp(weights, out=weights)


def _take(ids: npt.NDArray[np.int64], cumulative: Weights, total: float, top_p: float, u: float) -> int:
    """The token at `u` of the nucleus: ids in line, with the weights up to and with each, of `total` altogether."""
    last = len(cumulative) - 1
    if top_p < 1.0:
        last = min(int(np.searchsorted(cumulative, top_p * total, side="left")), last)
        total = float(cumulative[last])
    return int(ids[min(int(np.searchsorted(cumulative, u * total, side="right")), last)])
