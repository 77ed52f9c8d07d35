"""The race in tensor operations, against the numbers and the race of the other sampler."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import race
from engine.sampling.device_race import first_to_arrive, signed, uniforms
from engine.sampling.uniform import uniform

words = st.integers(0, 2**64 - 1)


@given(keys=st.lists(words, min_size=1, max_size=4), ids=st.lists(st.integers(0, 2**31), min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_numbers_are_those_of_seed_position_and_token(keys: list[int], ids: list[int]) -> None:
    numbers = uniforms(torch.tensor([[signed(key)] for key in keys]), torch.tensor([ids]))
    assert numbers.tolist() == [[uniform(key, token_id) for token_id in ids] for key in keys]


@given(key=words, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=300, deadline=None)
def test_the_winner_is_the_other_races(key: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.choice(200_000, 50, replace=False))
    weights = np.exp(rng.standard_normal(50) * 4)
    weights[rng.integers(0, 50, 10)] = 0.0
    place = first_to_arrive(torch.tensor(ids)[None], torch.tensor(weights)[None], torch.tensor([[signed(key)]]))
    assert ids[place.item()] == race.first_to_arrive(ids, weights, key)
