"""`penalties.py` for all rows of a step at once, on their device: the same operations in the same order."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.cuda.device_copy import DeviceCopy, Place
from engine.executor import SamplingInput
from engine.sampling.allowed import Words, masked_stop_tokens

_LARGEST = torch.finfo(torch.float32).max


class DevicePenalties:
    """What the requests of a step wish of their rows of logits; made on the host, applied on the device.

    Args:
        allowed: what the structure of each row leaves; None: all.

    Raises:
        IndexError: on the host, of a token outside the vocabulary in a history that penalties look at.
    """

    def __init__(
        self, inputs: Sequence[SamplingInput], allowed: Sequence[Words | None], vocab_size: int, copy: DeviceCopy
    ) -> None:
        self._copy = copy
        self._masked = self._masked_entries(inputs, allowed, vocab_size)
        self._biased = self._biased_entries(inputs, vocab_size)
        self._repeated = self._repeated_entries(inputs, vocab_size)
        self._counted = self._counted_entries(inputs, vocab_size)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The rows to sample from; `logits` themselves, never changed, if nothing applies.

        Args:
            logits: [num_rows, vocab_size] float32.
        """
        if not (self._masked or self._biased or self._repeated or self._counted):
            return logits
        rows = logits.clone()
        flat = rows.view(-1)
        if self._masked:
            flat.index_fill_(0, self._copy[self._masked], -torch.inf)
        if self._biased:
            entries, biases = (self._copy[place] for place in self._biased)
            flat[entries] += biases.to(torch.float32)
        if self._repeated:
            entries, penalties = (self._copy[place] for place in self._repeated)
            seen = flat[entries].to(torch.float64)
            bent = torch.where(seen > 0, seen / penalties, seen * penalties)
            # A token that occurs twice is assigned the same value twice.
            flat[entries] = bent.clamp(max=_LARGEST).to(torch.float32)
        if self._counted:
            numbers, entries, frequency, presence = (self._copy[place] for place in self._counted)
            counts = torch.zeros((len(numbers), rows.shape[1]), dtype=torch.float32, device=rows.device)
            # Small whole numbers: their sum is exact, in whatever order they are added.
            counts.view(-1).scatter_add_(0, entries, torch.ones_like(entries, dtype=torch.float32))
            bent_rows = rows.index_select(0, numbers)
            bent_rows -= frequency.to(torch.float32)[:, None] * counts
            bent_rows -= presence.to(torch.float32)[:, None] * (counts > 0)
            rows.index_copy_(0, numbers, bent_rows)
        return rows

    def _masked_entries(
        self, inputs: Sequence[SamplingInput], allowed: Sequence[Words | None], vocab_size: int
    ) -> Place | None:
        entries = [
            row * vocab_size + masked_stop_tokens(sampling, words, vocab_size)
            for row, (sampling, words) in enumerate(zip(inputs, allowed, strict=True))
            if sampling.params.min_tokens > 0
        ]
        masked = np.concatenate(entries) if entries else ()
        return self._copy.add_ints(masked) if len(masked) else None

    def _biased_entries(self, inputs: Sequence[SamplingInput], vocab_size: int) -> tuple[Place, Place] | None:
        biased = [
            (row * vocab_size + token_id, bias)
            for row, sampling in enumerate(inputs)
            for token_id, bias in sampling.params.logit_bias.items()
            if 0 <= token_id < vocab_size
        ]
        if not biased:
            return None
        return self._copy.add_ints([entry for entry, _ in biased]), self._copy.add_floats([bias for _, bias in biased])

    def _repeated_entries(self, inputs: Sequence[SamplingInput], vocab_size: int) -> tuple[Place, Place] | None:
        repeated = [(row, s) for row, s in enumerate(inputs) if s.params.repetition_penalty != 1.0]
        if not repeated:
            return None
        entries = [
            row * vocab_size + _token_ids(token_ids, vocab_size)
            for row, sampling in repeated
            for token_ids in (sampling.prompt_token_ids, sampling.output_token_ids)
        ]
        lengths = [len(s.prompt_token_ids) + len(s.output_token_ids) for _, s in repeated]
        penalties = np.repeat([s.params.repetition_penalty for _, s in repeated], lengths)
        return self._copy.add_ints(np.concatenate(entries)), self._copy.add_floats(penalties)

    def _counted_entries(
        self, inputs: Sequence[SamplingInput], vocab_size: int
    ) -> tuple[Place, Place, Place, Place] | None:
        counted = [
            (row, s)
            for row, s in enumerate(inputs)
            if (s.params.frequency_penalty != 0.0 or s.params.presence_penalty != 0.0) and len(s.output_token_ids) > 0
        ]
        if not counted:
            return None
        entries = [i * vocab_size + _token_ids(s.output_token_ids, vocab_size) for i, (_, s) in enumerate(counted)]
        return (
            self._copy.add_ints([row for row, _ in counted]),
            self._copy.add_ints(np.concatenate(entries)),
            self._copy.add_floats([s.params.frequency_penalty for _, s in counted]),
            self._copy.add_floats([s.params.presence_penalty for _, s in counted]),
        )


def _token_ids(token_ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.int64]:
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    # On a GPU a wrong index is seen late and ends the process, or is another row's.
    if len(ids) > 0 and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise IndexError(f"token ids {ids.min()} … {ids.max()}, vocabulary {vocab_size}")
    return ids
