"""Logits bent by a request's own wishes and history, with vLLM's meanings and in vLLM's order."""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from engine.executor import SamplingInput
from engine.sampling_params import SamplingParams

Row = npt.NDArray[np.float32]

_LARGEST = float(np.finfo(np.float32).max)


def adjust(row: Row, sampling: SamplingInput) -> Row:
    """The row to sample from: stop tokens masked, then biases, then penalties; `row` itself if nothing applies.

    - `min_tokens`: stop tokens are impossible while fewer tokens than that have been generated.
    - `logit_bias` is added.
    - `repetition_penalty`, of every token in prompt or output: divides positive logits, multiplies others.
    - `frequency_penalty` per occurrence in the output, and `presence_penalty` once, are subtracted.

    Ids outside the vocabulary cannot be sampled anyway: there is nothing to bend.
    """
    params = sampling.params
    masks_stop = len(sampling.output_token_ids) < params.min_tokens and len(params.stop_token_ids) > 0
    if not masks_stop and not params.logit_bias and not _has_penalties(params):
        return row

    row = row.copy()
    vocab_size = len(row)
    if masks_stop:
        stop = _token_ids(params.stop_token_ids)
        row[stop[(stop >= 0) & (stop < vocab_size)]] = -np.inf
    if params.logit_bias:
        biased = _token_ids(params.logit_bias)
        bias = np.fromiter(params.logit_bias.values(), np.float32, len(biased))
        known = (biased >= 0) & (biased < vocab_size)
        row[biased[known]] += bias[known]
    if _has_penalties(params):
        output = _token_ids(sampling.output_token_ids)
        if params.repetition_penalty != 1.0:
            # A token that occurs twice is assigned the same value twice.
            seen = np.concatenate([_token_ids(sampling.prompt_token_ids), output])
            logits = row[seen].astype(np.float64)
            with np.errstate(over="ignore"):  # a penalty may be any positive number: what is too large is the largest
                bent = np.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
                row[seen] = np.minimum(bent, _LARGEST)
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            said, counts = np.unique(output, return_counts=True)
            row[said] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
            row[said] -= np.float32(params.presence_penalty)
    return row


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def _token_ids(token_ids: Collection[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(token_ids, np.int64, len(token_ids))
