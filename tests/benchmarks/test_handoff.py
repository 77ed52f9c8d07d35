"""The hand-off's benchmark: what it reads out of metrics, compares, prints and writes."""

import json
from collections import Counter
from dataclasses import fields
from itertools import pairwise, permutations
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from benchmarks.handoff import Prompt, main, transfers_table, ttft_table
from benchmarks.handoff_copy import HANDOFF, PLAIN, CopyRate, Pools, copies_table, orders
from benchmarks.handoff_metrics import Transfers
from engine.stats import EngineStats
from kvtransfer.counters import ConsumerCounters, HolderCounters
from kvtransfer.events import TransferStats
from worker.metrics import Snapshot, WorkerMetrics


def scrape(*handoffs: TransferStats) -> str:
    """What a worker that took these hand-offs says."""
    idle = EngineStats(**dict.fromkeys((field.name for field in fields(EngineStats)), 1))
    metrics = WorkerMetrics(
        ("model", "decode-0", "decode"), lambda: Snapshot(idle, 0, HolderCounters(), ConsumerCounters())
    )
    for stats in handoffs:
        metrics.observe_transfer(stats)
    return generate_latest(metrics.registry).decode()


def test_a_handoff_is_the_difference_of_two_scrapes() -> None:
    first, second = TransferStats(0.5, 1000, 2), TransferStats(0.25, 3_000_000, 3)
    before, after = Transfers.read(scrape(first)), Transfers.read(scrape(first, second))
    assert before == Transfers(1, 0.5, 1000, 2)
    assert after.since(before) == Transfers(1, 0.25, 3_000_000, 3)
    assert after.since(before).gb_per_s == pytest.approx(0.012)


def test_a_scrape_that_reached_no_worker_is_an_error() -> None:
    with pytest.raises(ValueError, match="no worker was scraped: there is no tandem_kv_transfer_seconds_count"):
        Transfers.read("tandem_workers 0\n")


def prompt(ttft_ms: float, copying_s: float = 0.002) -> Prompt:
    return Prompt(ttft_ms, Transfers(1, copying_s, 20e6, 4))


def test_apart_is_compared_with_local_by_medians() -> None:
    results = {"apart": [prompt(105), prompt(110), prompt(900)], "local": [prompt(100), prompt(100), prompt(70)]}
    table = ttft_table(results)
    assert table.rows == [("apart", 110, 105, 900), ("local", 100, 70, 100)]
    assert table.notes[0].startswith("apart adds 10 ms, 10.0 % of 100 ms")


def test_a_copys_share_is_of_its_own_prompts_time() -> None:
    rows = {
        name: (median, least, most) for name, median, least, most in transfers_table([prompt(100), prompt(50)]).rows
    }
    assert rows["MB"] == (20, 20, 20)
    assert rows["segments"] == (4, 4, 4)
    assert rows["copying, GB/s"] == pytest.approx((10, 10, 10))
    assert rows["copying, % of the time to the first token"] == pytest.approx((3, 2, 4))


def test_a_prompt_without_a_handoff_of_its_own_is_no_measurement() -> None:
    with pytest.raises(AssertionError):
        transfers_table([Prompt(100, Transfers(0, 0, 0, 0))])


def test_copies_are_compared_with_the_plain_one_between_warm_pools() -> None:
    rates = [CopyRate("cold", 10, [4, 9, 4]), CopyRate(PLAIN, 10, [2, 1, 2]), CopyRate(HANDOFF, 10, [2.5, 2.5, 2.5])]
    assert copies_table(rates).column("of the plain one's speed, %") == pytest.approx([50, 100, 80])


def test_the_pools_that_are_copied_between_are_a_peers_and_an_own_one() -> None:
    pools = Pools(num_blocks=2, bytes_per_block=4096)
    assert (pools.source == 1).all()
    assert (pools.target == 0).all()
    assert not pools.source.flags.writeable
    pools.close()


@pytest.mark.parametrize("number", [1, 2, 6, 8])
def test_in_as_many_repeats_as_ways_each_comes_once_at_each_place_and_right_after_each_other(number: int) -> None:
    names = [str(i) for i in range(number)]
    rows = list(orders(names, number))
    assert all(sorted(row) == names for row in (*rows, *zip(*rows, strict=True)))
    neighbours = Counter(pair for row in rows for pair in pairwise(row))
    assert neighbours == Counter(permutations(names, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--copies", "0"], "argument --copies: at least 1, not 0"),
        (["--bytes-per-block", "0"], "argument --bytes-per-block: at least 1, not 0"),
        (["--rounds", "-1"], "argument --rounds: at least 0, not -1"),
        (["--input-len", "0"], "argument --input-len: at least 1, not 0"),
        (["--prompts", "0"], "argument --prompts: at least 1, not 0"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_the_copies_alone_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "handoff.json"
    small = ["--rounds", "0", "--input-len", "40", "--bytes-per-block", "4096", "--copies", "2"]
    main([*small, "--json", str(out)])
    written = json.loads(out.read_text())
    rows = written["tables"]["copies"]["rows"]
    assert next(row["copy"] for row in rows) == PLAIN
    assert {copy["nbytes"] for copy in written["copies"]} == {3 * 4096}
    assert all(len(copy["seconds"]) == 2 for copy in written["copies"])
    assert "GB/s" in capsys.readouterr().out
