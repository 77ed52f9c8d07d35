"""The nucleus of a distribution: the fewest best tokens whose probability reaches top-p (Holtzman et al., ICLR 2020).

Tokens stand in line, most probable first, ties by smaller id, and the nucleus ends with the one at which their weights,
added up, reach top-p of the whole. Only that place is asked for, so the vocabulary is not sorted, which would cost ten
times what all the rest does:

- If `top_p` of the whole mass M is reached before a token, that token is lighter than (1 - top_p) · M / n, or all n
  behind could not weigh (1 - top_p) · M together. Turned round: tokens lighter than that bound, all of them together,
  cannot hold the place. They are left out, and that is nearly all.
- The rest are dealt into pieces by their logits, the pieces' masses added up, and the piece that holds the place is
  sorted alone.
"""

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]

# Few tokens are sorted faster than dealt.
_ONE_PIECE = 1024
_NUM_PIECES = 1024


def nucleus(logits: Row, weights: Weights, top_p: float) -> npt.NDArray[np.int64]:
    """Indices, ascending, of the tokens that top-p leaves; at least one.

    Args:
        logits, weights: [n], in order of token ids, n above 0; weights rise with logits.
        top_p: in (0, 1).
    """
    total = float(weights.sum())
    # Half the bound, so that rounding cannot matter.
    heavy = np.flatnonzero(weights > 0.5 * (1.0 - top_p) * total / len(weights))
    last = int(heavy[_first_reaching(top_p * total, logits[heavy], weights[heavy])])
    better, equal = logits > logits[last], logits == logits[last]
    equal[last + 1 :] = False
    return np.flatnonzero(better | equal)


def _first_reaching(mass: float, logits: Row, weights: Weights) -> int:
    """Index of the token at which the line's weights reach `mass`; the last in line if they never do."""
    piece_of = _pieces(logits)
    ends = np.cumsum(np.bincount(piece_of, weights))
    piece = min(int(np.searchsorted(ends, mass)), len(ends) - 1)
    members = np.flatnonzero(piece_of == piece)
    ordered = members[np.argsort(-logits[members], kind="stable")]
    start = float(ends[piece - 1]) if piece > 0 else 0.0
    # Not beyond the piece's own end, by rounding: what the piece holds must be found in it.
    within = np.minimum(start + np.cumsum(weights[ordered]), ends[piece])
    return int(ordered[min(int(np.searchsorted(within, mass)), len(ordered) - 1)])


def _pieces(logits: Row) -> npt.NDArray[np.int64]:
    """[n], the number of each token's piece, rising from the best token's."""
    if len(logits) > _ONE_PIECE:
        depth = logits.max() - logits
        deepest = float(depth.max())
        if 0.0 < deepest < np.inf:
            pieces: npt.NDArray[np.int64] = (depth.astype(np.float64) * ((_NUM_PIECES - 1) / deepest)).astype(np.int64)
            return pieces
    return np.zeros(len(logits), np.int64)
