"""Functions that vectorize, against NumPy's in float64."""

import numpy as np

from engine.cpu_code import Array, kernel
from engine.cpu_math import exp_below_zero


@kernel
def exp_of_each(x: Array, out: Array) -> None:
    for i in range(len(x)):
        out[i] = exp_below_zero(x[i])


def exp(x: Array) -> Array:
    out = np.empty_like(x)
    exp_of_each(x, out)
    return out


def test_the_exponential_is_numpys_within_its_bound() -> None:
    x = -np.concatenate([np.linspace(0, 1, 50_001), np.geomspace(1e-30, 87, 50_001)]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.all(np.abs(exp(x) / exact - 1) <= 3e-7 + 6e-8 * np.abs(x))


def test_the_exponential_of_zero_is_one_and_far_below_nearly_nothing() -> None:
    near, far, infinite = exp(np.array([0.0, -1e30, -np.inf], np.float32))
    assert near == 1.0
    assert 0 < far <= 1.2e-38
    assert far == infinite


def test_nan_stays_nan() -> None:
    assert np.isnan(exp(np.array([np.nan], np.float32)))[0]
