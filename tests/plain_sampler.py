"""The oracle: what sampling means, one token after the other, nothing optimised."""

import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from engine.executor import SamplingInput
from engine.sampling.uniform import position_key, uniform
from engine.sampling_params import SamplingParams

Row = npt.NDArray[np.float32]


class OneMask:
    """A matcher that allows the same tokens always."""

    has_given_up = False

    def __init__(self, token_ids: Collection[int], vocab_size: int) -> None:
        self._words = np.zeros(-(-vocab_size // 32), np.uint32)
        for token_id in token_ids:
            self._words[token_id // 32] |= np.uint32(1 << token_id % 32)

    def allowed(self, output_token_ids: Sequence[int]) -> npt.NDArray[np.uint32]:
        return self._words


def plain_allowed(sampling: SamplingInput, vocab_size: int) -> set[int]:
    if sampling.matcher is None:
        return set(range(vocab_size))
    words = sampling.matcher.allowed(sampling.output_token_ids)
    return {token_id for token_id in range(vocab_size) if int(words[token_id // 32]) >> token_id % 32 & 1}


def plain_adjusted(row: Row, sampling: SamplingInput) -> list[float]:
    """Logits are float32, and stay so after every step: else equals would not stay equals."""
    params, prompt, output = sampling.params, sampling.prompt_token_ids, sampling.output_token_ids
    adjusted = []
    allowed = plain_allowed(sampling, len(row))
    stop = set(params.stop_token_ids) if len(output) < params.min_tokens else set()
    if sampling.matcher is not None and allowed <= stop:
        stop = set()
    for token_id, logit in enumerate(row):
        if token_id in stop or token_id not in allowed:
            logit = np.float32(-math.inf)
        logit += np.float32(params.logit_bias.get(token_id, 0.0))
        if token_id in prompt or token_id in output:
            bent = float(logit) / params.repetition_penalty if logit > 0 else float(logit) * params.repetition_penalty
            logit = np.float32(bent)
        count = list(output).count(token_id)
        logit -= np.float32(params.frequency_penalty) * np.float32(count)
        logit -= np.float32(params.presence_penalty) * np.float32(count > 0)
        adjusted.append(float(logit))
    return adjusted


def plain_kept(logits: Sequence[float], params: SamplingParams) -> list[tuple[int, float]]:
    """(token id, probability) of what is left, most probable first."""
    line = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    peak = logits[line[0]]
    kept = [(t, math.exp((logits[t] - peak) / params.temperature)) for t in line]
    kept = [(t, w) for t, w in kept if w > 0 and w >= params.min_p]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total = math.fsum(w for _, w in kept)
    nucleus: list[tuple[int, float]] = []
    for t, w in kept:
        nucleus.append((t, w))
        if params.top_p < 1.0 and math.fsum(w for _, w in nucleus) >= params.top_p * total:
            break
    total = math.fsum(w for _, w in nucleus)
    return [(t, w / total) for t, w in nucleus]


def plain_token(row: Row, sampling: SamplingInput) -> int:
    logits = plain_adjusted(row, sampling)
    if max(logits) == -math.inf:
        return min(plain_allowed(sampling, len(row)))
    if sampling.params.is_greedy:
        return min(range(len(logits)), key=lambda t: (-logits[t], t))
    return plain_arrivals(plain_kept(logits, sampling.params), sampling)[0][1]


def plain_arrivals(kept: Sequence[tuple[int, float]], sampling: SamplingInput) -> list[tuple[float, int]]:
    """(time of arrival, token id), the first first."""
    key = position_key(sampling.params.seed, sampling.position)
    return sorted((-math.log1p(-uniform(key, t)) / p, t) for t, p in kept)


def plain_logprobs(row: Row) -> list[float]:
    peak = float(row.max())
    normalizer = peak + math.log(math.fsum(math.exp(x - peak) for x in row.tolist()))
    return [max(x - normalizer, -9999.0) for x in row.tolist()]
