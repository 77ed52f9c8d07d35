"""What a structure does not allow is not sampled, by either sampler, whatever else a request wishes."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.executor import SampledToken, SamplingInput
from engine.sampling import device_slabs
from engine.sampling.allowed import flags, smallest
from engine.sampling.device_mask import DeviceMask
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from plain_sampler import OneMask, plain_logprobs

VOCAB_SIZE = 3000
LIMITS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "top-k": {"top_k": 40},
    "large top-k": {"top_k": 2000},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.02},
    "cold": {"temperature": 1e-300},
}
WISHES: dict[str, dict[str, Any]] = {
    "none": {},
    "biases": {"logit_bias": dict.fromkeys(range(0, VOCAB_SIZE, 5), 100.0)},
    "penalties": {"repetition_penalty": 1e-300, "frequency_penalty": -2.0, "presence_penalty": -2.0},
}


def held(token_ids: Collection[int] | None, vocab_size: int = VOCAB_SIZE, **params: Any) -> SamplingInput:
    matcher = None if token_ids is None else OneMask(token_ids, vocab_size)
    return SamplingInput(SamplingParams(max_tokens=1000, **params), [0, 5], [5, 10, 10], matcher)


def both(rows: Sequence[Sequence[float]] | np.ndarray, inputs: Sequence[SamplingInput]) -> list[SampledToken]:
    """From both samplers, which agree."""
    logits = torch.tensor(np.asarray(rows, np.float32))
    expected, actual = Sampler().sample(logits, inputs), DeviceSampler().sample(logits, inputs)
    assert [a.token_id for a in actual] == [e.token_id for e in expected]
    return expected


def random_rows(num_rows: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((num_rows, VOCAB_SIZE)).astype(np.float32) * 3


@pytest.mark.parametrize("wishes", WISHES.values(), ids=WISHES)
def test_only_what_is_allowed_is_sampled(wishes: dict[str, Any]) -> None:
    allowed = {1, 3, 31, 32, 63, 64, 2047, 2998, 2999}
    inputs = [held(allowed, seed=seed, **limits, **wishes) for limits in LIMITS.values() for seed in range(20)]
    tokens = [token.token_id for token in both(random_rows(len(inputs)), inputs)]
    assert set(tokens) <= allowed
    assert len(set(tokens)) > 3  # none of them by chance alone


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("logit", [-40.0, -math.inf])
def test_the_only_token_that_is_left_is_taken_though_the_model_would_never(
    limits: dict[str, Any], logit: float
) -> None:
    for token_id in (0, 31, 32, 2999):
        rows = random_rows(1)
        rows[0, token_id] = logit
        [token] = both(rows, [held([token_id], logit_bias={token_id: -100.0, 7: 100.0}, **limits)])
        assert token.token_id == token_id


def test_what_is_allowed_but_impossible_is_only_taken_where_nothing_else_is() -> None:
    row = [0.0, -math.inf, 3.0, -math.inf]
    for temperature in (0.0, 1.0):
        a, b = both([row, row], [held([0, 1], 4, temperature=temperature), held([1, 3], 4, temperature=temperature)])
        assert (a.token_id, b.token_id) == (0, 1)


def test_the_mask_comes_before_top_k_and_top_p() -> None:
    row = [9.0, 8.0, 1.0, 1.0, -5.0]
    inputs = [held([2, 3, 4], 5, seed=seed, **limit) for seed in range(200) for limit in ({"top_k": 2}, {"top_p": 0.9})]
    assert {token.token_id for token in both([row] * len(inputs), inputs)} == {2, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_masks_stop_tokens_but_never_the_last_way_out(temperature: float) -> None:
    wish = {"min_tokens": 10, "stop_token_ids": (1, 2, 99), "temperature": temperature}
    row = [0.0, 9.0, 8.0, 1.0]
    allowed = ([1, 2, 3], [2], [0, 3])
    may_go_on, may_only_stop, is_not_asked = both([row] * 3, [held(ids, 4, **wish) for ids in allowed])
    assert may_go_on.token_id == 3
    assert may_only_stop.token_id == 2
    assert is_not_asked.token_id in (0, 3)
    # Of several ways out the model has its choice.
    wish = wish | {"temperature": temperature / 100}
    assert [token.token_id for token in both([row], [held([1, 2], 4, **wish)])] == [1]
    assert [token.token_id for token in both([row[::-1]], [held([1, 2], 4, **wish)])] == [2]


def test_logprobs_are_of_the_raw_logits() -> None:
    row = np.asarray([3.0, 2.0, 1.0, 0.0], np.float32)
    expected = plain_logprobs(row)
    logits = torch.tensor(row)[None]
    for sampler in (Sampler(), DeviceSampler()):
        [token] = sampler.sample(logits, [held([3], 4, logprobs=2)])
        assert token.token_id == 3
        assert token.logprob == pytest.approx(expected[3])
        assert [(t, p) for t, p in token.top] == [(0, pytest.approx(expected[0])), (1, pytest.approx(expected[1]))]


def test_a_row_is_masked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [
        held(range(i, VOCAB_SIZE, 7) if i % 3 else None, seed=i, **limits)
        for i, limits in enumerate([*LIMITS.values()] * 3)
    ]
    logits = torch.tensor(random_rows(len(inputs)))
    before = logits.clone()
    together = DeviceSampler().sample(logits, inputs)
    assert together == [DeviceSampler().sample(logits[i : i + 1], [s])[0] for i, s in enumerate(inputs)]
    assert together == Sampler().sample(logits, inputs)
    monkeypatch.setattr(device_slabs, "ENTRIES_AT_ONCE", 2 * VOCAB_SIZE)
    assert DeviceSampler().sample(logits, inputs) == together
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 65, 96, 1000])
def test_every_token_has_its_bit(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    for token_ids in ([0], [vocab_size - 1], range(vocab_size), np.flatnonzero(rng.random(vocab_size) < 0.3).tolist()):
        if not token_ids:
            continue
        words = OneMask(token_ids, vocab_size).allowed([])
        assert np.flatnonzero(flags(words, vocab_size)).tolist() == sorted(token_ids)
        assert smallest(words) == min(token_ids)
        # A row in which no other token is as bad.
        row = np.full(vocab_size, 5.0, np.float32)
        row[list(token_ids)] = np.arange(len(token_ids), dtype=np.float32) - len(token_ids)
        [token] = both([row], [held(token_ids, vocab_size, temperature=0.0)])
        assert token.token_id == list(token_ids)[-1]


class Counting(OneMask):
    num_asked = 0

    def allowed(self, output_token_ids: Sequence[int]) -> Any:
        assert output_token_ids == [5, 10, 10]
        self.num_asked += 1
        return super().allowed(output_token_ids)


@pytest.mark.parametrize("sampler", [Sampler(), DeviceSampler()], ids=["cpu", "device"])
def test_a_matcher_is_asked_once_a_token(sampler: Sampler | DeviceSampler) -> None:
    matcher = Counting([1], 4)
    inputs = SamplingInput(
        SamplingParams(max_tokens=9, min_tokens=9, stop_token_ids=(1,), logprobs=1), [0], [5, 10, 10], matcher
    )
    sampler.sample(torch.zeros(1, 4), [inputs])
    assert matcher.num_asked == 1


def test_without_matchers_nothing_is_masked() -> None:
    mask = DeviceMask([held(None)] * 3, VOCAB_SIZE, copy=None)  # type: ignore[arg-type]  # nothing is copied
    logits = torch.tensor(random_rows(3))
    assert not mask
    assert mask.apply(logits) is logits
