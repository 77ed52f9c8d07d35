"""The sampler against its plain oracle, and its promises one by one."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.executor import SampledToken, SamplingInput
from engine.sampling.largest import largest
from engine.sampling.penalties import adjust
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from plain_sampler import OneMask, plain_adjusted, plain_arrivals, plain_kept, plain_logprobs, plain_token


def sampling(
    prompt: Sequence[int] = (1, 2), output: Sequence[int] = (), max_tokens: int = 1000, **params: Any
) -> SamplingInput:
    return SamplingInput(SamplingParams(max_tokens=max_tokens, **params), prompt, output)


def sample(row: Sequence[float] | np.ndarray, inputs: SamplingInput) -> SampledToken:
    [token] = Sampler().sample(torch.tensor(np.asarray(row, np.float32))[None], [inputs])
    return token


def random_row(seed: int, vocab_size: int, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab_size) * spread).astype(np.float32)


# Coarse values, so that ties are common.
rows = st.lists(st.integers(-12, 12).map(lambda x: x / 2), min_size=2, max_size=24)
tokens = st.lists(st.integers(0, 1), max_size=6)
params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.5]),
        "top_k": st.integers(0, 26),
        "top_p": st.sampled_from([0.0, 0.05, 0.33, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([-1.5, 0.0, 0.75]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.25]),
        "logit_bias": st.dictionaries(st.integers(0, 1), st.sampled_from([-100.0, -1.0, 2.5]), max_size=2),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.sampled_from([(), (0,), (1,)]),
        "seed": st.integers(-(2**63), 2**63 - 1),
    }
)


@given(row=rows, prompt=tokens, output=tokens, params=params, data=st.data())
@settings(max_examples=400, deadline=None)
def test_the_token_is_the_oracles(
    row: list[float], prompt: list[int], output: list[int], params: dict[str, Any], data: st.DataObject
) -> None:
    allowed = data.draw(st.none() | st.sets(st.integers(0, len(row) - 1), min_size=1), label="allowed")
    matcher = None if allowed is None else OneMask(allowed, len(row))
    inputs = replace(sampling(prompt, output, **params), matcher=matcher)
    logits = np.asarray(row, np.float32)
    adjusted = plain_adjusted(logits, inputs)
    if not inputs.params.is_greedy and max(adjusted) > -math.inf and inputs.params.top_p < 1.0:
        # On the very edge of the nucleus the order of additions decides: nothing to compare.
        kept = plain_kept(adjusted, replace(inputs.params, top_p=1.0))
        assume(np.abs(np.cumsum([p for _, p in kept])[:-1] - inputs.params.top_p).min(initial=1.0) > 1e-12)
    token_id = sample(logits, inputs).token_id
    assert token_id == plain_token(logits, inputs)
    assert allowed is None or token_id in allowed


@given(row=rows, seed=st.integers(-(2**63), 2**63 - 1), temperature=st.sampled_from([0.1, 1.0, 3.0]))
@settings(max_examples=100, deadline=None)
def test_top_k_1_and_top_p_0_are_greedy(row: list[float], seed: int, temperature: float) -> None:
    best = int(np.argmax(row))
    assert sample(row, sampling(temperature=0.0, seed=seed)).token_id == best
    assert sample(row, sampling(temperature=temperature, seed=seed, top_k=1)).token_id == best
    assert sample(row, sampling(temperature=temperature, seed=seed, top_p=0.0)).token_id == best
    # So small a nucleus holds one token, though it is not called greedy.
    assert sample(row, sampling(temperature=temperature, seed=seed, top_p=1e-12)).token_id == best


@given(row=rows, seed=st.integers(-(2**63), 2**63 - 1))
@settings(max_examples=100, deadline=None)
def test_min_p_1_and_a_vanishing_temperature_leave_the_best_and_its_equals(row: list[float], seed: int) -> None:
    for only in ({"min_p": 1.0}, {"temperature": 1e-300}):
        assert row[sample(row, sampling(seed=seed, **only)).token_id] == max(row)


LARGE = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 5.0},
    "top-k": {"top_k": 40},
    "large top-k": {"top_k": 3000},
    "top-k of all": {"top_k": 10**6},
    "top-p": {"top_p": 0.9},
    "small top-p": {"top_p": 0.01},
    "large top-p": {"top_p": 0.99999},
    "min-p": {"min_p": 0.02},
    "small min-p": {"min_p": 1e-12},
    "all": {"temperature": 0.8, "min_p": 0.001, "top_k": 500, "top_p": 0.95},
}


@pytest.mark.parametrize("spread", [0.0, 0.05, 3.0, 12.0])
@pytest.mark.parametrize("params", LARGE.values(), ids=LARGE)
def test_the_token_is_the_oracles_in_a_large_vocabulary(params: dict[str, Any], spread: float) -> None:
    # Rounded, so that there are ties at every edge; some impossible tokens.
    row = np.round(random_row(3, 5000, spread), 2)
    row[::7] = -np.inf
    kept = plain_kept(row.tolist(), sampling(**params).params)
    for seed in range(25):
        inputs = sampling(seed=seed, **params)
        arrivals = plain_arrivals(kept, inputs)
        token_id = sample(row, inputs).token_id
        # Who is next to the first by less than rounding may have been taken for it; nobody ever is.
        assert len(arrivals) == 1 or arrivals[1][0] > arrivals[0][0] * (1 + 1e-9)
        assert token_id == arrivals[0][1]


@pytest.mark.parametrize("params", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("spread", [0.05, 3.0])
def test_logits_that_differ_in_their_last_bits_draw_the_same_tokens(params: dict[str, Any], spread: float) -> None:
    """What a prefill chunk and a decode step differ by; one uniform and a cumulative distribution fail this."""
    row = random_row(4, 5000, spread)
    other = row + (np.random.default_rng(5).standard_normal(5000) * 1e-5).astype(np.float32)
    assert (row != other).any()
    for seed in range(200):
        assert sample(row, sampling(seed=seed, **params)) == sample(other, sampling(seed=seed, **params))


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8, "min_p": 0.05}],
    ids=str,
)
def test_tokens_of_many_seeds_are_distributed_as_they_should(params: dict[str, Any]) -> None:
    row = np.array([2.0, 1.5, 1.5, 0.0, -1.0, 0.7, 1.0, -3.0], np.float32)
    n = 4000
    inputs = [sampling(seed=seed, **params) for seed in range(n)]
    drawn = Counter(t.token_id for t in Sampler().sample(torch.tensor(row).repeat(n, 1), inputs))
    kept = dict(plain_kept(row.tolist(), inputs[0].params))
    assert drawn.keys() <= kept.keys()
    chi_square = sum((drawn[t] - n * p) ** 2 / (n * p) for t, p in kept.items())
    freedom = len(kept) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 1e-9  # fixed seeds: no luck is involved


def test_a_row_is_sampled_alike_alone_and_among_others() -> None:
    rng = np.random.default_rng(0)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 5},
        {"logprobs": 3},
        {"top_k": 50},
        {"top_p": 0.9, "logprobs": 0},
        {"min_p": 0.01},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1, "top_p": 0.99, "logprobs": 20},
    ]
    inputs = [
        sampling(
            rng.integers(0, 3000, 50).tolist(), rng.integers(0, 3000, 10).tolist(), seed=i, **kinds[i % len(kinds)]
        )
        for i in range(28)
    ]
    logits = torch.tensor(np.stack([random_row(i, 3000) for i in range(28)]))
    together = Sampler().sample(logits, inputs)
    turned = Sampler().sample(logits.flip(0), inputs[::-1])[::-1]
    alone = [Sampler().sample(logits[i : i + 1], [inputs[i]])[0] for i in range(28)]
    assert together == alone == turned  # logprobs too, in every bit


def test_the_token_depends_on_seed_and_position_only() -> None:
    row = random_row(0, 500, 0.5)
    split = [sample(row, sampling(list(range(20 - n)), list(range(n)), seed=9)).token_id for n in range(10)]
    assert len(set(split)) == 1
    assert len({sample(row, sampling(list(range(n)), seed=9)).token_id for n in range(30)}) > 20
    assert len({sample(row, sampling(seed=seed)).token_id for seed in range(30)}) > 20


def test_logits_are_not_changed() -> None:
    logits = torch.tensor(random_row(0, 100))[None]
    before = logits.clone()
    Sampler().sample(logits, [sampling(repetition_penalty=2.0, logit_bias={3: 5.0}, min_tokens=2, stop_token_ids=(7,))])
    assert torch.equal(logits, before)


def test_stop_tokens_are_impossible_until_min_tokens_have_been_generated() -> None:
    row = [0.0, 9.0, 1.0]
    for num_output, expected in ((0, 2), (1, 2), (2, 1)):
        inputs = sampling([0], [0] * num_output, temperature=0.0, min_tokens=2, stop_token_ids=(1,))
        assert sample(row, inputs).token_id == expected


def test_penalties_have_vllms_meanings() -> None:
    row = np.array([4.0, -4.0, 2.0, -2.0, 1.0], np.float32)
    inputs = sampling(
        [0, 1], [2, 2, 3], temperature=0.0, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25
    )
    # Prompt and output are divided or multiplied; only the output is counted.
    expected = [2.0, -8.0, 1.0 - 2 * 0.5 - 0.25, -4.0 - 0.5 - 0.25, 1.0]
    assert adjust(row, inputs).tolist() == expected
    assert plain_adjusted(row, inputs) == expected


def test_a_request_without_wishes_costs_no_copy() -> None:
    row = random_row(0, 10)
    assert adjust(row, sampling([1], [2, 3], min_tokens=1, stop_token_ids=(4,))) is row


def test_biases_and_stop_tokens_outside_the_vocabulary_change_nothing() -> None:
    inputs = sampling(temperature=0.0, logit_bias={10: 100.0, -1: 100.0}, min_tokens=1, stop_token_ids=(10, 11))
    assert sample([0.0, 3.0, 1.0], inputs).token_id == 1


@pytest.mark.parametrize("extreme", [1e-300, 1e-40, 1e40, 1e300])
def test_an_extreme_repetition_penalty_is_survived(extreme: float) -> None:
    row = [3.0, -3.0, 1.0, 0.0]
    for temperature in (0.0, 1.0):
        token_id = sample(row, sampling([0, 1], [3], repetition_penalty=extreme, temperature=temperature)).token_id
        assert 0 <= token_id < 4


@pytest.mark.parametrize("temperature", [1e-320, 1e-300, 1e-20, 1e20, 1e300])
def test_an_extreme_temperature_is_survived(temperature: float) -> None:
    for limit in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"min_p": 1e-300}):
        token_id = sample([3.0, 3.0, 1.0, -math.inf], sampling(temperature=temperature, **limit)).token_id
        assert token_id in ((0, 1, 2) if temperature > 1 else (0, 1))


def test_with_every_token_masked_the_smallest_id_is_taken() -> None:
    for temperature in (0.0, 1.0):
        inputs = sampling(temperature=temperature, min_tokens=1, stop_token_ids=(0, 1, 2), logprobs=1)
        assert sample([1.0, 2.0, 3.0], inputs).token_id == 0


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_not_sampled_from(broken: float) -> None:
    for temperature in (0.0, 1.0):
        with pytest.raises(AssertionError, match="the model is broken"):
            sample([0.0, broken, 1.0], sampling(temperature=temperature))


@given(row=rows, num_top=st.integers(0, 30), output=tokens)
@settings(max_examples=100, deadline=None)
def test_logprobs_are_the_log_softmax_of_the_raw_logits(row: list[float], num_top: int, output: list[int]) -> None:
    inputs = sampling([0], output, logprobs=num_top, temperature=0.5, logit_bias={0: 100.0}, frequency_penalty=1.0)
    token = sample(row, inputs)
    expected = plain_logprobs(np.asarray(row, np.float32))
    assert token.logprob == pytest.approx(expected[token.token_id], abs=1e-6)
    best = sorted(range(len(row)), key=lambda t: (-row[t], t))[:num_top]
    assert [t for t, _ in token.top] == best
    assert [p for _, p in token.top] == pytest.approx([expected[t] for t in best], abs=1e-6)


def test_logprobs_of_impossible_tokens_are_finite() -> None:
    token = sample([0.0, -math.inf, -20000.0], sampling(temperature=0.0, logprobs=3))
    assert token == SampledToken(0, 0.0, ((0, 0.0), (2, -9999.0), (1, -9999.0)))


def test_no_logprobs_are_made_unless_asked_for() -> None:
    assert sample([0.0, 1.0], sampling(temperature=0.0)) == SampledToken(1)
    assert sample([0.0, 1.0], sampling(temperature=0.0, logprobs=0)).top == ()


@given(st.lists(st.integers(-30, 30), min_size=1, max_size=600), st.integers(1, 620))
@settings(max_examples=200, deadline=None)
def test_the_largest_are_those_of_a_sort(values: list[int], k: int) -> None:
    row = np.asarray(values, np.float32)
    assert largest(row, k).tolist() == sorted(range(len(row)), key=lambda t: (-values[t], t))[:k]


@pytest.mark.parametrize("k", [1, 2, 50, 191, 192, 193, 768, 5000, 12287, 12288, 20000])
def test_the_largest_are_those_of_a_sort_in_a_long_row(k: int) -> None:
    row = np.round(random_row(1, 12288), 1)
    assert largest(row, k).tolist() == np.argsort(-row, kind="stable")[:k].tolist()
