"""`python -m benchmarks.growth`: what it measures, how it judges, what it prints and refuses."""

import json
from pathlib import Path

import pytest

from benchmarks.growth.__main__ import main
from benchmarks.growth.pool import bookkeeping_bytes
from benchmarks.growth.stepper import Stepper
from benchmarks.growth.verdict import Finding, constant, numbers, proportional
from benchmarks.paging.report import Column, Table
from engine.config import EngineConfig
from engine.hash_executor import HashExecutor

TINY = ["--blocks", "400,800,1600", "--requests", "4"]


def test_what_stays_is_constant_and_what_rises_above_the_bound_grows() -> None:
    assert constant("a", [2.0, 9.0, 2.2], 1.3).ratio == pytest.approx(1.1)
    assert constant("a", [2.0, 2.6], 1.3).holds
    assert not constant("a", [2.0, 2.7], 1.3).holds
    assert str(constant("a request", [2.0, 2.7], 1.3)) == "a request: 1.35 × (at most 1.3: GROWS)"


@pytest.mark.parametrize(
    ("power", "ratio"), [(1, 1.0), (2, (64**2 - 32**2) / 32 / ((64**2 - 1) / 63)), (0.5, (8 - 32**0.5) / 32 / (7 / 63))]
)
def test_a_line_is_told_from_a_parabola_by_the_upper_part_of_its_curve(power: float, ratio: float) -> None:
    sizes = [1, 2, 4, 8, 16, 32, 64]
    assert proportional("a", sizes, [5 + size**power for size in sizes], 1.3).ratio == pytest.approx(ratio)


@pytest.mark.parametrize(
    "values",
    [
        [5.0, 6.0, 7.0, 8.0, 5.0],  # no growth at all
        [5.0, 6.0, 7.0, 8.0, 4.0],
        [5.0, 9.0, 9.0, 9.0, 6.0],  # less in its upper part
        [5.0, 4.0, 8.0, 9.0, 4.5],  # less in both: the ratio of two negative slopes says nothing
    ],
)
def test_where_noise_is_larger_than_growth_nothing_is_said(values: list[float]) -> None:
    verdict = proportional("a step", [1, 2, 4, 8, 16], values, 1.3)
    assert (verdict.ratio, verdict.holds) == (None, False)
    assert str(verdict) == "a step: not measurable (too few or too noisy points)"


def test_nothing_is_compared_with_a_figure_of_zero() -> None:
    assert constant("a", [0.0, 2.0], 1.3).ratio is None


def test_a_curve_of_two_points_is_no_curve() -> None:
    with pytest.raises(ValueError, match="at least three points"):
        proportional("a", [1, 2], [1, 2], 1.3)


def test_verdicts_stand_below_their_table() -> None:
    table = Table("t", "", [Column("n"), Column("µs")])
    table.add(1, 5.0)
    table.add(2, 50.0)
    noted = Finding(table, [constant("it", numbers(table, "µs"), 2.0)]).noted()
    assert noted.findings()["notes"] == ["it: 10.00 × (at most 2: GROWS)"]


def stepper() -> Stepper:
    return Stepper(
        HashExecutor(vocab_size=100, block_size=4),
        EngineConfig(num_blocks=200, max_model_len=60, block_size=4, max_num_batched_tokens=64),
    )


def test_every_timed_step_has_all_requests_and_nothing_is_left_behind() -> None:
    timed = stepper()
    times = timed.decode([[seed, 1, 2, 3, 4] * 4 for seed in range(10)], num_steps=7)
    assert len(times) == 7
    assert all(took.executor > 0 and took.rest > 0 for took in times)
    timed.engine.check_integrity()
    assert timed.engine.stats().num_active_blocks == 0


def test_a_whole_request_fills_and_gives_back_its_blocks() -> None:
    timed = stepper()
    took = timed.whole(list(range(32)))
    assert took.executor > 0
    stats = timed.engine.stats()
    assert (stats.num_cached_blocks, stats.num_active_blocks) == (8, 0)


def test_a_cached_block_costs_more_bookkeeping_than_a_free_one() -> None:
    free, cached = (bookkeeping_bytes(512, cached=cached) for cached in (False, True))
    assert 50 < free < cached < 1000


def test_tables_verdicts_and_plots_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "results" / "growth.json"
    main(["--sections", "pool,directory", *TINY, "--json", str(out), "--plots", str(tmp_path)])
    written = json.loads(out.read_text())
    assert [row["cached"] for row in written["tables"]["pool"]["rows"]] == ["none", "all"] * 3
    assert [row["blocks known"] for row in written["tables"]["directory"]["rows"]] == [400, 800, 1600]
    assert {verdict["section"] for verdict in written["verdicts"]} == {"pool", "directory"}
    assert "bytes a block, all cached: " in capsys.readouterr().out
    for name in ("pool", "directory"):
        assert (tmp_path / f"growth-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_steps_of_the_model_are_measured_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "growth.json"
    sizes = ["--batches", "1,2,3", "--contexts", "16,32,48", "--steps", "2", "--rounds", "1"]
    main(["--sections", "batch,context", *sizes, "--json", str(out), "--plots", str(tmp_path)])
    tables = json.loads(out.read_text())["tables"]
    assert [row["requests"] for row in tables["batch"]["rows"]] == [1, 2, 3]
    assert [row["tokens"] for row in tables["context"]["rows"]] == [16, 32, 48]
    assert all(row["executor, ms"] > 0 for name in tables for row in tables[name]["rows"])
    for name in tables:
        assert (tmp_path / f"growth-{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sections", "pool,sun"], "unknown section 'sun'; there are batch, context, pool, directory"),
        (["--blocks", "10,5,20"], "at least three rising sizes, not 10,5,20"),
        (["--batches", "1,2"], "at least three rising sizes, not 1,2"),
        (["--batches", "1,2,x"], "argument --batches: whole numbers with commas between them, not '1,2,x'"),
        (["--batches", "0,1,2"], "numbers of at least 1, not 0,1,2"),
        (["--requests", "0"], "argument --requests: at least 1, not 0"),
        (["--steps", "0"], "argument --steps: at least 1, not 0"),
        (["--rounds", "0"], "argument --rounds: at least 1, not 0"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sections", "directory", "--blocks", "64,80,90"], "a directory knows more than 64 blocks, not 64"),
        (["--sections", "pool", "--blocks", "10,20,30"], "a pool has at least 480 blocks, not 10, for 16 requests"),
    ],
)
def test_sizes_too_small_to_measure_are_refused(arguments: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit, match=sentence):
        main(arguments)
