"""What is counted of a round, what spoils one, and which arguments are refused."""

from typing import Any

import pytest

from benchmarks.cpu_time import CpuTime
from benchmarks.gaps import Gap, gaps_within
from benchmarks.interference.__main__ import main
from benchmarks.interference.figures import figures, medians, tokens_within
from benchmarks.interference.load import RoundLoad, RoundRecords, SpoiltRun, check_round
from cluster.cli.open_loop import RequestRecord

CPU = CpuTime(client=1.0, server={"worker": 30.0, "gateway": 8.0}, others=2.0)


def record(*chunk_s: float, due_s: float = 0.0, tokens: int = 1, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        due_s=due_s,
        sent_s=0.0,
        chunk_s=chunk_s,
        chunk_tokens=(tokens,) * len(chunk_s),
        end_s=chunk_s[-1] if chunk_s else 0.0,
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_output_tokens=tokens * len(chunk_s),
        error=error,
    )


def load(**changes: Any) -> RoundLoad:
    values = {"rate": 1.0, "seed": 0, "num_streams": 1, "lead_s": 10.0, "window_s": 20.0} | changes
    return RoundLoad(**values)


def test_prompts_arrive_within_the_window_at_the_rate_asked_for() -> None:
    planned = load(rate=5.0, window_s=400.0).plan_prompts()
    assert all(10.0 < prompt.due_s < 410.0 for prompt in planned)
    assert len(planned) == pytest.approx(5.0 * 400.0, rel=0.1)
    assert {(len(prompt.prompt_token_ids), prompt.output_len) for prompt in planned} == {(1000, 16)}


def test_every_arrangement_gets_the_same_load_and_every_round_another() -> None:
    assert load(seed=1).plan_prompts() == load(seed=1).plan_prompts()
    assert load(seed=1).plan_streams() == load(seed=1).plan_streams()
    first, second = (load(seed=seed).plan_prompts() for seed in (1, 2))
    # Or a prefix cache would have what a round before has left.
    assert not {p.prompt_token_ids[:16] for p in first} & {p.prompt_token_ids[:16] for p in second}
    assert [p.due_s for p in first] != [p.due_s for p in second]


def test_a_gap_belongs_to_the_window_that_it_begins_in() -> None:
    stream = record(8.0, 9.5, 10.0, 29.0, 33.0, 34.0, due_s=0.5)  # first at 8.5, last at 34.5
    assert gaps_within([stream], 10.0, 30.0) == [Gap(10.0, 0.5), Gap(10.5, 19.0), Gap(29.5, 4.0)]


def test_tokens_belong_to_the_window_that_they_come_in() -> None:
    assert tokens_within([record(9.9, 10.0, 29.9, 30.0, tokens=3)], 10.0, 30.0) == 6


def test_figures_are_of_the_window_and_in_their_units() -> None:
    stream = record(1.0, 9.0, *(10.0 + 0.1 * i for i in range(250)))  # 8 s without a token before the window
    prompts = [record(1.0, due_s=12.0), record(3.0, due_s=14.0)]
    found = figures(RoundRecords([stream], prompts, CPU), load())
    assert found["ITL of the streams, max, ms"] == pytest.approx(100.0)
    assert found["TTFT of the prompts, p50, ms"] == pytest.approx(2000.0)
    assert found["streams, tokens/s"] == pytest.approx(10.0)
    assert found["processor time of the server, cores"] == pytest.approx(1.9)  # 38 s in 20 s
    assert found["of anything else, cores"] == pytest.approx(0.1)


def test_medians_are_figure_by_figure() -> None:
    rounds = [{"a": 1.0, "b": 9.0}, {"a": 3.0, "b": 7.0}, {"a": 2.0, "b": 8.0}]
    assert medians({"one": rounds, "none yet": []}) == {"one": {"a": 2.0, "b": 8.0}}


@pytest.mark.parametrize(
    ("stream", "sentence"),
    [
        (record(1.0, 31.0), None),
        (record(11.0, 31.0), "a stream began 11.0 s after it was sent; make the lead longer"),
        (record(1.0, 29.0), "a stream ended after 29.0 s, within the window; make streams longer"),
        (record(error="the worker died"), "a request failed: the worker died"),
    ],
)
def test_a_round_whose_streams_do_not_run_through_the_window_is_refused(
    stream: RequestRecord, sentence: str | None
) -> None:
    records = RoundRecords([stream], [record(1.0, due_s=12.0)], CPU)
    if sentence is None:
        check_round(records, load())
    else:
        with pytest.raises(SpoiltRun) as spoilt:
            check_round(records, load())
        assert str(spoilt.value) == sentence


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rounds", "0"], "--rounds must be at least 1, not 0"),
        (["--streams", "0"], "num_streams must be at least 1, not 0"),
        (["--rate", "0"], "rate must be above 0, not 0.0"),
        (["--rate", "-1"], "rate must be above 0, not -1.0"),
        (["--window", "0"], "window_s must be above 0, not 0.0"),
        (["--peer-python", "python"], "--peer-python and --peer-model go together: one of them is missing"),
        (
            ["--only", "vllm-256"],
            "there are apart, colocated, not 'vllm-256'; the peer needs --peer-python and --peer-model",
        ),
        (["--only", "apart,alone"], "there are apart, colocated, not 'alone'"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused_before_anything_starts(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.interference.__main__._stay_on_two_cores", lambda: (0, 1))
    with pytest.raises(SystemExit, match=sentence):
        main(arguments)
