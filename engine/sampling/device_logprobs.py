"""`logprobs.py` for all rows of a step whose clients asked, on their device."""

from collections.abc import Sequence

import torch

from engine.cuda.device_copy import DeviceCopy
from engine.executor import SamplingInput
from engine.sampling.device_line import line, row_sums
from engine.sampling.device_slabs import slabs
from engine.sampling.logprobs import IMPOSSIBLE


class DeviceLogprobs:
    """Log-probabilities of the sampled and of the best tokens; made on the host, computed on the device."""

    def __init__(self, inputs: Sequence[SamplingInput], vocab_size: int, copy: DeviceCopy) -> None:
        self._copy = copy
        rows = [row for row, sampling in enumerate(inputs) if sampling.params.logprobs is not None]
        # The most that any row wants is computed for each.
        self.num_top = min(max((inputs[row].params.logprobs or 0 for row in rows), default=0), vocab_size)
        self._rows = copy.add_ints(rows) if rows else None

    def __bool__(self) -> bool:
        return self._rows is not None

    @property
    def num_columns(self) -> int:
        return 1 + 2 * self.num_top if self else 0

    def fill(self, columns: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Sets the rows that asked: the sampled token's log-probability, then the best ones' ids, then their own.

        Args:
            columns: [num_rows, num_columns] float64.
            logits: [num_rows, vocab_size] float32, raw.
            tokens: [num_rows, 1] int64, sampled.
        """
        assert self._rows is not None
        for at in slabs(self._rows.length, logits.shape[1]):
            numbers = self._copy[self._rows][at]
            found = log_probabilities(logits.index_select(0, numbers), tokens[numbers], self.num_top)
            columns.index_copy_(0, numbers, found)


def log_probabilities(rows: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    """A token's log-probability in each row, then the best ones' ids, then their own.

    Args:
        rows: [num_rows, vocab_size] float32, raw logits.
        tokens: [num_rows, 1] int64.
        num_top: at most vocab_size.

    Returns:
        [num_rows, 1 + 2 · num_top] float64.
    """
    peaks = rows.amax(dim=1, keepdim=True).to(torch.float64)
    normalizers = peaks + row_sums(rows.to(torch.float64).sub_(peaks).exp_()).log()
    best = line(rows, num_top) if num_top > 0 else tokens[:, :0]
    logits = rows.gather(1, torch.cat([tokens, best], dim=1))
    logprobs = (logits.to(torch.float64) - normalizers).clamp(min=IMPOSSIBLE)
    return torch.cat([logprobs[:, :1], best.to(torch.float64), logprobs[:, 1:]], dim=1)
