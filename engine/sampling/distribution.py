"""A token of the distribution that temperature, min-p, top-k and top-p leave of a row of logits.

The tokens that are left stand in line, most probable first, ties by smaller id, each as long as its probability; the
token taken is the one on which `u` (0 … 1) of the line falls. So the token is a function of row, parameters and `u`
alone, and small changes of probabilities change it rarely.

Sorting a vocabulary would cost ten times what all the rest does, and only the head of the line is ever looked at. If
`share` of the whole mass M lies before the place looked for, tokens lighter than (1 - share) · M / n are behind it, for
all of them together weigh no more than (1 - share) · M. They are left out, and that is nearly all.
"""

import math

import numpy as np
import numpy.typing as npt

from engine.sampling.largest import largest
from engine.sampling.line import TokenLine
from engine.sampling_params import SamplingParams

Row = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]

_LOWEST = float(np.finfo(np.float32).min)


def draw(row: Row, params: SamplingParams, u: float, scratch: Weights) -> int:
    """The token at `u`.

    The order is vLLM's: temperature, min-p, top-k, top-p, each over what the ones before have left. top-p keeps the
    fewest best tokens whose probability reaches it. Weights are relative to the best token's, in float64.

    Args:
        row: [vocab_size], logits, finite or -inf, the largest finite.
        params: not greedy.
        u: in [0, 1).
        scratch: [vocab_size], overwritten.
    """
    peak = float(row.max())
    ids = _candidates(row, peak, params)
    logits = row if ids is None else row[ids]
    weights = _weights(logits, peak, params.temperature, out=scratch[: len(logits)])
    if ids is not None and params.min_p > 0.0:
        passing = weights >= params.min_p
        ids, logits, weights = ids[passing], logits[passing], weights[passing]

    total = float(weights.sum())
    share = params.top_p if params.top_p < 1.0 else u
    # Half the bound, so that rounding cannot matter.
    heavy = np.flatnonzero(weights > 0.5 * (1.0 - share) * total / len(weights))
    line = TokenLine(heavy if ids is None else ids[heavy], logits[heavy], weights[heavy])
    if params.top_p < 1.0:
        total = line.end_of_first_reaching(params.top_p * total)
    return line.first_ending_above(u * total)


def _candidates(row: Row, peak: float, params: SamplingParams) -> npt.NDArray[np.int64] | None:
    """Ids, ascending, of the tokens that top-k leaves, or of a few more than min-p leaves; None: of all."""
    if params.top_k > 0:
        return np.sort(largest(row, params.top_k))
    if params.min_p > 0.0:
        bound = peak + params.temperature * math.log(params.min_p)
        # Lower by more than float32 rounds: which of them pass is decided on their weights.
        bound -= 1e-6 * (abs(peak) + abs(bound))
        return np.flatnonzero(row >= np.float32(max(bound, _LOWEST)))
    return None


def _weights(logits: Row, peak: float, temperature: float, out: Weights) -> Weights:
    """e^((logit - peak) / temperature)"""
    np.subtract(logits, peak, out=out, dtype=np.float64)
    if temperature != 1.0:
        with np.errstate(over="ignore"):  # a tiny temperature makes -inf of a finite difference, as it should
            out /= temperature
    return np.exp(out, out=out)
