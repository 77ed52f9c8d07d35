"""The sampler for a GPU, on the device "cpu", against the sampler for a CPU; and what it would make a GPU wait for."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.executor import SampledToken, SamplingInput
from engine.sampling import device_slabs
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from plain_sampler import OneMask, plain_adjusted, plain_kept


def sampling(
    prompt: Sequence[int] = (1, 2), output: Sequence[int] = (), max_tokens: int = 1000, **params: Any
) -> SamplingInput:
    return SamplingInput(SamplingParams(max_tokens=max_tokens, **params), prompt, output)


def random_rows(seed: int, num_rows: int, vocab_size: int, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((num_rows, vocab_size)) * spread).astype(np.float32)


def assert_same(rows: np.ndarray | torch.Tensor, inputs: Sequence[SamplingInput]) -> list[SampledToken]:
    """Tokens equal; logprobs too, but for the last bits of exp, log and a sum."""
    logits = torch.tensor(np.asarray(rows, np.float32))
    actual, expected = DeviceSampler().sample(logits, inputs), Sampler().sample(logits, inputs)
    for a, e in zip(actual, expected, strict=True):
        assert (a.token_id, [t for t, _ in a.top]) == (e.token_id, [t for t, _ in e.top])
        assert (a.logprob is None) == (e.logprob is None)
        if a.logprob is not None and e.logprob is not None:
            assert [a.logprob, *(p for _, p in a.top)] == pytest.approx([e.logprob, *(p for _, p in e.top)], abs=1e-12)
    return actual


# Coarse values, so that ties are common; some impossible.
values = st.one_of(st.integers(-12, 12).map(lambda x: x / 2), st.sampled_from([-math.inf, -0.0]))
rows_of_one_length = st.integers(2, 24).flatmap(
    lambda n: st.lists(st.lists(values, min_size=n, max_size=n), min_size=1, max_size=4)
)
tokens = st.lists(st.integers(0, 1), max_size=6)
params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-300, 0.1, 0.7, 1.0, 1.5, 1e20]),
        "top_k": st.integers(0, 26),
        "top_p": st.sampled_from([0.0, 1e-12, 0.05, 0.33, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([1e-300, 0.5, 1.0, 1.3, 1e40]),
        "presence_penalty": st.sampled_from([-1.5, 0.0, 0.75]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.25]),
        "logit_bias": st.dictionaries(st.integers(-1, 30), st.sampled_from([-100.0, -1.0, 0.1, 2.5]), max_size=3),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.sampled_from([(), (0,), (1, 99), (-1, 0, 1)]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "logprobs": st.sampled_from([None, None, 0, 1, 5, 30]),
    }
)


def is_on_an_edge(row: Sequence[float], inputs: SamplingInput) -> bool:
    """Of the nucleus: there the order of additions decides."""
    top_p = inputs.params.top_p
    adjusted = plain_adjusted(np.asarray(row, np.float32), inputs)
    if inputs.params.is_greedy or max(adjusted) == -math.inf or top_p == 1.0:
        return False
    kept = plain_kept(adjusted, replace(inputs.params, top_p=1.0))
    return bool(np.abs(np.cumsum([p for _, p in kept])[:-1] - top_p).min(initial=1.0) <= 1e-12)


@given(rows=rows_of_one_length, data=st.data())
@settings(max_examples=300, deadline=None)
def test_tokens_and_logprobs_are_the_other_samplers(rows: list[list[float]], data: st.DataObject) -> None:
    vocab_size = len(rows[0])
    masks = st.none() | st.sets(st.integers(0, vocab_size - 1), min_size=1).map(lambda ids: OneMask(ids, vocab_size))
    inputs = [
        # Mixed batches: any kind beside any other.
        replace(sampling(data.draw(tokens), data.draw(tokens), **data.draw(params)), matcher=data.draw(masks))
        for _ in rows
    ]
    with np.errstate(invalid="ignore", over="ignore"):
        assume(all(max(row) > -math.inf for row in rows))
        assume(not any(is_on_an_edge(row, s) for row, s in zip(rows, inputs, strict=True)))
        assert_same(np.asarray(rows, np.float32), inputs)


LIMITS: dict[str, dict[str, Any]] = {
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
    "short": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "all": {"temperature": 0.8, "min_p": 0.001, "top_k": 500, "top_p": 0.95},
    "greedy": {"temperature": 0.0},
}


@pytest.mark.parametrize("spread", [0.0, 0.05, 3.0, 12.0])
def test_thousands_of_draws_from_a_large_vocabulary_are_the_other_samplers(spread: float) -> None:
    row = np.round(random_rows(3, 1, 5000, spread)[0], 2)  # rounded, so that there are ties at every edge
    row[::7] = -np.inf
    inputs = [sampling(seed=seed, **limits) for seed in range(60) for limits in LIMITS.values()]
    assert_same(np.broadcast_to(row, (len(inputs), 5000)), inputs)


def test_penalties_over_long_histories_are_the_other_samplers() -> None:
    rng = np.random.default_rng(0)
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.3, "presence_penalty": -0.2, "top_p": 0.99, "logprobs": 20},
        {"presence_penalty": 1.1, "temperature": 0.0},
        {"repetition_penalty": 0.7, "frequency_penalty": -0.4, "logit_bias": {5: 3.3, 9: -100.0}, "top_k": 50},
        {"logit_bias": dict.fromkeys(range(300), -2.25), "min_tokens": 500, "stop_token_ids": (1, 2, 3)},
        {},
    ]
    inputs = [
        sampling(rng.integers(0, 3000, 800).tolist(), (rng.integers(0, 60, 400) * 50).tolist(), seed=i, **kinds[i % 6])
        for i in range(60)
    ]
    assert_same(random_rows(1, 60, 3000), inputs)


def test_a_vocabulary_of_128k_is_sampled_alike() -> None:
    inputs = [sampling([5] * 9, [7, 7], seed=i, logprobs=3, **limits) for i, limits in enumerate(LIMITS.values())]
    assert_same(random_rows(5, len(inputs), 128_256), inputs)


@pytest.mark.parametrize("temperature", [1e-320, 1e-300, 1e-20, 1e20, 1e300])
@pytest.mark.parametrize("limit", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"min_p": 1e-300}], ids=str)
def test_an_extreme_temperature_is_survived_alike(temperature: float, limit: dict[str, Any]) -> None:
    inputs = [sampling(temperature=temperature, seed=seed, **limit) for seed in range(20)]
    assert_same(np.broadcast_to(np.float32([3.0, 3.0, 1.0, -math.inf]), (20, 4)), inputs)


def test_both_zeros_are_equal() -> None:
    inputs = [sampling(seed=seed, top_k=k, logprobs=3) for seed in range(20) for k in (0, 2, 3)]
    assert_same(np.broadcast_to(np.float32([-0.0, 0.0, -0.0, 0.0, -1.0]), (60, 5)), inputs)


def test_with_every_token_masked_the_smallest_id_is_taken() -> None:
    inputs = [
        sampling(temperature=temperature, min_tokens=1, stop_token_ids=(0, 1, 2), logprobs=1, **limit)
        for temperature in (0.0, 1.0)
        for limit in ({}, {"top_k": 2}, {"top_p": 0.5})
    ]
    answers = assert_same(np.broadcast_to(np.float32([1.0, 2.0, 3.0]), (6, 3)), inputs)
    assert [a.token_id for a in answers] == [0] * 6


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_logits_that_are_no_numbers_are_not_sampled_from(broken: float, limits: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0], [0.0, broken, 1.0]])
    with pytest.raises(AssertionError, match=f"the largest logit is {broken}: the model is broken"):
        DeviceSampler().sample(logits, [sampling(**limits), sampling(logprobs=1, **limits)])


def test_a_token_outside_the_vocabulary_is_seen_before_the_device_is() -> None:
    for history in ({"prompt": [3]}, {"output": [-1]}):
        with pytest.raises(IndexError, match="vocabulary 3"):
            DeviceSampler().sample(torch.zeros(1, 3), [sampling(**history, repetition_penalty=2.0)])


def test_a_row_is_sampled_alike_alone_and_among_others() -> None:
    inputs = [
        sampling([4, 5], [6], seed=i, **{"logprobs": 4, **limits}, repetition_penalty=1.1 if i % 2 else 1.0)
        for i, limits in enumerate([*LIMITS.values()] * 2)
    ]
    logits = torch.tensor(random_rows(6, len(inputs), 3000))
    together = DeviceSampler().sample(logits, inputs)
    turned = DeviceSampler().sample(logits.flip(0), inputs[::-1])[::-1]
    alone = [DeviceSampler().sample(logits[i : i + 1], [inputs[i]])[0] for i in range(len(inputs))]
    # A row alone asks for no more best tokens than it wants; logprobs are equal in every bit.
    assert together == alone == turned


def test_rows_are_worked_on_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [sampling(seed=i, logprobs=2, **limits) for i, limits in enumerate([*LIMITS.values()] * 3)]
    logits = torch.tensor(random_rows(7, len(inputs), 2000))
    at_once = DeviceSampler().sample(logits, inputs)
    monkeypatch.setattr(device_slabs, "ENTRIES_AT_ONCE", 5000)
    assert DeviceSampler().sample(logits, inputs) == at_once


def test_logits_are_not_changed() -> None:
    logits = torch.tensor(random_rows(0, 1, 100))
    before = logits.clone()
    wishes = {"repetition_penalty": 2.0, "logit_bias": {3: 5.0}, "min_tokens": 2, "stop_token_ids": (7,)}
    DeviceSampler().sample(logits, [sampling(output=[4], frequency_penalty=1.0, logprobs=2, **wishes)])
    assert torch.equal(logits, before)


def test_no_rows_are_no_tokens() -> None:
    assert DeviceSampler().sample(torch.zeros(0, 5), []) == []


# --- what a GPU would be waited for


class Copies(TorchDispatchMode):
    """Notes where tensors are copied, and refuses what could not be known without waiting for the device.

    The device here is "meta", where nothing has a value, so that whatever needs one fails by itself too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(word in name for word in ("local_scalar", "nonzero", "unique", "masked_select", "equal."))
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        devices = {str(t.device) for t in tensors}
        if name.startswith(("aten.index.", "aten.index_put")):
            chosen = [t for t in tree_leaves(args[1]) if t is not None]
            assert all(t.dtype == torch.int64 for t in chosen), "how many are meant is only known on the device"
        if "_to_copy" in name and (kwargs or {}).get("device") is not None:
            self.copies.append((str(args[0].device), str(kwargs["device"])))
        else:
            assert len(devices) <= 1, f"{name} brings a tensor from {devices}"
        return func(*args, **(kwargs or {}))


def masked(inputs: SamplingInput, token_ids: Collection[int] = range(0, 2000, 3)) -> SamplingInput:
    return replace(inputs, matcher=OneMask(token_ids, 2000))


def copies_of(inputs: Sequence[SamplingInput]) -> list[tuple[str, str]]:
    with Copies() as mode, pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        DeviceSampler().sample(torch.empty((len(inputs), 2000), device="meta"), inputs)
    return mode.copies


def test_a_step_of_every_kind_makes_one_copy_there_and_one_back() -> None:
    wishes = {"repetition_penalty": 2.0, "logit_bias": {3: 5.0}, "min_tokens": 9, "stop_token_ids": (7,)}
    inputs = [
        sampling([1, 2], [3, 3], frequency_penalty=0.5, logprobs=logprobs, **wishes, **limits)
        for limits in LIMITS.values()
        for logprobs in (None, 0, 5)
    ]
    assert copies_of(inputs) == [("cpu", "meta"), ("meta", "cpu")]
    assert copies_of([masked(s) for s in inputs]) == [("cpu", "meta"), ("meta", "cpu")]


def test_a_greedy_step_makes_one_copy_back_and_none_there() -> None:
    assert copies_of([sampling(temperature=0.0)] * 8) == [("meta", "cpu")]


@pytest.mark.parametrize("only", [{"top_k": 5}, {}, {"min_p": 0.1}], ids=str)
def test_rows_that_need_no_order_are_not_sorted(only: dict[str, Any]) -> None:
    class Sorts(Copies):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert "sort" not in str(func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    with Sorts(), pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        DeviceSampler().sample(torch.empty((3, 2000), device="meta"), [sampling(**only)] * 3)
