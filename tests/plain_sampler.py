"""The oracle: what sampling means, one token after the other, nothing optimised."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.executor import SamplingInput
from engine.sampling.uniform import position_key, uniform
from engine.sampling_params import SamplingParams

Row = npt.NDArray[np.float32]


def plain_adjusted(row: Row, sampling: SamplingInput) -> list[float]:
    """Logits are float32, and stay so after every step: else equals would not stay equals."""
    params, prompt, output = sampling.params, sampling.prompt_token_ids, sampling.output_token_ids
    adjusted = []
    for token_id, logit in enumerate(row):
        if len(output) < params.min_tokens and token_id in params.stop_token_ids:
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
