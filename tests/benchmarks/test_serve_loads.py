"""Rates and requests that are planned, from fixed lengths and from traces."""

from itertools import pairwise

import pytest

from benchmarks.serve.loads import FixedLoad, PoissonTraceLoad, Trace, TraceLoad
from benchmarks.traces import TraceRequest
from cluster.cli.open_loop import LoadConfig

REQUESTS = [
    TraceRequest(0.0, 1000, 40, (0, 1)),
    TraceRequest(3.0, 600, 20, (0, 2)),
    TraceRequest(3.0, 700, 1, (0, 2)),
    TraceRequest(6.0, 5000, 600, tuple(range(10, 20))),
    TraceRequest(9.0, 10, 10, (30,)),
]


def trace(num_prompts: int = 4, **changes: float | int) -> Trace:
    return Trace.of(REQUESTS, num_prompts=num_prompts, **changes)  # type: ignore[arg-type]


def test_a_trace_is_sent_at_its_own_times_divided_by_the_speed() -> None:
    load = TraceLoad(trace(), speed=2.0)
    assert [request.due_s for request in load.plan(0)] == [0.0, 1.5, 1.5, 3.0]
    assert load.rate == pytest.approx(3 / 3.0)  # three follow the first in 3 s
    assert TraceLoad(trace(), speed=1.0).rate == pytest.approx(0.5)


def test_lengths_are_cut_after_they_are_scaled() -> None:
    halved = trace(length_scale=0.5, max_input_len=400, max_output_len=15)
    assert [(r.input_len, r.output_len) for r in halved.requests] == [(400, 15), (300, 10), (350, 1), (400, 15)]


def test_prompts_share_blocks_as_the_hash_ids_do_however_scaled() -> None:
    load = TraceLoad(trace(length_scale=0.125), speed=1.0)
    first, second, third, other = (request.prompt_token_ids for request in load.plan(7))
    assert first[:64] == second[:64] == third[:64]  # 512 × 0.125
    assert first[64:70] != second[64:70]
    assert third[: len(second)] == second
    assert other[:16] != first[:16]


def test_loads_of_different_seeds_share_no_prompt() -> None:
    loads = (
        TraceLoad(trace(), speed=1.0),
        PoissonTraceLoad(trace(), rate=1.0),
        FixedLoad(LoadConfig(4, 1.0, input_len=64, output_len=1, prefix_len=32)),
    )
    for load in loads:
        one, again, other = load.plan(1), load.plan(1), load.plan(2)
        assert one == again
        assert not {r.prompt_token_ids[:10] for r in one} & {r.prompt_token_ids[:10] for r in other}


def test_a_traces_requests_can_come_by_chance_at_a_rate() -> None:
    many = Trace.of([TraceRequest(0.0, 2, 1)] * 2000, num_prompts=2000)
    due = [request.due_s for request in PoissonTraceLoad(many, rate=4.0).plan(3)]
    gaps = [later - earlier for earlier, later in pairwise(due)]
    assert due[0] == 0.0
    assert sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_prompts": 6}, "num_prompts must be at most the trace's 5 requests, not 6"),
        ({"num_prompts": 0}, "num_prompts must be at least 1, not 0"),
        ({"max_input_len": 0}, "max_input_len must be at least 1, not 0"),
        ({"max_output_len": 0}, "max_output_len must be at least 1, not 0"),
        ({"length_scale": 0.0}, "length_scale must be above 0, not 0.0"),
    ],
)
def test_traces_that_cannot_be_meant_are_refused(changes: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        trace(**changes)  # type: ignore[arg-type]
    assert str(refused.value) == sentence


def test_requests_that_arrive_together_have_no_rate_of_their_own() -> None:
    together = Trace.of([TraceRequest(0.0, 5, 1)] * 3, num_prompts=3)
    with pytest.raises(ValueError, match="arrive together"):
        TraceLoad(together, speed=1.0)
    assert PoissonTraceLoad(together, rate=2.0).rate == 2.0
    for speed in (0.0, float("inf")):
        with pytest.raises(ValueError, match="trace_speed must be above 0"):
            TraceLoad(trace(), speed)
    with pytest.raises(ValueError, match="rates must be above 0"):
        PoissonTraceLoad(trace(), rate=-1.0)
