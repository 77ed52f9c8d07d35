"""The uniform numbers: frozen, and uniform along every direction that sampling moves in."""

import numpy as np
import pytest

from engine.sampling.uniform import uniform

SEEDS = [-(2**63), -1, 0, 1, 2, 12345, 2**63 - 1]


def test_seed_0_gives_the_published_sequence() -> None:
    # The first outputs of SplitMix64 seeded with 0, as its reference implementation prints them.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [uniform(0, p) for p in range(4)] == [(x >> 11) / 2**53 for x in published]


def test_the_numbers_never_change() -> None:
    # Frozen: a resumed stream, and one moved between versions, must go on with the same tokens.
    assert [(seed, position, uniform(seed, position).hex()) for seed, position in FROZEN] == [
        (seed, position, number) for (seed, position), number in FROZEN.items()
    ]


def _is_uniform(sample: np.ndarray, num_bins: int = 64) -> bool:
    """Chi-square over equal bins; 5 standard deviations, on fixed numbers: no luck is involved."""
    counts = np.bincount((sample * num_bins).astype(int), minlength=num_bins)
    expected = len(sample) / num_bins
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return abs(chi_square - (num_bins - 1)) < 5 * (2 * (num_bins - 1)) ** 0.5


@pytest.mark.parametrize("seed", SEEDS)
def test_positions_of_one_seed_are_uniform(seed: int) -> None:
    sample = np.array([uniform(seed, p) for p in range(20_000)])
    assert ((sample >= 0) & (sample < 1)).all()
    assert _is_uniform(sample)
    assert abs(np.corrcoef(sample[1:], sample[:-1])[0, 1]) < 0.03


@pytest.mark.parametrize("position", [0, 1, 2, 17, 4096, 131_072])
def test_neighbouring_seeds_are_uniform_at_one_position(position: int) -> None:
    sample = np.array([uniform(seed, position) for seed in range(-10_000, 10_000)])
    assert _is_uniform(sample)
    assert abs(np.corrcoef(sample[1:], sample[:-1])[0, 1]) < 0.03


def test_pairs_of_neighbours_fill_the_square() -> None:
    along_positions = np.array([uniform(7, p) for p in range(20_000)]).reshape(-1, 2)
    along_diagonal = np.array([[uniform(s, s), uniform(s + 1, s + 1)] for s in range(10_000)])
    for pairs in (along_positions, along_diagonal):
        cells = np.floor(pairs * 8) @ [8, 1]
        assert _is_uniform((cells + 0.5) / 64)


def test_no_two_seeds_share_their_numbers() -> None:
    numbers = {uniform(seed, position) for seed in range(-50, 50) for position in range(200)}
    assert len(numbers) == 100 * 200


FROZEN = {
    (-9223372036854775808, 0): "0x1.a42226b867f90p-2",
    (-1, 0): "0x1.4aeef0578a553p-1",
    (-1, 1): "0x1.690a488701cb2p-1",
    (0, 0): "0x1.c4415072f63b9p-1",
    (0, 1000000): "0x1.9c2fad756299ap-1",
    (1, 0): "0x1.7fdf0061bb85ap-1",
    (42, 17): "0x1.ca7c5d897e494p-3",
    (9223372036854775807, 0): "0x1.1d4fc02b40fa5p-1",
    (9223372036854775807, 131072): "0x1.0d2769d98d75ap-1",
}
