"""The sampler: rows of logits in, one token each out."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.executor import SampledToken, SamplingInput
from engine.sampling.allowed import allowed_tokens, smallest
from engine.sampling.distribution import draw
from engine.sampling.logprobs import with_logprobs
from engine.sampling.penalties import adjust
from engine.sampling.race import first_to_arrive
from engine.sampling.uniform import position_key


class Sampler:
    """Samples each row by itself; keeps nothing of any request. Used by one thread at a time."""

    def __init__(self) -> None:
        # Fresh memory of this size would be mapped, page by page, for each row.
        self._scratch = np.empty(0, np.float64)
        # The kernel is compiled, or read from disk, now and not for the first request.
        first_to_arrive(np.zeros(1, np.int64), np.ones(1), 0)

    def sample(self, logits: torch.Tensor, inputs: Sequence[SamplingInput]) -> list[SampledToken]:
        """The next token of each row.

        Args:
            logits: [num_rows, vocab_size] float32; not changed.
            inputs: what each row's token depends on beside it.
        """
        num_rows, vocab_size = logits.shape
        assert num_rows == len(inputs), f"{num_rows} rows for {len(inputs)} requests"
        rows: npt.NDArray[np.float32] = logits.to("cpu", torch.float32).contiguous().numpy()
        if len(self._scratch) != vocab_size:
            self._scratch = np.empty(vocab_size, np.float64)
        return [self._sample_row(row, sampling) for row, sampling in zip(rows, inputs, strict=True)]

    def _sample_row(self, row: npt.NDArray[np.float32], sampling: SamplingInput) -> SampledToken:
        params = sampling.params
        allowed = allowed_tokens(sampling)
        adjusted = adjust(row, sampling, allowed)
        token_id = int(adjusted.argmax())  # the smallest id of equals; that of a NaN if there is one
        peak = float(adjusted[token_id])
        assert peak < math.inf, f"the largest logit is {peak}: the model is broken"
        if peak == -math.inf:
            # With every token impossible (a tiny vocabulary of stop tokens) no distribution is left: the smallest id.
            token_id = 0 if allowed is None else smallest(allowed)
        elif not params.is_greedy:
            key = position_key(params.seed, sampling.position)
            token_id = draw(adjusted, params, key, self._scratch)
        if params.logprobs is None:
            return SampledToken(token_id)
        return with_logprobs(row, token_id, params.logprobs, self._scratch)
