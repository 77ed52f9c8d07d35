"""`tandem bench`, against a scripted server."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cluster.cli.app import app


def bench(server: Any, *args: str) -> Result:
    return CliRunner().invoke(app, ["bench", "--base-url", f"{server.base_url}/v1", *args])


def test_report_counts_what_the_server_said(server: Any, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    result = bench(server, "--num-prompts", "5", "--input-len", "10", "--output-len", "3", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "5 requests, all at once" in result.stdout
    report = json.loads(file.read_text())
    assert (report["model"], report["completed"], report["failed"]) == ("scripted", 5, 0)
    assert (report["prompt_tokens"], report["cached_tokens"], report["output_tokens"]) == (50, 20, 15)
    assert report["output_tokens_per_s"] == pytest.approx(15 / report["duration_s"])
    assert 0 < report["ttft_s"]["p50"] <= report["e2e_s"]["p50"] <= report["duration_s"]
    assert report["load"]["num_requests"] == 5


def test_requests_are_as_long_and_as_similar_as_asked(server: Any) -> None:
    args = [
        "--num-prompts",
        "4",
        "--input-len",
        "32",
        "--prefix-len",
        "16",
        "--output-len",
        "7",
        "--request-rate",
        "1000",
    ]
    assert bench(server, *args).exit_code == 0
    prompts = [tuple(request["prompt"]) for request in server.requests]
    assert {len(prompt) for prompt in prompts} == {32}
    assert len({prompt[:16] for prompt in prompts}) == 1
    assert len({prompt[16:] for prompt in prompts}) == 4
    assert {(request["max_tokens"], request["ignore_eos"], request["model"]) for request in server.requests} == {
        (7, True, "scripted")
    }


def test_goodput_counts_the_requests_that_kept_their_objectives(server: Any, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    result = bench(server, "--num-prompts", "4", "--goodput", "ttft:60000 tpot:60000", "--json", str(file))
    assert "100.0% of the requests kept ttft:60000 tpot:60000" in result.stdout, result.output
    report = json.loads(file.read_text())
    assert report["slo_attainment"] == 1.0
    assert report["goodput_requests_per_s"] == report["requests_per_s"]
    assert "0.0% of the requests kept e2el:0" in bench(server, "--goodput", "e2el:0").stdout


def test_failed_requests_fail_the_command_after_the_report(server: Any) -> None:
    server.error = (429, "the queue is full")
    result = bench(server, "--num-prompts", "3")
    assert result.exit_code == 1
    assert "3 of 3 requests failed, the first because:" in result.stderr
    assert "429: the queue is full" in result.stderr
    assert "time to first token" in result.stdout


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--num-prompts", "0"], "num_requests must be at least 1, not 0"),
        (["--request-rate", "0"], "request_rate must be above 0 requests a second, not 0.0"),
        (["--goodput", "tpot"], "goodput: a number of milliseconds, at least 0, must follow the colon of 'tpot'"),
        (["--input-len", "8", "--prefix-len", "9"], "prefix_len must be at most input_len (8), not 9"),
    ],
)
def test_load_that_cannot_be_meant_is_refused(server: Any, args: list[str], sentence: str) -> None:
    result = bench(server, *args)
    assert (result.exit_code, result.stderr) == (2, f"tandem: {sentence}\n")
    assert server.requests == []
