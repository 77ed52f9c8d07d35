"""Log-probabilities of the raw logits: what the model thought, before the request bent it."""

import math

import numpy as np
import numpy.typing as npt

from engine.executor import SampledToken
from engine.sampling.largest import largest

# Of a token that the model makes impossible: JSON has no infinity.
IMPOSSIBLE = -9999.0


def with_logprobs(
    row: npt.NDArray[np.float32], token_id: int, num_top: int, scratch: npt.NDArray[np.float64]
) -> SampledToken:
    """The sampled token with its log-probability and the `num_top` best ones, by log_softmax of `row`.

    Args:
        row: [vocab_size], raw logits.
        scratch: [vocab_size], overwritten.
    """
    peak = float(row.max())
    np.subtract(row, peak, out=scratch, dtype=np.float64)
    np.exp(scratch, out=scratch)
    normalizer = peak + math.log(float(scratch.sum()))

    def logprob(of: int) -> float:
        return max(float(row[of]) - normalizer, IMPOSSIBLE)

    top = tuple((int(t), logprob(t)) for t in largest(row, num_top).tolist()) if num_top > 0 else ()
    return SampledToken(token_id, logprob(token_id), top)
