"""The k largest entries of a long row, without sorting it."""

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]

# Entries in a group, of whose maxima a first bound is made; and groups, for each entry wanted.
_GROUP = 64
_GROUPS_PER_ENTRY = 4


def by_descending_value(row: Row, token_ids: TokenIds) -> TokenIds:
    """`token_ids` (ascending) by descending value, ties by smaller id."""
    return token_ids[np.argsort(-row[token_ids], kind="stable")]


def largest(row: Row, k: int) -> TokenIds:
    """Ids of the k largest entries (all, if there are fewer), of equals the smaller ones; best first.

    Cut the row into at least k groups: the k-th largest of their maxima is itself the k-th largest of some entries, so
    no larger than the k-th largest of all. What is below it is out, and that is nearly everything.
    """
    if k >= len(row):
        return by_descending_value(row, np.arange(len(row)))
    size = max(1, min(_GROUP, len(row) // (_GROUPS_PER_ENTRY * k)))
    num_groups = len(row) // size
    # Group g is every num_groups-th entry from g on: neighbours in memory belong to different groups, and vectorize.
    maxima = row[: num_groups * size].reshape(size, num_groups).max(axis=0)
    bound = np.partition(maxima, num_groups - k)[num_groups - k]
    return by_descending_value(row, np.flatnonzero(row >= bound))[:k]
