"""`allowed.py` for all rows of a step that are held to a structure, on their device."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.cuda.device_copy import DeviceCopy
from engine.executor import SamplingInput
from engine.sampling.allowed import Words, allowed_tokens, smallest
from engine.sampling.device_slabs import slabs


class DeviceMask:
    """What structures leave of the rows of a step; asked for on the host, applied on the device.

    A row's mask goes up as it is, a bit a token, and is unpacked there.
    """

    def __init__(self, inputs: Sequence[SamplingInput], vocab_size: int, copy: DeviceCopy) -> None:
        self._copy = copy
        self.allowed: list[Words | None] = [allowed_tokens(sampling) for sampling in inputs]  # of each row
        masked = [(row, words) for row, words in enumerate(self.allowed) if words is not None]
        self._num_rows = len(masked)
        if not masked:
            return
        num_words = -(-vocab_size // 32)
        # The copy is of 64-bit words: an odd one has zeros behind it.
        packed = np.zeros((len(masked), num_words + num_words % 2), "<u4")
        for i, (_, words) in enumerate(masked):
            packed[i, :num_words] = words
        self._bits = copy.add_ints(packed.view(np.int64).reshape(-1))
        self._rows = copy.add_ints([row for row, _ in masked])
        self._smallest = copy.add_ints([0 if words is None else smallest(words) for words in self.allowed])

    def __bool__(self) -> bool:
        return self._num_rows > 0

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The rows, with what is not allowed impossible; `logits` themselves, never changed, if all is allowed.

        Args:
            logits: [num_rows, vocab_size] float32.
        """
        if not self:
            return logits
        rows, vocab_size = logits.clone(), logits.shape[1]
        packed = self._copy[self._bits].view(torch.uint8).view(self._num_rows, -1)  # [masked rows, bytes]
        places = torch.arange(8, dtype=torch.uint8, device=rows.device)
        for at in slabs(self._num_rows, vocab_size):
            numbers = self._copy[self._rows][at]
            bits = (packed[at, :, None] >> places) & 1
            is_allowed = bits.flatten(1)[:, :vocab_size].to(torch.bool)
            rows.index_copy_(0, numbers, rows.index_select(0, numbers).masked_fill_(~is_allowed, -torch.inf))
        return rows

    def best(self, best: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
        """[num_rows, 1] int64: `best`, but the smallest token allowed where the model makes all of them impossible.

        Args:
            best: [num_rows, 1] int64, the best tokens.
            peaks: [num_rows, 1] float32, their logits.
        """
        if not self:
            return best
        return torch.where(peaks > -torch.inf, best, self._copy[self._smallest][:, None])
