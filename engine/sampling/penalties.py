"""Logits bent by a request's own wishes and history, with vLLM's meanings and in vLLM's order."""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from engine.executor import SamplingInput
from engine.sampling.allowed import Words, flags, masked_stop_tokens
from engine.sampling_params import SamplingParams

Row = npt.NDArray[np.float32]

_LARGEST = float(np.finfo(np.float32).max)


def adjust(row: Row, sampling: SamplingInput, allowed: Words | None = None) -> Row:
    """The row to sample from: tokens masked, then biases, then penalties; `row` itself if nothing applies.

    - What is not in `allowed` is impossible; None: all is.
    - `min_tokens`: stop tokens are impossible while fewer tokens than that have been generated, unless nothing else is
      allowed.
    - `logit_bias` is added.
    - `repetition_penalty`, of every token in prompt or output: divides positive logits, multiplies others.
    - `frequency_penalty` per occurrence in the output, and `presence_penalty` once, are subtracted.

    Ids outside the vocabulary cannot be sampled anyway: there is nothing to bend.
    """
    params = sampling.params
    vocab_size = len(row)
    stop = masked_stop_tokens(sampling, allowed, vocab_size)
    if allowed is None and not len(stop) and not params.logit_bias and not _has_penalties(params):
        return row

    row = row.copy() if allowed is None else np.where(flags(allowed, vocab_size), row, np.float32(-np.inf))
    row[stop] = -np.inf
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
