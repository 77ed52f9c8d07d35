"""The k largest entries of a long row, without sorting it."""

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]

# Entries in a group, of whose maxima a first bound is made.
_GROUP = 64


def by_descending_value(row: Row, token_ids: TokenIds) -> TokenIds:
    """`token_ids` (ascending) by descending value, ties by smaller id."""
    return token_ids[np.argsort(-row[token_ids], kind="stable")]


def largest(row: Row, k: int) -> TokenIds:
    """Ids of the k largest entries (all, if there are fewer), best first, ties by smaller id.

    Cut the row into at least k groups: the k-th largest of their maxima is itself the k-th largest of some entries, so
    no larger than the k-th largest of all. What is below it is out, and that is nearly everything.
    """
    num_groups = len(row) // _GROUP
    if k >= num_groups:
        return by_descending_value(row, np.arange(len(row)))[:k]
    # Group g is every num_groups-th entry from g on: neighbours in memory belong to different groups, and vectorize.
    maxima = row[: num_groups * _GROUP].reshape(_GROUP, num_groups).max(axis=0)
    bound = np.partition(maxima, num_groups - k)[num_groups - k]
    return by_descending_value(row, np.flatnonzero(row >= bound))[:k]
