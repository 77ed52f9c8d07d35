"""`python -m benchmarks.serve`: order, medians, goodput, and the whole of it against scripted servers."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gaps import Panel, gaps_within, plot_gaps
from benchmarks.serve.__main__ import main
from benchmarks.serve.loads import FixedLoad
from benchmarks.serve.report import Summary
from benchmarks.serve.sweep import WARM_UP, Endpoint, Measured, turns
from cluster.cli.goodput import Objectives
from cluster.cli.load_report import LoadReport
from cluster.cli.open_loop import LoadConfig, RequestRecord, plan_load
from scripted_server import ScriptedServer, scripted_server


@pytest.fixture
def servers() -> Iterator[list[ScriptedServer]]:
    with scripted_server() as one, scripted_server() as other:
        yield [one, other]


def record(ttft_s: float) -> RequestRecord:
    return RequestRecord(
        due_s=1.0,
        sent_s=0.0,
        chunk_s=(ttft_s, ttft_s + 0.25),
        chunk_tokens=(1, 1),
        end_s=ttft_s + 0.25,
        num_prompt_tokens=8,
        num_cached_tokens=0,
        num_output_tokens=2,
    )


def measured(endpoint: str, rate: float, round_: int, *ttfts_s: float) -> Measured:
    records = [record(ttft_s) for ttft_s in ttfts_s]
    report = LoadReport.of(records, duration_s=2.0, objectives=Objectives(ttft_s=1.0))
    return Measured(endpoint, rate, round_, 0, report, records)


def test_servers_change_places_and_get_equal_loads_of_which_no_two_rounds_are_equal() -> None:
    endpoints = [Endpoint("ours", "http://a"), Endpoint("theirs", "http://b")]
    loads = [FixedLoad(LoadConfig(1, rate, input_len=1, output_len=1)) for rate in (1.0, 2.0, 3.0)]
    order = [(turn.load.rate, turn.endpoint.name, turn.seed) for turn in turns(endpoints, loads, rounds=2, seed=7)]
    assert order[:4] == [(1.0, "ours", 7), (1.0, "theirs", 7), (2.0, "theirs", 8), (2.0, "ours", 8)]
    assert Counter(seed for _, _, seed in order) == dict.fromkeys(range(7, 13), 2)
    assert Counter(name for _, name, _ in order[::2]) == {"ours": 3, "theirs": 3}  # who came first


def test_who_comes_first_for_a_load_changes_from_round_to_round() -> None:
    endpoints = [Endpoint(name, f"http://{name}") for name in ("a", "b", "c")]
    loads = [FixedLoad(LoadConfig(1, float(rate), input_len=1, output_len=1)) for rate in (1, 2, 3)]
    firsts = [(turn.load.rate, turn.endpoint.name) for turn in turns(endpoints, loads, rounds=3, seed=0)][::3]
    for rate in (1.0, 2.0, 3.0):
        assert {name for of, name in firsts if of == rate} == {"a", "b", "c"}


def test_no_load_finds_the_warm_ups_tokens_cached() -> None:
    [warm_up] = plan_load(WARM_UP)
    begins = [plan_load(replace(WARM_UP, seed=seed))[0].prompt_token_ids[:16] for seed in range(100)]
    assert warm_up.prompt_token_ids[:16] not in begins


def test_goodput_is_the_highest_rate_whose_median_attainment_is_enough() -> None:
    summary = Summary.of(
        [
            measured("ours", 1.0, 0, 0.5, 0.5),
            measured("ours", 2.0, 0, 0.5, 1.5),
            measured("ours", 2.0, 1, 0.5, 0.5),
            measured("ours", 2.0, 2, 0.5, 0.5),
            measured("ours", 4.0, 0, 1.5, 0.5),
            measured("theirs", 1.0, 0, 0.5, 1.5),
            measured("theirs", 2.0, 0, 1.5, 1.5),
            measured("theirs", 4.0, 0, 1.5, 1.5),
        ]
    )
    assert summary.attained("ours") == [(1.0, 1.0), (2.0, 1.0), (4.0, 0.5)]
    assert (summary.goodput("ours"), summary.goodput("theirs")) == (2.0, None)
    assert list(summary.sentences()) == [
        "ours: 90% of the requests keep their objectives up to 2 requests/s",
        "theirs: 90% of the requests keep their objectives at none of these rates",
    ]
    assert summary.medians["ours", 4.0]["good requests/s"] == 0.5  # one of two, in 2 s
    assert summary.medians["theirs", 2.0]["TTFT p50, ms"] == pytest.approx(1500.0)


def test_ratios_are_to_the_server_that_was_named_first() -> None:
    summary = Summary.of([measured("ours", 1.0, 0, 0.5), measured("theirs", 1.0, 0, 2.0)])
    ours, theirs, ratio = summary.tables()
    assert [table.title for table in (ours, theirs, ratio)] == ["ours", "theirs", "theirs / ours"]
    rows = dict(zip(ratio.columns[0].cells, ratio.columns[1].cells, strict=True))
    assert (rows["TTFT p50, ms"], rows["output tokens/s"]) == ("4.00", "1.00")


def test_each_server_is_measured_with_the_same_requests(
    servers: list[ScriptedServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results" / "serve.json"
    named = [f"--endpoint={name}={server.base_url}" for name, server in zip(("ours", "vllm"), servers, strict=True)]
    load = ["--rates", "500,1000", "--num-prompts", "3", "--input-len", "16", "--output-len", "3", "--rounds", "2"]
    main([*named, *load, "--goodput", "ttft:60000", "tpot:60000", "--json", str(out), "--plots", str(tmp_path)])
    ours, theirs = (Counter(tuple(r["prompt"]) for r in server.requests) for server in servers)
    assert ours == theirs
    assert len(ours) == 2 * 2 * 3 + 1  # two rates, two rounds, and one to warm up
    shown = capsys.readouterr().out
    assert "vllm / ours" in shown
    assert "ours: 90% of the requests keep their objectives up to 1000 requests/s" in shown
    found = json.loads(out.read_text())
    assert found["medians"]["vllm"]["goodput_at_attainment"] == {"share": 0.9, "requests_per_s": 1000.0}
    assert [(one["endpoint"], one["completed"]) for one in found["rounds"]] == [
        ("ours", 3), ("vllm", 3), ("vllm", 3), ("ours", 3), ("vllm", 3), ("ours", 3), ("ours", 3), ("vllm", 3),
    ]  # fmt: skip
    assert {path.name for path in tmp_path.glob("*.png")} == {"serve-attainment.png", "serve-itl.png"}


def test_a_traces_prefixes_reach_the_server(servers: list[ScriptedServer], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [(0, 600, [0, 1]), (10, 700, [0, 2]), (20, 9000, list(range(3, 21)))]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": t, "input_length": n, "output_length": 5, "hash_ids": ids}) + "\n"
            for t, n, ids in rows
        )
    )
    args = ["--trace", str(trace), "--trace-speed", "10", "--num-prompts", "3", "--max-input-len", "1000"]
    main(["--base-url", servers[0].base_url, *args, "--json", str(tmp_path / "out.json"), "--api-key", "secret"])
    first, second, third = sorted((r["prompt"] for r in servers[0].requests[1:]), key=len)
    assert [len(first), len(second), len(third)] == [600, 700, 1000]
    assert first[:512] == second[:512] != third[:512]
    found = (tmp_path / "out.json").read_text()
    assert json.loads(found)["medians"]["server"]["rates"][0]["rate"] == pytest.approx(10 * 2 / 0.02)
    assert "secret" not in found


def test_a_server_that_refuses_the_first_request_is_not_measured(servers: list[ScriptedServer]) -> None:
    servers[0].error = (503, "no workers")
    with pytest.raises(SystemExit, match=r"server: .* answered 503: no workers"):
        main(["--base-url", servers[0].base_url, "--rates", "1"])
    assert len(servers[0].requests) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "how many requests a second\\? give --rates, or a --trace"),
        (["--rates", "1", "--trace-speed", "2"], "--trace-speed belongs to --trace"),
        (["--trace", "no-such-file"], "no-such-file"),
        (["--trace", "x", "--input-len", "9"], "--input-len does not go with --trace"),
        (["--rates", "1,0"], "request_rate must be above 0 requests a second, not 0.0"),
        (["--rates", "1", "--rounds", "0"], "rounds must be at least 1, not 0"),
        (["--rates", "1", "--goodput", "itl:3"], "goodput: there are ttft, tpot, e2el"),
        (["--rates", "1", "--endpoint", "localhost"], "an endpoint is name=URL"),
        (["--rates", "1", "--endpoint", "a=http://x", "--endpoint", "a=http://y"], "two servers have the same name"),
        (["--rates", "1", "--endpoint", "a=http://x", "--base-url", "http://y"], "choose one of these ways"),
        (["--rates", "1", "--ours", "", "--base-url", "http://y"], "choose one of these ways"),
        (["--rates", "1", "--ours", "", "--peer-model", "x"], "go together: one of them is missing"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit, match=sentence):
        main(arguments)


def test_gaps_are_drawn_one_panel_a_server(tmp_path: Path) -> None:
    gaps = gaps_within([record(1.0)])
    assert [(gap.at_s, gap.length_s) for gap in gaps] == [(2.0, 0.25)]
    path = plot_gaps({"ours": Panel(gaps, [1.0]), "theirs": Panel([], [])}, "two", tmp_path / "plots" / "gaps.png")
    assert path.read_bytes().startswith(b"\x89PNG")
