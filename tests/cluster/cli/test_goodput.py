"""Objectives as they are written, and which requests keep them."""

import pytest

from cluster.cli.goodput import Objectives, highest_rate
from cluster.cli.open_loop import RequestRecord


def record(*chunk_s: float, end_s: float, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        due_s=0.0,
        sent_s=0.0,
        chunk_s=chunk_s,
        chunk_tokens=(1,) * len(chunk_s),
        end_s=end_s,
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_output_tokens=len(chunk_s),
        error=error,
    )


def test_objectives_are_written_as_vllm_writes_them() -> None:
    objectives = Objectives.parse(["ttft:2000", "tpot:99.5 e2el:30000"])
    assert objectives == Objectives(ttft_s=2.0, tpot_s=0.0995, e2e_s=30.0)
    assert str(objectives) == "ttft:2000 tpot:99.5 e2el:30000"
    assert str(Objectives.parse(["tpot:1"])) == "tpot:1"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("itl:5", "goodput: there are ttft, tpot, e2el, each as name:milliseconds, not 'itl:5'"),
        ("ttft", "goodput: a number of milliseconds, at least 0, must follow the colon of 'ttft'"),
        ("ttft:soon", "goodput: a number of milliseconds, at least 0, must follow the colon of 'ttft:soon'"),
        ("ttft:-1", "goodput: a number of milliseconds, at least 0, must follow the colon of 'ttft:-1'"),
        ("ttft:nan", "goodput: a number of milliseconds, at least 0, must follow the colon of 'ttft:nan'"),
        ("ttft:1 ttft:2", "goodput: ttft is given twice"),
    ],
)
def test_objectives_that_cannot_be_meant_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        Objectives.parse([text])
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("objectives", "kept"),
    [
        ("", True),
        ("ttft:1000", True),  # as long as allowed is not too long
        ("ttft:999", False),
        ("tpot:500", True),
        ("tpot:499", False),
        ("e2el:2250", True),
        ("e2el:2249", False),
        ("ttft:1000 tpot:499", False),
    ],
)
def test_a_request_keeps_every_objective_or_is_not_good(objectives: str, kept: bool) -> None:
    assert Objectives.parse([objectives]).are_kept_by(record(1.0, 1.5, 2.0, end_s=2.25)) is kept


def test_one_token_has_no_time_per_token_and_a_failed_request_is_never_good() -> None:
    assert Objectives(tpot_s=0.0).are_kept_by(record(1.0, end_s=1.0))
    assert not Objectives().are_kept_by(record(1.0, end_s=1.0, error="429"))


def test_goodput_is_the_highest_rate_with_enough_attainment() -> None:
    assert highest_rate([(0.5, 1.0), (1.0, 0.9), (2.0, 0.89)]) == 1.0
    assert highest_rate([(0.5, 1.0), (1.0, 0.9), (2.0, 0.89)], share=0.95) == 0.5
    assert highest_rate([(0.5, 0.2)]) is None
