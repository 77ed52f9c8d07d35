"""Tokens in line and sums over the line, against sorting and adding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.device_line import Tournament, line, row_sums

values = st.one_of(st.integers(-9, 9).map(float), st.sampled_from([-np.inf, -0.0, 3e38, -3e38, 1e-45, -1e-45]))


@given(row=st.lists(values, min_size=1, max_size=60), data=st.data())
@settings(max_examples=300, deadline=None)
def test_the_line_is_that_of_a_stable_sort(row: list[float], data: st.DataObject) -> None:
    length = data.draw(st.integers(1, len(row)))
    expected = np.argsort(-np.asarray(row, np.float32), kind="stable")[:length]
    assert line(torch.tensor([row, row]), length).tolist() == [expected.tolist()] * 2


@given(weights=st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=40), data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_sum_is_reached_where_adding_up_reaches_it(weights: list[float], data: st.DataObject) -> None:
    ends = np.cumsum(weights)  # exact
    mass = data.draw(st.one_of(st.sampled_from(ends.tolist()), st.floats(0.0, float(ends[-1]))))
    tournament = Tournament(torch.tensor([weights], dtype=torch.float64))
    assert tournament.total.item() == ends[-1]
    assert tournament.first_reaching(torch.tensor([[mass]], dtype=torch.float64)).item() == np.searchsorted(ends, mass)


@pytest.mark.parametrize("n", [1, 2, 3, 1000, 128_256])
def test_a_rows_sum_is_the_same_in_every_bit_in_any_batch(n: int) -> None:
    rows = torch.rand((7, n), dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    sums = row_sums(rows)
    torch.testing.assert_close(sums[:, 0], rows.sum(dim=1))
    for i in range(7):
        assert torch.equal(row_sums(rows[i : i + 1]), sums[i : i + 1])
