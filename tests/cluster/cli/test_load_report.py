"""Percentiles against numpy's, and what a report sums up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cli.goodput import Objectives
from cluster.cli.load_report import LoadReport, percentile
from cluster.cli.open_loop import RequestRecord


@given(
    times=st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=50),
    percent=st.sampled_from([0, 1, 50, 90, 99, 100]),
)
def test_percentile_is_numpys(times: list[float], percent: int) -> None:
    assert percentile(sorted(times), percent) == pytest.approx(float(np.percentile(times, percent)), abs=1e-9)


def record(end_s: float, *, num_output_tokens: int = 2, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        due_s=0.0,
        sent_s=0.0,
        chunk_s=() if error else (end_s / 2, end_s)[:num_output_tokens],
        chunk_tokens=() if error else (1, 1)[:num_output_tokens],
        end_s=end_s,
        num_prompt_tokens=10,
        num_cached_tokens=4,
        num_output_tokens=num_output_tokens,
        error=error,
    )


def test_failed_requests_count_as_such_and_nowhere_else() -> None:
    report = LoadReport.of([record(2.0), record(4.0), record(9.0, error="429")], duration_s=4.0)
    assert (report.completed, report.failed) == (2, 1)
    assert (report.prompt_tokens, report.cached_tokens, report.output_tokens) == (20, 8, 4)
    assert (report.requests_per_s, report.output_tokens_per_s) == (0.5, 1.0)
    assert report.e2e is not None
    assert report.e2e.max == 4.0


def test_answers_of_one_token_have_no_time_per_token() -> None:
    report = LoadReport.of([record(1.0, num_output_tokens=1)], duration_s=1.0)
    assert report.tpot is None
    assert report.itl is None
    assert report.as_json()["itl_s"] is None


def test_good_requests_are_those_that_kept_all_objectives_of_all_that_were_sent() -> None:
    records = [record(2.0), record(4.0), record(4.4), record(1.0, error="429")]
    report = LoadReport.of(records, duration_s=8.0, objectives=Objectives(ttft_s=2.0, e2e_s=10.0))
    assert (report.good, report.goodput, report.attainment) == (2, 0.25, 0.5)
    assert report.as_json()["slo_attainment"] == 0.5


def test_nothing_is_said_of_objectives_that_nobody_gave() -> None:
    report = LoadReport.of([record(2.0)], duration_s=2.0)
    assert (report.good, report.goodput, report.attainment) == (None, None, None)
