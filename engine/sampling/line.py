"""Tokens in line, most probable first (ties: smaller id first), each as long as its weight.

Only two places of the line are ever asked for, so it is not sorted: tokens are dealt into pieces by their logits, the
pieces' masses added up, and the piece that holds the place is sorted alone.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int64]
Row = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]

# Few tokens are sorted faster than dealt.
_ONE_PIECE = 1024
_NUM_PIECES = 1024


class TokenLine:
    """A line of tokens.

    Args:
        ids: [n], ascending, at least one.
        logits, weights: [n], of these tokens; weights rise with logits.
    """

    def __init__(self, ids: TokenIds, logits: Row, weights: Weights) -> None:
        self._ids, self._logits, self._weights = ids, logits, weights
        self._piece_of: npt.NDArray[np.int64] | None = None  # [n]
        if len(ids) > _ONE_PIECE:
            depth = logits.max() - logits
            deepest = float(depth.max())
            if 0.0 < deepest < np.inf:
                scaled = np.multiply(depth, (_NUM_PIECES - 1) / deepest, dtype=np.float64)
                self._piece_of = scaled.astype(np.int64)
        if self._piece_of is None:
            self._ends = np.array([weights.sum()])
        else:
            self._ends = np.cumsum(np.bincount(self._piece_of, weights))

    def first_ending_above(self, place: float) -> int:
        """The token that covers `place`: the first that ends above it; the last if none does."""
        return self._find(place, "right")[0]

    def end_of_first_reaching(self, place: float) -> float:
        """Where the first token ends that reaches `place`; the end of the line if none does."""
        return self._find(place, "left")[1]

    def _find(self, place: float, side: Literal["left", "right"]) -> tuple[int, float]:
        piece = min(int(np.searchsorted(self._ends, place, side)), len(self._ends) - 1)
        start = float(self._ends[piece - 1]) if piece > 0 else 0.0
        members = np.arange(len(self._ids)) if self._piece_of is None else np.flatnonzero(self._piece_of == piece)
        ordered = members[np.argsort(-self._logits[members], kind="stable")]
        # Not beyond the piece's own end, by rounding: places before a token's end must find it or one before it.
        ends = np.minimum(start + np.cumsum(self._weights[ordered]), self._ends[piece])
        i = min(int(np.searchsorted(ends, place, side)), len(ends) - 1)
        return int(self._ids[ordered[i]]), float(ends[i])
