"""Tokens in line, the best first, ties by smaller id, and sums over the line. All rows at once, on any device.

Sums are made by adding neighbours, then neighbours of these, as in a tournament. So a row's sum is the same in every
bit however many rows there are, which torch's own reductions do not promise.
"""

import torch
import torch.nn.functional as F

_ID_MASK = 2**32 - 1


def line(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Ids of the `length` largest entries of each row, in line.

    Args:
        rows: [num_rows, n] float32, without NaN.
        length: at most n.

    Returns:
        [num_rows, length] int64.
    """
    rows = rows + 0.0  # there are two zeros, and they are equal
    if length == rows.shape[1]:
        return rows.sort(dim=1, descending=True, stable=True).indices
    # Which of equal values `topk` takes is open: so value and id are made one number, and there are no equals.
    bits = rows.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # rises with the value
    places = _ID_MASK - torch.arange(rows.shape[1], device=rows.device)
    numbers = (ordered.to(torch.int64) << 32) | places
    return _ID_MASK - (numbers.topk(length, dim=1).values & _ID_MASK)


class Tournament:
    """Sums of runs of 1, 2, 4, … entries of each row.

    Args:
        weights: [num_rows, n] float64.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        n = weights.shape[1]
        size = 1 << (n - 1).bit_length()
        self._rounds = [F.pad(weights, (0, size - n))]
        while self._rounds[-1].shape[1] > 1:
            last = self._rounds[-1]
            self._rounds.append(last[:, 0::2] + last[:, 1::2])

    @property
    def total(self) -> torch.Tensor:
        """[num_rows, 1]"""
        return self._rounds[-1]

    def first_reaching(self, mass: torch.Tensor) -> torch.Tensor:
        """[num_rows, 1] int64: the entry with which the sum from the first one on reaches `mass`.

        Args:
            mass: [num_rows, 1], at most the total.
        """
        place = torch.zeros_like(mass, dtype=torch.int64)
        before = torch.zeros_like(mass)
        for sums in self._rounds[-2::-1]:
            place = place * 2
            with_left = before + sums.gather(1, place)
            goes_on = with_left < mass
            place = place + goes_on
            before = torch.where(goes_on, with_left, before)
        return place


def row_sums(rows: torch.Tensor) -> torch.Tensor:
    """[num_rows, 1] float64"""
    return Tournament(rows).total
