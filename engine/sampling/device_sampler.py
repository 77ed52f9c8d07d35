"""The sampler for logits on a GPU: the same function as `sampler.py`, all rows at once, where the logits are.

Nothing waits for the device until the end: what depends on a value there stays there, and one copy brings all answers
back. The arithmetic is the other sampler's, operation for operation, in float64; only the last bits of exp and log are
a device's own. So the token is the same, but for a race so close that these bits decide it.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.cuda.device_copy import DeviceCopy
from engine.executor import SampledToken, SamplingInput
from engine.sampling.device_draw import DeviceDraw
from engine.sampling.device_logprobs import DeviceLogprobs
from engine.sampling.device_mask import DeviceMask
from engine.sampling.device_penalties import DevicePenalties

# Columns of the answer: ids are whole numbers, which float64 holds exactly.
_TOKEN, _PEAK, _LOGPROBS = 0, 1, 2


class DeviceSampler:
    """Samples the rows of a step, on the device of the logits; keeps nothing of any request."""

    def sample(self, logits: torch.Tensor, inputs: Sequence[SamplingInput]) -> list[SampledToken]:
        """The next token of each row.

        Args:
            logits: [num_rows, vocab_size] float32, on any device; not changed.
            inputs: what each row's token depends on beside it.
        """
        assert len(logits) == len(inputs), f"{len(logits)} rows for {len(inputs)} requests"
        if not inputs:
            return []
        answer, num_top = _answer(logits.to(torch.float32), inputs)
        rows: npt.NDArray[np.float64] = answer.cpu().numpy()
        return [_sampled(row, sampling, num_top) for row, sampling in zip(rows, inputs, strict=True)]


def _answer(logits: torch.Tensor, inputs: Sequence[SamplingInput]) -> tuple[torch.Tensor, int]:
    """[num_rows, 2 + …] float64 on the device of the logits, and how many best tokens are in it."""
    num_rows, vocab_size = logits.shape
    copy = DeviceCopy()
    mask = DeviceMask(inputs, vocab_size, copy)
    penalties = DevicePenalties(inputs, mask.allowed, vocab_size, copy)
    draw = DeviceDraw(inputs, vocab_size, copy)
    logprobs = DeviceLogprobs(inputs, vocab_size, copy)
    copy.send(logits.device)

    rows = penalties.apply(mask.apply(logits))
    best = rows.argmax(dim=1, keepdim=True)  # the smallest id of equals; that of a NaN if there is one
    peaks = rows.gather(1, best)
    best = mask.best(best, peaks)
    tokens = draw.apply(rows, best, peaks) if draw else best

    answer = torch.zeros((num_rows, _LOGPROBS + logprobs.num_columns), dtype=torch.float64, device=logits.device)
    answer[:, _TOKEN : _TOKEN + 1] = tokens
    answer[:, _PEAK : _PEAK + 1] = peaks
    if logprobs:
        logprobs.fill(answer[:, _LOGPROBS:], logits, tokens)
    return answer, logprobs.num_top


def _sampled(row: npt.NDArray[np.float64], sampling: SamplingInput, num_top: int) -> SampledToken:
    """What the device answered of a row, in words."""
    peak = float(row[_PEAK])
    assert peak < math.inf, f"the largest logit is {peak}: the model is broken"
    token_id, wanted = int(row[_TOKEN]), sampling.params.logprobs
    if wanted is None:
        return SampledToken(token_id)
    logprob, ids, logprobs = np.split(row[_LOGPROBS:], [1, 1 + num_top])
    top = zip(ids[:wanted].astype(np.int64).tolist(), logprobs[:wanted].tolist(), strict=True)
    return SampledToken(token_id, float(logprob[0]), tuple(top))
