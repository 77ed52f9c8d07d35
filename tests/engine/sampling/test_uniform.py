"""The uniform numbers: frozen, and uniform along every direction that sampling moves in."""

import numpy as np
import pytest

from engine.sampling.race import first_to_arrive
from engine.sampling.uniform import position_key, uniform

SEEDS = [-(2**63), -1, 0, 1, 2, 12345, 2**63 - 1]


def number(seed: int, position: int, token_id: int = 0) -> float:
    return uniform(position_key(seed, position), token_id)


def test_key_0_gives_the_published_sequence() -> None:
    # The first outputs of SplitMix64 seeded with 0, as its reference implementation prints them.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [uniform(0, token_id) for token_id in range(4)] == [((x >> 11) + 0.5) / 2**53 for x in published]


def test_the_numbers_never_change() -> None:
    # Frozen: a resumed stream, and one moved between versions, must go on with the same tokens.
    assert {place: number(*place).hex() for place in FROZEN} == FROZEN


def test_the_kernel_counts_with_the_same_numbers() -> None:
    """With equal weights the smallest number wins."""
    for key in (0, 1, 2**64 - 1, position_key(7, 3)):
        for ids in (np.arange(500), np.array([49_151]), np.arange(3, 100_000, 997)):
            smallest = min(ids.tolist(), key=lambda token_id, key=key: uniform(key, token_id))
            assert first_to_arrive(ids, np.full(len(ids), 0.25), key) == smallest


def _is_uniform(sample: np.ndarray, num_bins: int = 64) -> bool:
    """Chi-square over equal bins; 5 standard deviations, on fixed numbers: no luck is involved."""
    counts = np.bincount((sample * num_bins).astype(int), minlength=num_bins)
    expected = len(sample) / num_bins
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return abs(chi_square - (num_bins - 1)) < 5 * (2 * (num_bins - 1)) ** 0.5


def _is_random(sample: np.ndarray) -> bool:
    assert ((sample > 0) & (sample < 1)).all()
    return _is_uniform(sample) and abs(np.corrcoef(sample[1:], sample[:-1])[0, 1]) < 0.03


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_of_one_position_and_positions_of_one_token_are_uniform(seed: int) -> None:
    assert _is_random(np.array([number(seed, 17, token_id) for token_id in range(20_000)]))
    assert _is_random(np.array([number(seed, position, 17) for position in range(20_000)]))


@pytest.mark.parametrize("position", [0, 1, 2, 17, 4096, 131_072])
def test_neighbouring_seeds_are_uniform_at_one_place(position: int) -> None:
    assert _is_random(np.array([number(seed, position, 5) for seed in range(-10_000, 10_000)]))


def test_pairs_of_neighbours_fill_the_square() -> None:
    along_tokens = np.array([number(7, 1, t) for t in range(20_000)]).reshape(-1, 2)
    along_positions = np.array([number(7, p, 1) for p in range(20_000)]).reshape(-1, 2)
    along_diagonal = np.array([[number(s, s, s), number(s + 1, s + 1, s + 1)] for s in range(10_000)])
    for pairs in (along_tokens, along_positions, along_diagonal):
        cells = np.floor(pairs * 8) @ [8, 1]
        assert _is_uniform((cells + 0.5) / 64)


def test_no_two_places_share_their_numbers() -> None:
    numbers = {number(s, p, t) for s in range(-10, 10) for p in range(50) for t in range(50)}
    assert len(numbers) == 20 * 50 * 50


FROZEN = {
    (-9223372036854775808, 0, 0): "0x1.4bd8c93389028p-1",
    (-1, 0, 0): "0x1.2d1a3d8043feep-1",
    (-1, 1, 0): "0x1.63df80b6ea322p-1",
    (0, 0, 0): "0x1.4e0dba5e9a330p-1",
    (0, 0, 1): "0x1.6705460be882ap-1",
    (0, 1000000, 49151): "0x1.1b76c1a472f4ep-1",
    (1, 0, 0): "0x1.571565a7b500dp-2",
    (42, 17, 300): "0x1.630a964e7fddep-1",
    (9223372036854775807, 0, 0): "0x1.82e750e524679p-2",
    (9223372036854775807, 131072, 262143): "0x1.9f234097cc8e6p-1",
}
